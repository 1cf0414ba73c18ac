"""Dashboards without Grafana: their panels, drawn from what a Prometheus answers.

Layout, titles, units, legends and queries are those of the dashboard's file.
"""

from __future__ import annotations

import io
import math
import re
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from attrs import frozen
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator
from tests.support.prometheus import Prometheus

__all__ = ["drawn", "filled_in", "formatted"]

_COLUMN_IN, _ROW_IN, _HEAD_IN = 0.55, 0.34, 0.5
_MARGIN_IN = 0.08
_DPI = 92
_MOST_NAMED = 6
_GREY, _LINE = "#5b6068", "#d8dbe0"
_COLOURS = (
    "#3a7d44", "#d9a400", "#2f6fb2", "#d1602b", "#8a4fb0", "#b3364a", "#2a8c94", "#6b6f76",
)  # fmt: skip
_SIZES = {
    "s": ((1, "s"), (1e-3, "ms"), (1e-6, "µs")),
    "bytes": ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "B")),
    "Bps": ((1e9, "GB/s"), (1e6, "MB/s"), (1e3, "kB/s"), (1, "B/s")),
}
_NAMED_LABEL = re.compile(r"\{(\{\w+\})\}")
_SUFFIXES = {"short": "", "reqps": " req/s", "ops": " ops/s"}


def filled_in(expr: str, rate_interval: str) -> str:
    """The query with Grafana's variables replaced: every model, and ``rate_interval``."""
    return expr.replace("$__rate_interval", rate_interval).replace("$model", ".*")


def formatted(value: float, unit: str) -> str:
    """As Grafana would write it; ``unit`` is one that our dashboards have, or a ValueError."""
    if unit == "percentunit":
        return f"{value * 100:.3g}%"
    if unit in _SIZES:
        sizes = _SIZES[unit]
        size, word = next((each for each in sizes if abs(value) >= each[0]), sizes[-1])
        return f"{value / size:.3g} {word}" if value else "0 " + sizes[-1 if unit != "s" else 0][1]
    if unit.startswith("suffix:"):
        suffix = unit.removeprefix("suffix:")
    elif unit in _SUFFIXES:
        suffix = _SUFFIXES[unit]
    else:
        raise ValueError(f"unit {unit!r} is not known")
    for size, word in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if abs(value) >= size:
            return f"{value / size:.3g} {word}{suffix}"
    return f"{value:.3g}{suffix}"


@frozen
class Series:
    """What one line of a panel, or one number, shows."""

    name: str
    times_s: list[float]
    """Since the beginning."""
    values: list[float]


def drawn(
    board: Mapping[str, Any], prometheus: Prometheus, start_s: float, end_s: float, rate: str
) -> bytes:
    """The dashboard between two Unix times, as a PNG; ``rate`` is the interval of rates: "10s"."""
    panels = board["panels"]
    rows = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in panels)
    width_in, height_in = 24 * _COLUMN_IN, rows * _ROW_IN + _HEAD_IN
    with rc_context({"font.family": "DejaVu Sans", "font.size": 7, "axes.edgecolor": _LINE}):
        figure = Figure(figsize=(width_in, height_in), facecolor="#f4f5f7")
        figure.text(0.007, 1 - _HEAD_IN / 2 / height_in, board["title"], va="center", size=13,
                    weight="bold")  # fmt: skip
        for panel in panels:
            place = panel["gridPos"]
            box = (
                (place["x"] * _COLUMN_IN + _MARGIN_IN / 2) / width_in,
                ((rows - place["y"] - place["h"]) * _ROW_IN + _MARGIN_IN / 2) / height_in,
                (place["w"] * _COLUMN_IN - _MARGIN_IN) / width_in,
                (place["h"] * _ROW_IN - _MARGIN_IN) / height_in,
            )
            _draw(figure, box, panel, _answers(panel, prometheus, start_s, end_s, rate))
        png = io.BytesIO()
        figure.savefig(png, format="png", dpi=_DPI)
    return png.getvalue()


