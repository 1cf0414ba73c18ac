"""Replays side by side, as tables that fit 80 columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.table import Table
from rich.text import Text

from commutator.observe.replay_report import Report

__all__ = ["by_policy", "by_rate"]


def by_policy(reports: Sequence[Report], ideal: float) -> Table:
    """A row for each policy."""
    made = _table(f"Prompt tokens found in a cache; an infinite one would find {ideal:.1%}")
    made.add_column("policy", no_wrap=True)
    times = ("TTFT p50  p99", "ITL p50  p99")
    apart = any(one.separate_ratio is not None for one in reports)
    last = "separate" if apart else "imbalance"
    for column in ("cached", "given up", *times, last, "goodput"):
        made.add_column(column, justify="right", no_wrap=True)
    for one in reports:
        separate = "-" if one.separate_ratio is None else f"{one.separate_ratio:.0%}"
        made.add_row(
            Text(one.policy),
            f"{one.cached_ratio:.1%}",
            "-" if one.given_up_ratio is None else f"{one.given_up_ratio:.1%}",
            f"{one.ttft_p50_s:.2f} {one.ttft_p99_s:5.2f} s",
            f"{one.itl_p50_s * 1000:.1f} {one.itl_p99_s * 1000:4.0f} ms",
            separate if apart else f"{one.imbalance:.2f}",
            f"{one.goodput_per_s:.2f}/s",
        )
    return made


def by_rate(sweep: Mapping[float, Sequence[Report]]) -> Table:
    """A row for each rate; the best goodput of a row is marked."""
    made = _table("Goodput and p99 ITL by requests/s")
    made.add_column("rate", justify="right", no_wrap=True)
    for one in next(iter(sweep.values())):
        made.add_column(Text(one.policy), justify="right", no_wrap=True)
    for rate, reports in sweep.items():
        best = max(one.good_ratio for one in reports)
        made.add_row(
            f"{rate:g}",
            *(
                f"{one.good_ratio * rate:.2f}{'*' if one.good_ratio == best else ' '}"
                f"{one.itl_p99_s * 1000:4.0f} ms"
                for one in reports
            ),
        )
    return made


def _table(title: str) -> Table:
    return Table(title=title, box=None, padding=(0, 1, 0, 0), title_justify="left")
