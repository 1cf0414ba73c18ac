"""A picture of several replays beside each other; needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from commutator_replay.planners import PlanReport
from commutator_replay.report import Report

mpl.use("Agg")
# In an SVG text stays text, and equal figures give equal files.
mpl.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "replay"})

_CHOSEN, _OTHER, _SECOND, _ATTAINED = "#2f6f9f", "#b9c4cc", "#e39b3a", "#5a9e6f"
_LINES = (_OTHER, _SECOND, _CHOSEN, _ATTAINED, "#a05a9e")


def draw(reports: Sequence[Report], ideal: float, path: Path) -> None:
    """Write cached tokens beside the ideal, and times to the first token, as an SVG, PNG or PDF."""
    names = [report.policy for report in reports]
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6), constrained_layout=True)
    cached = [report.cached_ratio * 100 for report in reports]
    left.bar(names, cached, color=[_CHOSEN, *[_OTHER] * (len(names) - 1)])
    left.axhline(ideal * 100, color=_SECOND, linestyle="--")
    left.text(len(names) - 0.5, ideal * 100, "infinite cache", ha="right", va="bottom")
    left.set_ylabel("prompt tokens found in a cache, %")
    left.set_ylim(0, ideal * 115)
    places = range(len(names))
    p50, p99 = ([getattr(r, field) for r in reports] for field in ("ttft_p50_s", "ttft_p99_s"))
    # A bar's length means nothing on a logarithmic axis, so points.
    right.vlines(places, p50, p99, color=_OTHER)
    right.plot(places, p50, "o", label="p50", color=_CHOSEN)
    right.plot(places, p99, "o", label="p99", color=_SECOND)
    right.set_xticks(list(places), names)
    right.margins(x=0.15)
    right.set_yscale("log")
    right.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    right.yaxis.set_major_formatter("{x:g}")
    right.yaxis.set_minor_formatter("")
    right.set_ylabel("time to first token, s")
    right.legend(frameon=False)
    for axes in (left, right):
        axes.tick_params(axis="x", labelrotation=20)
    _save(figure, path)


def draw_sweep(sweep: Mapping[float, Sequence[Report]], path: Path) -> None:
    """Write goodput and p99 inter-token latency over the request rate, a line for each policy."""
    rates = list(sweep)
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6), constrained_layout=True)
    left.plot(rates, rates, color="black", linestyle=":", linewidth=1, label="offered")
    for number, first in enumerate(sweep[rates[0]]):
        ours = [reports[number] for reports in sweep.values()]
        style = {"label": first.policy, "color": _LINES[number % len(_LINES)], "marker": "."}
        left.plot(rates, [one.good_ratio * r for one, r in zip(ours, rates, strict=True)], **style)
        right.plot(rates, [one.itl_p99_s * 1000 for one in ours], **style)
    left.set_ylabel("goodput, requests/s")
    left.legend(frameon=False)
    right.set_ylabel("p99 inter-token latency, ms")
    right.set_yscale("log")
    right.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    right.yaxis.set_major_formatter("{x:g}")
    right.yaxis.set_minor_formatter("")
    for axes in (left, right):
        axes.set_xlabel("requests/s")
    _save(figure, path)


def draw_plans(reports: Sequence[PlanReport], path: Path) -> None:
    """Write demand over time; of each planner its workers, their need, and what was attained."""
    figure, axes = plt.subplots(
        len(reports) + 1,
        1,
        figsize=(10, 2 + 1.8 * len(reports)),
        sharex=True,
        squeeze=False,
        constrained_layout=True,
    )
    first, *others = (row[0] for row in axes)
    minutes = [sample.time_s / 60 for sample in reports[0].samples]
    offered = [sample.requests_per_s for sample in reports[0].samples]
    first.plot(minutes, offered, color=_OTHER, linewidth=0.8)
    first.set_ylabel("requests/s")
    for report, one in zip(reports, others, strict=True):
        times = [sample.time_s / 60 for sample in report.samples]
        needs = [sample.need for sample in report.samples]
        ready = [sample.ready for sample in report.samples]
        one.step(times, needs, where="post", color=_SECOND, linewidth=0.8, label="needed")
        one.step(times, ready, where="post", color=_CHOSEN, label="ready")
        one.set_ylabel("workers")
        one.set_title(
            f"{report.planner}: {report.attained:.1%} in {report.worker_hours:.1f} worker-hours",
            loc="left",
            fontsize="medium",
        )
        one.plot([], [], color=_ATTAINED, label="in time")
        one.legend(frameon=False)
        right = one.twinx()
        attained = _by_minute([(sample.time_s, sample.attained) for sample in report.samples])
        right.plot(
            [minute for minute, _ in attained],
            [part * 100 for _, part in attained],
            color=_ATTAINED,
            linewidth=0.8,
        )
        right.set_ylim(0, 105)
        right.set_ylabel("in time, %")
    axes[-1][0].set_xlabel("minutes")
    _save(figure, path)


def _by_minute(seen: Sequence[tuple[float, float | None]]) -> list[tuple[int, float]]:
    """The mean of each minute in which anything was answered."""
    minutes: dict[int, list[float]] = {}
    for time_s, part in seen:
        if part is not None:
            minutes.setdefault(int(time_s // 60), []).append(part)
    return [(minute, sum(parts) / len(parts)) for minute, parts in minutes.items()]


def _save(figure: Figure, path: Path) -> None:
    for axes in figure.axes:
        axes.spines["top"].set_visible(False)
        # A second scale of a plot has its own axis on the right.
        axes.spines["right"].set_visible(str(axes.yaxis.get_label_position()) == "right")
    date = {".svg": "Date", ".pdf": "CreationDate"}.get(path.suffix)
    undated = None if date is None else {date: None}
    figure.savefig(path, metadata=undated)
    plt.close(figure)