def _answers(
    panel: Mapping[str, Any], prometheus: Prometheus, start_s: float, end_s: float, rate: str
) -> list[Series]:
    found = []
    for target in panel["targets"]:
        for each in prometheus.course(filled_in(target["expr"], rate), start_s, end_s):
            labels = each["metric"]
            name = _NAMED_LABEL.sub(r"\1", target["legendFormat"]).format_map(
                defaultdict(str, labels)
            )
            at, values = zip(*each["values"], strict=True)
            found.append(
                Series(name or "Value", [s - start_s for s in at], [float(one) for one in values])
            )
    return [each for each in found if not all(map(math.isnan, each.values))]


def _draw(
    figure: Figure,
    box: tuple[float, float, float, float],
    panel: Mapping[str, Any],
    answers: list[Series],
) -> None:
    frame = figure.add_axes(box, xticks=[], yticks=[], facecolor="white")
    height_in = box[3] * figure.get_size_inches()[1]
    top = 0.12 / height_in
    frame.text(0.016, 1 - top, panel["title"], va="center", weight="bold", size=8,
               transform=frame.transAxes)  # fmt: skip
    unit, empty = (panel["fieldConfig"]["defaults"][key] for key in ("unit", "noValue"))
    if not answers:
        frame.text(0.5, 0.45, empty, ha="center", va="center", size=11, color=_GREY,
                   transform=frame.transAxes)  # fmt: skip
    elif panel["type"] == "stat":
        _numbers(frame, answers, unit)
    else:
        width_in = box[2] * figure.get_size_inches()[0]
        inner = figure.add_axes(
            (
                box[0] + 0.85 / figure.get_size_inches()[0],
                box[1] + box[3] * 0.5 / height_in,
                box[2] * (1 - 1.0 / width_in),
                box[3] * (1 - 0.8 / height_in),
            )
        )
        _lines(inner, answers, unit)
        _legend(frame, answers, height_in)


def _numbers(frame: Axes, answers: list[Series], unit: str) -> None:
    shown = answers[:4]
    for number, each in enumerate(shown):
        x = (number + 0.5) / len(shown)
        value = formatted(each.values[-1], unit)
        frame.text(x, 0.48, value, ha="center", va="center", size=20, color=_COLOURS[0],
                   transform=frame.transAxes)  # fmt: skip
        frame.text(x, 0.13, each.name, ha="center", va="center", color=_GREY,
                   transform=frame.transAxes)  # fmt: skip


def _lines(axes: Axes, answers: list[Series], unit: str) -> None:
    for number, each in enumerate(answers):
        axes.plot(each.times_s, each.values, color=_COLOURS[number % len(_COLOURS)], linewidth=1.1)
    top = max(map(_highest, answers)) * 1.06 or 1.0
    axes.set_ylim(-0.02 * top, top)  # a line at 0 is seen
    axes.set_xlim(left=0)
    axes.yaxis.set_major_locator(MaxNLocator(4, integer=False))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: formatted(value, unit)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda s, _: f"{int(s) // 60}:{int(s) % 60:02}"))
    axes.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 1.5, 3, 6], integer=True))
    axes.grid(color="#eceef1", linewidth=0.6)
    axes.tick_params(length=0, labelcolor=_GREY)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.set_axisbelow(True)


def _highest(series: Series) -> float:
    return max(value for value in series.values if not math.isnan(value))


def _legend(frame: Axes, answers: list[Series], height_in: float) -> None:
    lines = [
        frame.plot([], [], color=_COLOURS[number % len(_COLOURS)], linewidth=2, label=each.name)[0]
        for number, each in enumerate(answers[:_MOST_NAMED])
    ]
    if more := len(answers) - len(lines):
        lines += frame.plot([], [], alpha=0, label=f"and {more} more")
    frame.legend(
        handles=lines, loc="lower left", ncols=3, fontsize=6.5, frameon=False, labelcolor=_GREY,
        borderaxespad=0.1, handlelength=1.2, columnspacing=1.2, borderpad=0.2,
    )  # fmt: skip
