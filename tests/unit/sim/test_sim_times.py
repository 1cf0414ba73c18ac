"""The model's figures, worked out by hand from the published parameters."""

from __future__ import annotations

import pytest
from tests.support.sim_config import sim_config, sim_tier

from commutator_sim.events import Finished, FirstToken, Preempted, Steps
from commutator_sim.model import SimModel
from commutator_sim.request import SimRequest

MS = 1_000_000
S = 1_000 * MS


def run(model: SimModel, *requests: SimRequest) -> dict[tuple[str, int], int]:
    """Run all requests at once; returns the times of the first and last token of each."""
    for key, request in enumerate(requests):
        model.submit(key, request)
    return {
        (type(event).__name__, event.key): event.time_ns
        for event in model.advance()
        if isinstance(event, FirstToken | Finished)
    }


def test_prefill_and_decode_take_their_published_times() -> None:
    times = run(SimModel(sim_config()), SimRequest(8000, 101))
    assert times["FirstToken", 0] == 1 * S
    assert times["Finished", 0] == 1 * S + 100 * 6_350_000


def test_a_larger_batch_decodes_more_slowly() -> None:
    times = run(SimModel(sim_config()), *(SimRequest(100, 11) for _ in range(10)))
    assert {times["FirstToken", key] for key in range(10)} == {125 * MS}  # one step of 1000 tokens
    assert {times["Finished", key] for key in range(10)} == {125 * MS + 10 * 9_500_000}


def test_a_long_prompt_is_prefilled_in_chunks_while_others_decode() -> None:
    model = SimModel(sim_config(max_tokens_per_step=801, max_running_requests=8))
    model.submit(0, SimRequest(800, 50))
    model.advance(100 * MS)
    model.submit(1, SimRequest(1600, 1))
    steps = [event for event in model.advance() if isinstance(event, Steps)]
    assert steps[0] == Steps(100 * MS, 1, 100 * MS + 6_350_000, 1, 800)
    assert steps[1] == Steps(206_350_000, 1, 100 * MS + 6_350_000, 1, 800)


def test_a_cached_prefix_is_not_computed_again() -> None:
    model = SimModel(sim_config(block_size=512))
    run(model, SimRequest(1400, 1, [11, 12]))
    start_ns = model.now_ns
    model.submit(7, SimRequest(1424, 1, [11, 12]))
    (first,) = [event for event in model.advance() if isinstance(event, FirstToken)]
    assert first == FirstToken(start_ns + 50 * MS, 7, 1024, 0)


def test_a_prompt_that_is_wholly_cached_computes_its_last_block() -> None:
    model = SimModel(sim_config(block_size=512))
    run(model, SimRequest(1024, 1, [11, 12]))
    model.submit(7, SimRequest(1024, 1, [11, 12]))
    (first,) = [event for event in model.advance() if isinstance(event, FirstToken)]
    assert first.cached_tokens == 512


def test_what_waits_for_a_place_starts_when_one_is_free() -> None:
    model = SimModel(sim_config(max_running_requests=1))
    times = run(model, SimRequest(80, 11), SimRequest(80, 1))
    assert times["Finished", 0] == 10 * MS + 10 * 6_350_000
    assert times["FirstToken", 1] == times["Finished", 0] + 10 * MS


def test_a_smaller_priority_is_served_first() -> None:
    model = SimModel(sim_config(max_running_requests=1))
    times = run(model, SimRequest(80, 1), SimRequest(80, 1, priority=1), SimRequest(80, 1))
    order = sorted(range(3), key=lambda key: times["Finished", key])
    assert order == [0, 2, 1]


def test_the_last_comer_makes_room_and_keeps_its_tokens() -> None:
    """Each needs two blocks in the end and there are three: the second has to wait."""
    model = SimModel(sim_config(block_size=8, kv_capacity_blocks=3))
    model.submit(0, SimRequest(8, 9))
    model.submit(1, SimRequest(8, 9))
    events = model.advance(2 * MS)
    assert [event.key for event in events if isinstance(event, FirstToken)] == [0, 1]
    events = model.advance()
    (preempted,) = [event for event in events if isinstance(event, Preempted)]
    assert preempted == Preempted(2 * MS, 1)
    finished = {event.key: event.time_ns for event in events if isinstance(event, Finished)}
    assert finished[0] == 2 * MS + 8 * 6_350_000
    # Nine tokens are computed anew, which gives the second token; then seven more.
    assert finished[1] == finished[0] + 9 * 125_000 + 7 * 6_350_000


def test_blocks_from_a_tier_come_at_its_bandwidth() -> None:
    tiers = (sim_tier("host", 10, 250_000, block_size=8, latency_ns=MS),)
    model = SimModel(sim_config(block_size=8, kv_capacity_blocks=4, tiers=tiers))
    run(model, SimRequest(24, 1, [1, 2, 3]))
    model.submit(1, SimRequest(32, 1, [5, 6, 7, 8]))
    model.advance()
    start_ns = model.now_ns
    model.submit(2, SimRequest(26, 1, [1, 2, 3]))
    (first,) = [event for event in model.advance() if isinstance(event, FirstToken)]
    assert first == FirstToken(start_ns + MS + 750_000 + 250_000, 2, 24, 24)


def test_one_link_carries_one_load_after_the_other() -> None:
    tiers = (sim_tier("disk", 10, MS // 2, block_size=8),)
    model = SimModel(sim_config(block_size=8, kv_capacity_blocks=4, tiers=tiers))
    run(model, SimRequest(8, 1, [1]), SimRequest(8, 1, [2]))
    model.submit(2, SimRequest(32, 1, [5, 6, 7, 8]))
    model.advance()
    start_ns = model.now_ns
    model.submit(3, SimRequest(9, 1, [1]))
    model.submit(4, SimRequest(9, 1, [2]))
    times = {e.key: e.time_ns - start_ns for e in model.advance() if isinstance(e, FirstToken)}
    assert times == {3: 625_000, 4: 1_125_000}


def test_the_cost_is_by_event_not_by_token() -> None:
    model = SimModel(sim_config(block_size=512, kv_capacity_blocks=1000))
    model.submit(0, SimRequest(100, 100_000))
    model.submit(1, SimRequest(200, 100_000))
    events = model.advance()
    assert sum(event.count * event.decoding for event in events if isinstance(event, Steps)) == (
        2 * 99_999
    )
    assert len(events) < 2 * 2 * 100_000 / 512


def test_what_never_fits_is_refused() -> None:
    model = SimModel(sim_config(block_size=8, kv_capacity_blocks=3))
    model.submit(0, SimRequest(17, 8))
    with pytest.raises(ValueError, match="needs 4 KV blocks; there are 3"):
        model.submit(1, SimRequest(17, 9))
    with pytest.raises(ValueError, match="in the model already"):
        model.submit(0, SimRequest(1, 1))
    with pytest.raises(ValueError, match="at least one token"):
        SimRequest(0, 1)
    model.advance(5)
    with pytest.raises(ValueError, match="cannot go back"):
        model.advance(4)
