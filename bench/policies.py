"""What routing policies find in caches and how soon they answer, by replay in virtual time.

Eight workers of the published speeds. COMMUTATOR_TRACES names traces, separated as in PATH, in any
format that `commutator replay` reads; each is judged by the beginnings of its two halves. Besides,
two made-up kinds of traffic. Seeds move each arrival of a trace by up to 3 s (published times are
on such a grid), or draw the made-up one anew, and draw among equal workers. All policies of one
seed get the same requests, so intervals are those of the ratio within a seed.

The weight of Dynamo's formula is also the best of several, known afterwards, for each row.

``python -m bench.policies`` prints what each part of the cost of `kv` is worth.
"""

from __future__ import annotations

import os
import random
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import lru_cache
from itertools import islice
from pathlib import Path

from attrs import evolve, frozen
from rich.console import Console
from rich.table import Table

from bench.peer_policies import ABLATIONS, DYNAMO_WEIGHTS, OURS, POLICIES
from bench.result import Figure
from bench.shared_prefixes import documents, tenants
from commutator.contract.planner import PlannerTargets
from commutator_replay.fleet import VirtualWorker
from commutator_replay.replay import replay
from commutator_replay.report import Report, report
from commutator_replay.tables import load_trace
from commutator_replay.trace import TRACE_BLOCK_TOKENS, TraceRequest
from commutator_sim.config import SimConfig
from commutator_sim.virtual import SimVirtualEngine

__all__ = ["Setting", "best_other", "interval", "run", "settings"]

WORKERS = 8
TOKEN_BYTES = 131_072
SEEDS = 5
STUDENT = 2.776
"""Of 95 % with one seed less than SEEDS degrees of freedom."""
REQUESTS = 2_500
GRID_MS = 3_000
SPEEDS = (0.6, 1.0, 1.4)
TARGET_TTFT_S, TARGET_ITL_S = 2.0, 0.05
CACHES = (1_500, 6_000)
"""Blocks of a worker, for traces; the second at the trace's own speed only."""
DYNAMO = "Dynamo, best weight"


