"""Hand-overs in virtual time, worked out by hand; and traces that are mixed and stretched."""

from __future__ import annotations

import pytest
from tests.support.sim_config import bandwidth, sim_config

from commutator.contract.disagg import DisaggAnswer, DisaggPolicy, DisaggQuestion
from commutator.contract.routing import BusyConfig
from commutator.contract.worker import Role
from commutator_balance import LeastLoaded
from commutator_replay.fleet import VirtualWorker
from commutator_replay.prefill import ReplayDisagg
from commutator_replay.replay import Outcome, replay
from commutator_replay.trace import TraceRequest, at_rate, with_chats
from commutator_sim.virtual import SimVirtualEngine

MS = 1_000_000
PARAMETERS = sim_config(
    block_size=512,
    kv_capacity_blocks=100,
    handover_bandwidth_bytes_per_s=bandwidth(10 * MS, 512),
    handover_latency_s=0.005,
)


class Separate(DisaggPolicy):
    def __init__(self) -> None:
        self.asked: list[DisaggQuestion] = []

    def decide(self, question: DisaggQuestion) -> DisaggAnswer:
        self.asked.append(question)
        return DisaggAnswer(separate=True, reason="always")


def run(
    *trace: TraceRequest, prefill: int = 1, busy: BusyConfig | None = None
) -> tuple[Outcome, list[SimVirtualEngine], Separate]:
    engines = [SimVirtualEngine(PARAMETERS) for _ in range(1 + prefill)]
    workers = [
        VirtualWorker.make(f"w-{i}", engine, Role.PREFILL if i else Role.DECODE)
        for i, engine in enumerate(engines)
    ]
    policy = Separate()
    disagg = ReplayDisagg(policy, LeastLoaded(), busy or BusyConfig())
    return replay(trace, workers, LeastLoaded(), disagg), engines, policy


def request(time_ms: float, tokens: int, first_id: int, output: int = 1) -> TraceRequest:
    return TraceRequest(time_ms, tokens, output, tuple(range(first_id, first_id + 20)))


def test_blocks_go_over_while_the_next_are_computed() -> None:
    outcome, engines, _ = run(request(0, 4200, 0))
    (one,) = outcome.finished
    # Two chunks of 2,048 tokens take 256 ms each. The last four blocks are on their way for 40 ms
    # and 5 more; the 104 tokens that fill no block take the decode worker 13 ms.
    assert one.ttft_s == pytest.approx(0.256 + 0.256 + 0.045 + 0.013)
    assert outcome.handed_over_tokens == 4096
    assert [engine._model.cache.used_blocks for engine in engines] == [0, 0]


def test_only_what_the_decode_worker_lacks_goes_over() -> None:
    outcome, _, policy = run(request(0, 2100, 0), request(5000, 4200, 0))
    first, second = outcome.finished
    assert first.cached_tokens == 0
    assert second.cached_tokens == 2048, "both workers had it"
    assert outcome.handed_over_tokens == 4096, "2,048 for each"
    assert policy.asked[1].token_bytes == PARAMETERS.kv_bytes_per_token
    assert policy.asked[1].speeds.prefill_tokens_per_s == pytest.approx(2100 / 0.256)
    assert policy.asked[1].speeds.handover_latency_s is not None or (
        policy.asked[1].speeds.handover_bytes_per_s is not None
    )


def test_prompts_wait_for_a_prefill_worker_in_their_order() -> None:
    trace = [request(number, 2200, 100 * number) for number in range(3)]
    outcome, _, policy = run(*trace, busy=BusyConfig(max_active_requests=1))
    assert [one.queued_prefills for one in policy.asked] == [0, 0, 1]
    assert policy.asked[2].queue_age_s == pytest.approx(0.001)
    times = sorted(one.ttft_s for one in outcome.finished)
    # Each prefill takes 256 ms, and begins when the one before it has ended.
    assert times == pytest.approx([0.32, 0.32 + 0.255, 0.32 + 0.510])


def test_a_prompt_of_less_than_a_block_needs_no_hand_over() -> None:
    outcome, engines, _ = run(request(0, 400, 0, output=3))
    (one,) = outcome.finished
    assert one.ttft_s == pytest.approx(0.05)
    assert outcome.handed_over_tokens == 0
    assert [engine._model.cache.used_blocks for engine in engines] == [0, 0]


def test_chats_come_among_the_trace_and_share_nothing() -> None:
    trace = [request(1000 * number, 5000, 100 * number) for number in range(20)]
    mixed = with_chats(trace, 1.5, seed=3)
    chats = [one for one in mixed if one not in trace]
    assert len(chats) == 30
    assert mixed == sorted(mixed, key=lambda one: one.timestamp)
    assert all(0 <= one.timestamp <= 19_000 and 50 <= one.input_length <= 450 for one in chats)
    assert len({one.hash_ids for one in chats}) == 30
    assert mixed == with_chats(trace, 1.5, seed=3) != with_chats(trace, 1.5, seed=4)
    assert with_chats([], 2, seed=0) == []


@pytest.mark.parametrize("rate", [0.5, 4.0, 100.0])
def test_a_trace_at_a_rate(rate: float) -> None:
    trace = [request(7_000 + 1000 * number, 600, 0) for number in range(101)]
    stretched = at_rate(trace, rate)
    assert stretched[0].timestamp == 0
    assert stretched[-1].timestamp == pytest.approx(101 / rate * 1000)


@pytest.mark.parametrize("size", [512, 128, 16])
def test_blocks_of_a_part_of_the_traces_size(size: int) -> None:
    first, second = request(0, 1100, 0), TraceRequest(0, 1100, 1, (0, 1, 77))
    blocks = first.blocks(size)
    assert len(blocks) == len(set(blocks)) == 1100 // size
    shared = 1024 // size
    assert list(blocks[:shared]) == list(second.blocks(size)[:shared])
    assert not set(blocks[shared:]) & set(second.blocks(size)[shared:])
