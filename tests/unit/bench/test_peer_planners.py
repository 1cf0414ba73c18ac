"""Planners of other projects count as their originals do, by worked examples."""

from __future__ import annotations

import random
from itertools import count
from pathlib import Path

import pytest
from attrs import evolve
from bench.peer_planners import (
    PEERS,
    Kalman,
    Load,
    Peer,
    PeerPolicy,
    PeerReplays,
    Seen,
    apa_count,
    dynamo_capacity_per_s,
    dynamo_load_change,
    hpa_count,
    kpa_count,
    ray_count,
    wva_count,
    wva_saturation_change,
)
from tests.support.planned_fleet import SIM

from commutator.config.load import load_config
from commutator.contract.planner import (
    Arrivals,
    Observation,
    PlannedWorker,
    PlannerBounds,
    PlannerConfig,
    PlannerTargets,
    WorkerPhase,
)
from commutator.contract.worker import Role
from commutator.errors import ConfigError
from commutator.planning import FleetPlanner
from commutator_replay.setup import Replays
from commutator_replay.trace import TraceRequest

TARGETS = PlannerTargets(ttft_s=0.5, itl_s=0.05)


@pytest.mark.parametrize(("load", "workers"), [(90, 6), (64, 4), (30, 2)])
def test_a_horizontal_pod_autoscaler(load: float, workers: int) -> None:
    """Vector V1."""
    assert hpa_count(4, load, 60) == workers


def test_ray_serve() -> None:
    """Vector V1."""
    assert ray_count(4, 20) == 10


@pytest.mark.parametrize(("load", "workers"), [(0.9, 8), (0.2, 2), (0.52, 4), (3.0, 8)])
def test_aibrix_apa_at_most_doubles_and_at_least_halves(load: float, workers: int) -> None:
    """Vector V1."""
    assert apa_count(4, load, 0.5) == workers


@pytest.mark.parametrize(("now", "workers"), [(4, 4), (1, 2), (12, 6)])
def test_aibrix_kpa(now: int, workers: int) -> None:
    """Vector V1."""
    assert kpa_count(now, 1.8, 0.5) == workers


@pytest.mark.parametrize(
    ("kv_use", "change"),
    [((0.65, 0.72), 0), ((0.65, 0.75), 0), ((0.65, 0.76), 1), ((0.1, 0.2), -1), ((0.85, 0.9), 1)],
)
def test_llm_d_by_saturation(kv_use: tuple[float, ...], change: int) -> None:
    """Vector V1."""
    assert wva_saturation_change(kv_use, [0, 0]) == change


def test_llm_d_counts_queues_and_keeps_the_last_worker() -> None:
    assert wva_saturation_change([0.1, 0.1], [3, 2]) == 1
    assert wva_saturation_change([0.1, 0.1], [1, 1.5]) == 0, "half as many would queue too long"
    assert wva_saturation_change([0.0], [0]) == 0


@pytest.mark.parametrize(("demand", "workers"), [(300_000, 5), (150_000, 3), (230_000, 4)])
def test_llm_d_by_tokens(demand: int, workers: int) -> None:
    """Vector V1."""
    assert wva_count(4, 0, 80_000, demand) == workers


def test_llm_d_counts_workers_that_start() -> None:
    assert wva_count(4, 1, 80_000, 300_000) == 5
    assert wva_count(4, 1, 80_000, 10_000) == 5, "and does not shrink meanwhile"


def test_dynamo_s_predictor_overshoots_a_step() -> None:
    """Vector V2."""
    kalman = Kalman()
    told = [kalman.next(value) for value in (10, 12, 15, 14, 18, 22, 30)]
    assert told[:4] == [10, 12, 15, 14], "with fewer than five values, the last one"
    assert told[4:] == pytest.approx([19.035, 23.206, 30.383], abs=0.001)
    kalman = Kalman()
    told = [kalman.next(value) for value in (10, 10, 10, 10, 10, 40, 40, 40)]
    assert told[5:] == pytest.approx([34.886, 44.712, 48.655], abs=0.001)