@frozen
class Setting:
    """One row of the table: requests, and the memory of the workers that get them."""

    traffic: str
    """A file, or the name of what is made up."""
    rate: float
    """For a file how many times as dense; else requests a second."""
    capacity_blocks: int
    half: int = 0
    """0 or 1: the half of the file."""

    @property
    def name(self) -> str:
        if self.traffic in _MADE_UP:
            what = f"{self.traffic}, {self.rate:g}/s"
        else:
            what = f"{Path(self.traffic).stem}, half {self.half + 1}, x{self.rate:g}"
        return f"{what}, {self.capacity_blocks:,} blocks"

    def requests(self, seed: int) -> list[TraceRequest]:
        if (make := _MADE_UP.get(self.traffic)) is not None:
            return make(REQUESTS, self.rate, seed)
        found = _trace(self.traffic)
        begin = self.half * (len(found) // 2)
        part = found[begin : begin + min(REQUESTS, len(found) // 2)]
        chance, first_ms = random.Random(seed), part[0].timestamp
        moved = [
            evolve(
                one, timestamp=(one.timestamp - first_ms + chance.uniform(0, GRID_MS)) / self.rate
            )
            for one in part
        ]
        return sorted(moved, key=lambda one: one.timestamp)


_MADE_UP: Mapping[str, Callable[[int, float, int], list[TraceRequest]]] = {
    "tenants": tenants,
    "documents": documents,
}


@lru_cache(4)
def _trace(file: str) -> Sequence[TraceRequest]:
    return load_trace(Path(file))


def settings() -> list[Setting]:
    """Every row."""
    files = [name for name in os.environ.get("COMMUTATOR_TRACES", "").split(os.pathsep) if name]
    small, large = CACHES
    rows = [
        Setting(file, rate, capacity, half)
        for file in files
        for half in (0, 1)
        for rate, capacity in [*((rate, small) for rate in SPEEDS), (1.0, large)]
    ]
    rows += [Setting("tenants", rate, blocks) for rate, blocks in ((6, 800), (10, 800), (10, 400))]
    return rows + [Setting("documents", rate, 400) for rate in (10, 20, 30)]


def _worker(number: int, capacity_blocks: int) -> VirtualWorker:
    config = SimConfig(
        kind="sim",
        block_size=TRACE_BLOCK_TOKENS,
        kv_capacity_blocks=capacity_blocks,
        kv_bytes_per_token=TOKEN_BYTES,
    )
    made = VirtualWorker.make(f"worker-{number}", SimVirtualEngine(config))
    live = made.live
    info = evolve(live.record.info, kv_capacity_blocks=capacity_blocks)
    live.record = evolve(live.record, info=info)
    return made


def one_run(setting: Setting, policy: str, seed: int) -> Report:
    """Replay a row's requests under one policy."""
    workers = [_worker(number, setting.capacity_blocks) for number in range(WORKERS)]
    make = POLICIES.get(policy) or ABLATIONS[policy]
    outcome = replay(setting.requests(seed), workers, make(), seed=seed)
    targets = PlannerTargets(ttft_s=TARGET_TTFT_S, itl_s=TARGET_ITL_S)
    return report(policy, outcome, targets)


def interval(ours: Sequence[float], other: Sequence[float]) -> tuple[float, float]:
    """The mean of the ratios, and how far from it 95 % of such means lie at most.

    Both have SEEDS values, those of the same seeds at the same places, none of them 0.
    """
    ratios = [mine / its for mine, its in zip(ours, other, strict=True)]
    return statistics.mean(ratios), STUDENT * statistics.stdev(ratios) / len(ratios) ** 0.5


Runs = Mapping[str, Sequence[Report]]
"""The reports of each policy, one for each seed."""


def with_best_weight(runs: Runs) -> Runs:
    """Dynamo's formula by its default, and by the weight with the shortest median TTFT."""
    names = [f"Dynamo, weight {weight}" for weight in DYNAMO_WEIGHTS]
    best = min(names, key=lambda name: _mean(runs[name], _ttft))
    kept = {name: found for name, found in runs.items() if name not in names[1:]}
    return {**kept, DYNAMO: runs[best]}


def best_other(runs: Runs, value: Callable[[Report], float], *, highest: bool) -> str:
    """The policy, other than ours, with the best mean."""
    others = [name for name in runs if name != OURS]
    choose = max if highest else min
    return choose(others, key=lambda name: _mean(runs[name], value))


def _mean(reports: Sequence[Report], value: Callable[[Report], float]) -> float:
    return statistics.mean(map(value, reports))


def _cached(one: Report) -> float:
    return one.cached_ratio


def _ttft(one: Report) -> float:
    return one.ttft_p50_s


COLUMNS: Mapping[str, tuple[Callable[[Report], float], str]] = {
    "cached": (_cached, "{:.1%}"),
    "TTFT p50 s": (_ttft, "{:.3f}"),
    "p99 s": (lambda one: one.ttft_p99_s, "{:.2f}"),
    "ITL p50 ms": (lambda one: one.itl_p50_s * 1e3, "{:.1f}"),
    "p99 ms": (lambda one: one.itl_p99_s * 1e3, "{:.0f}"),
    "imbalance": (lambda one: one.imbalance, "{:.2f}"),
    "goodput/s": (lambda one: one.goodput_per_s, "{:.2f}"),
}


def _table(setting: Setting, runs: Runs) -> Table:
    made = Table(title=f"{setting.name}: means of {SEEDS} seeds, +- the half of the 95 % interval")
    made.add_column("policy")
    for column in COLUMNS:
        made.add_column(column, justify="right")
    for name, reports in runs.items():
        cells = []
        for value, form in COLUMNS.values():
            values = [value(one) for one in reports]
            half = STUDENT * statistics.stdev(values) / len(values) ** 0.5
            cells.append(f"{form.format(statistics.mean(values))} +-{form.format(half)}")
        made.add_row(name, *cells)
    return made


def _figures(setting: Setting, runs: Runs) -> Iterator[Figure]:
    for what, unit, value, highest in (
        ("cached", "of prompt tokens", _cached, True),
        ("TTFT p50", "s", _ttft, False),
    ):
        if not any(map(value, runs[OURS])):
            continue  # nothing is shared in this trace
        other = best_other(runs, value, highest=highest)
        ours, its = list(map(value, runs[OURS])), list(map(value, runs[other]))
        _, half = interval(ours, its) if highest else interval(its, ours)
        yield Figure(
            scenario="policies",
            what=f"{setting.name}: {what} (ratio +-{half:.2f})",
            ours=statistics.mean(ours),
            other=statistics.mean(its),
            unit=unit,
            other_name=other,
            aim=">1.1",
            higher_is_better=highest,
        )


def _all_runs(rows: Sequence[Setting], policies: Sequence[str]) -> Iterator[tuple[Setting, Runs]]:
    """Each row with its reports, on all cores."""
    seeds = range(1, SEEDS + 1)
    jobs = [(row, policy, seed) for row in rows for policy in policies for seed in seeds]
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        found = pool.map(_apply, jobs, chunksize=SEEDS)
        for row in rows:
            yield row, {name: list(islice(found, SEEDS)) for name in policies}


def _apply(job: tuple[Setting, str, int]) -> Report:
    return one_run(*job)


def run() -> list[Figure]:
    console, figures = Console(width=140), list[Figure]()
    for row, found in _all_runs(settings(), list(POLICIES)):
        runs = with_best_weight(found)
        console.print(_table(row, runs))
        figures += _figures(row, runs)
    return figures


def main() -> None:
    rows = [row for row in settings() if row.rate not in (SPEEDS[0], 6, 10)]
    for row, runs in _all_runs(rows, list(ABLATIONS)):
        Console(width=140).print(_table(row, runs))


if __name__ == "__main__":
    main()