@pytest.mark.parametrize(("queued", "change"), [(1200, 0), (700, -1)])
def test_dynamo_s_load_loop_asks_what_the_others_would_queue(queued: int, change: int) -> None:
    """Vector V3: a prefill worker, whose steps take no time beside that of their tokens."""
    assert change == dynamo_load_change(
        evolve(SIM, step_s=0.0, step_request_s=0.0),
        TARGETS,
        [Load(running=0, waiting_tokens=queued, waiting=1)] * 2,
        prompt_tokens=1500,
        kv_tokens=1500,
        output_tokens=0,
    )


def test_dynamo_s_load_loop_is_vetoed_by_one_idle_worker() -> None:
    busy, idle = (Load(running=2, waiting_tokens=tokens, waiting=1) for tokens in (90_000, 0))

    def change(*loads: Load) -> int:
        return dynamo_load_change(
            SIM, TARGETS, loads, prompt_tokens=1000, kv_tokens=1075, output_tokens=150
        )

    assert change(busy, busy) == 1
    assert change(busy, idle) == 0
    assert change(idle, idle) == -1
    assert change(idle) == 0, "the last one stays"


@pytest.mark.parametrize(("prompt", "answer", "rate"), [(3000, 150, 2.051), (1155, 211, 4.025)])
def test_dynamo_s_capacity_is_that_without_a_queue(prompt: int, answer: int, rate: float) -> None:
    """Vector V7, by their search."""
    found, batch = dynamo_capacity_per_s(SIM, TARGETS, prompt, answer)
    assert found == pytest.approx(rate, rel=0.005), "it samples 128 batches evenly"
    assert batch == pytest.approx({2.051: 15, 4.025: 42}[rate], abs=1)


def test_where_no_batch_meets_the_targets_dynamo_takes_the_fastest() -> None:
    _, batch = dynamo_capacity_per_s(SIM, TARGETS, 9000, 150)
    assert batch == 1


# --------------------------------------------------------------------------- in a replay


class _Asks(Peer):
    interval_s = 5.0

    def __init__(self, *workers: int) -> None:
        self._workers = iter(workers)
        self.seen: list[Seen] = []

    def desired(self, seen: Seen) -> int:
        self.seen.append(seen)
        return next(self._workers)


def _observed(time_s: float, *workers: PlannedWorker) -> Observation:
    arrived = Arrivals(requests=10, prompt_tokens=8000, context_tokens=10_000)
    return Observation(
        time_s=time_s,
        window_s=5.0,
        arrivals={Role.BOTH: arrived},
        workers=workers,
        output_tokens=100.0,
    )


def _worker(number: int, phase: WorkerPhase = WorkerPhase.READY, tokens: int = 0) -> PlannedWorker:
    return PlannedWorker(
        worker_id=f"w{number}",
        role=Role.BOTH,
        phase=phase,
        age_s=1.0,
        active_requests=5,
        active_prefill_tokens=tokens,
    )


def test_a_peer_sees_what_its_original_measures() -> None:
    peer = _Asks(2)
    policy = PeerPolicy(peer, PlannerConfig(kind="test"), Role.BOTH)
    workers = _worker(0, tokens=1600), _worker(1, WorkerPhase.STARTING)
    policy.propose(policy.begin(), _observed(5.0, *workers))
    (seen,) = peer.seen
    assert seen.requests_per_s == 2
    assert (seen.prompt_tokens, seen.context_tokens, seen.kv_tokens) == (800, 1000, 1050)
    assert seen.ready == [Load(running=3, waiting_tokens=1600, waiting=2)]
    assert (seen.starting, seen.desired, seen.ongoing) == (1, 2, 5)


def test_bounds_hold_for_peers() -> None:
    config = PlannerConfig(kind="test", bounds=PlannerBounds(both=(2, 3)))
    peer = _Asks(9, 0, 2)
    planner = FleetPlanner(config, [Role.BOTH], PeerPolicy(peer, config, Role.BOTH))
    state, plan = planner.plan(planner.begin(), _observed(5.0, _worker(0)))
    assert [one.kind for one in plan.actions] == ["launch", "launch"]
    state, plan = planner.plan(state, _observed(10.0, *(_worker(n) for n in range(3))))
    assert [one.kind for one in plan.actions] == ["drain"]
    planner.plan(state, _observed(15.0, *(_worker(n) for n in range(2))))
    assert [seen.desired for seen in peer.seen] == [1, 3, 2], "what it got counts as asked for"


@pytest.mark.parametrize("name", PEERS)
def test_every_peer_grows_under_load_and_shrinks_without(name: str) -> None:
    kind = PEERS[name]
    knob = 4.0 if kind.default is None or name == "ray" else 0.1
    peer = kind.make(knob, SIM, PlannerTargets(ttft_s=2.0, itl_s=0.1))

    ticking = count()

    def run(requests: float, load: Load, workers: int, ticks: int) -> int:
        for _ in range(ticks):
            workers = peer.desired(
                Seen(
                    time_s=next(ticking) * peer.interval_s,
                    ready=[load] * workers,
                    starting=0,
                    desired=workers,
                    requests_per_s=requests,
                    prompt_tokens=1000.0,
                    context_tokens=1000.0,
                    output_tokens=100.0,
                )
            )
            workers = min(max(1, workers), 50)
        return workers

    grown = run(40.0, Load(running=60, waiting_tokens=30_000, waiting=30), 2, 200)
    assert grown > 2
    assert run(0.01, Load(running=0, waiting_tokens=0, waiting=0), grown, 1000) < grown


# ----------------------------------------------------------------------------- in replays

FILE = Path(__file__).resolve().parents[3] / "examples" / "replay-planner.yaml"
FAST = (
    *("planner.start_up_s=30", "planner.targets.ttft_s=1.0", "engines[0].replicas=2"),
    "planner.bounds.both=[1, 8]",
)


@pytest.fixture(scope="module")
def replays() -> PeerReplays:
    loaded = load_config([FILE], sets=FAST)
    return PeerReplays(Replays(loaded, str(FILE), "trace", PlannerTargets(ttft_s=1, itl_s=1)))


@pytest.fixture(scope="module")
def trace() -> list[TraceRequest]:
    """Calm for 6 minutes, then four times as much for one."""
    chance, time_s = random.Random(8), 0.0
    made: list[TraceRequest] = []
    while len(made) < 900:
        time_s += chance.expovariate(6.0 if time_s >= 360 else 1.5)
        tokens = chance.randrange(1000, 3000)
        blocks = tuple(len(made) * 10 + block for block in range(-(-tokens // 512)))
        made.append(TraceRequest(time_s * 1000, tokens, chance.randrange(20, 60), blocks))
    return made


def test_peers_stand_beside_ours(replays: PeerReplays, trace: list[TraceRequest]) -> None:
    written = "hpa:3,kpa:3,apa:3,ray,wva,dynamo_load:0.5,dynamo_sla,ours"
    names = replays.names(written, "NAMES")
    found = [replays.run(name, trace) for name in names]
    assert [one.planner for one in found] == [
        *("hpa:3", "kpa:3", "apa:3", "ray:2", "wva:1", "dynamo_load:0.5", "dynamo_sla:1", "ours")
    ]
    assert {one.requests for one in found} == {900}
    assert all(one.worker_hours > 0 for one in found)


def test_the_best_knob_of_a_peer_is_found_in_hindsight(
    replays: PeerReplays, trace: list[TraceRequest]
) -> None:
    best, generous = (replays.run(name, trace) for name in ("hpa", "hpa:0.5"))
    assert best.attained >= 0.95
    assert best.worker_hours < generous.worker_hours


def test_more_headroom_costs_more(replays: PeerReplays, trace: list[TraceRequest]) -> None:
    plain, more = (replays.ours(headroom, trace) for headroom in (0.0, 3.0))
    assert plain == replays.run("ours", trace)
    assert more.worker_hours > plain.worker_hours


@pytest.mark.parametrize(
    ("name", "message"),
    [("hpa:0", "expected hpa, hpa:best, or hpa:X"), ("none", 'no planner "none"')],
)
def test_a_name_that_cannot_be_run_is_told(replays: PeerReplays, name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replays.names(name, "NAMES")
