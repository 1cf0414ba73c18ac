"""A request at two workers: what each is sent, and that both legs share their end."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from attrs import evolve
from tests.unit.routing.apart_world import (
    HANDOVER,
    INFO,
    LOST,
    NOT_ARRIVED,
    Sequential,
    World,
)

from commutator.contract.disagg import DisaggAnswer
from commutator.errors import (
    EngineError,
    EngineHandoverError,
    EngineNeedsPrefillError,
    EngineOverloadedError,
    EngineUnavailableError,
    RoutingError,
)

ANSWER = [0, 1, 2, 3, 4]
MOST_TURNS = 10
STYLES = pytest.mark.parametrize("style", [None, Sequential()], ids=["concurrent", "sequential"])


@STYLES
async def test_prefill_there_and_decode_here(style: Any) -> None:
    world = World(style)
    prefill, decode = await world.up("p-0"), await world.up("d-0")
    begun = await world.begin()
    deltas = [delta async for delta in begun]
    await begun.aclose()
    world.check_closed()
    assert [token for delta in deltas for token in delta.token_ids] == ANSWER
    assert deltas[0].cached_tokens == 16, "what the prefill worker found"
    assert begun.worker_ids == ("d-0",)
    assert len(prefill.asked) == len(decode.asked) == 1
    assert prefill.asked[0].handover is not None
    words = decode.asked[0].handover
    assert words is not None
    if style is None:
        assert words["room"] == prefill.asked[0].handover["room"]
    else:
        assert words == {"opaque": "p-0"}
    explained = begun.explain()["disaggregation"]
    assert explained["outcome"] == "handed over"
    assert explained["prefill_worker_id"] == "p-0"
    assert explained["terms"] == {"worth": 1.0}
    assert world.told[0] == ("decided", True, "told to")
    (handover,) = world.handovers
    assert (handover.prefill, handover.decode) == ("done", "done")
    assert (handover.prefill_worker, handover.decode_worker) == ("p-0", "d-0")
    assert handover.size_bytes == 40 * 100
    assert handover.handover_s is not None
    assert handover.cancel_s is None


async def test_the_decode_worker_knows_how_long_to_wait() -> None:
    world = World(timeout_s=7.0)
    await world.up("p-0")
    decode = await world.up("d-0")
    await world.run()
    assert decode.asked[0].handover is not None
    assert decode.asked[0].handover["timeout_s"] == 7.0


async def test_a_policy_that_says_no_leaves_everything_as_it_is() -> None:
    world = World()
    prefill, decode = await world.up("p-0"), await world.up("d-0")
    world.policy.answer = DisaggAnswer(separate=False, reason="short prompt")
    assert await world.run() == (
        ANSWER,
        {"separate": False, "reason": "short prompt", "terms": {}},
    )
    assert not prefill.asked
    assert decode.asked[0].handover is None


@pytest.mark.parametrize("answer", [RuntimeError("boom"), None, "yes"])
async def test_a_policy_that_fails_costs_no_request(answer: Any) -> None:
    world = World()
    await world.up("p-0")
    await world.up("d-0")
    world.policy.answer = answer
    got, explained = await world.run()
    assert got == ANSWER
    assert explained["reason"] == "policy failed"
    assert ("decided", False, "policy failed") in world.told


async def test_without_prefill_workers_the_policy_is_not_asked() -> None:
    world = World()
    await world.up("d-0")
    await world.up("b-0")
    assert await world.run() == (ANSWER, {})
    assert not world.policy.questions


async def test_prefill_workers_alone_serve_nothing() -> None:
    world = World()
    await world.up("p-0")
    with pytest.raises(RoutingError, match="only prefill workers are ready"):
        await world.run()
    assert not world.dispatcher.ready()


async def test_a_worker_that_computes_no_prompts_needs_a_prefill_worker() -> None:
    world = World()
    await world.up("d-0", alone=False)
    with pytest.raises(EngineNeedsPrefillError):
        await world.run()
    assert not world.dispatcher.ready()
    states = {status.worker_id: status.state for status in world.dispatcher.status()}
    assert states == {"d-0": "ready"}, "it is not to blame"
    await world.up("p-0")
    assert (await world.run())[0] == ANSWER
    assert world.dispatcher.ready()


async def test_what_the_policy_sees() -> None:
    world = World()
    await world.up("p-0")
    await world.up("p-1")
    await world.up("d-0")
    waiting = await world.begin()
    other = await world.begin()
    first, second = world.policy.questions
    assert first.prompt_tokens == first.uncached_tokens == 40
    assert set(first.prefill_loads) == {"p-0", "p-1"}
    assert first.token_bytes == 100
    assert (first.queued_prefills, first.queue_age_s) == (0, 0.0)
    assert first.decode_load.active_requests == 0
    assert second.decode_load.active_requests == 1
    assert second.decode_load.active_prefill_tokens == 0, "that prompt is computed elsewhere"
    await waiting.aclose()
    await other.aclose()
    await world.run()
    await world.run()
    speeds = world.policy.questions[3].speeds
    assert speeds.prefill_tokens_per_s is not None
    assert speeds.local_prefill_tokens_per_s is None
    world.policy.answer = DisaggAnswer(separate=False, reason="no")
    await world.run()
    await world.run()
    assert world.policy.questions[5].speeds.local_prefill_tokens_per_s is not None


@STYLES
async def test_a_failed_prefill_is_done_locally(style: Any) -> None:
    world = World(style)
    prefill = await world.up("p-0", troubles=[LOST])
    decode = await world.up("d-0")
    got, explained = await world.run()
    assert got == ANSWER
    assert explained["outcome"] == "prefilled locally after a failure"
    assert explained["failed"] == [{"prefill_worker": "p-0", "reason": "connection reset"}]
    assert decode.asked[-1].handover is None
    assert decode.aborted == (1 if style is None else 0)
    assert len(prefill.asked) == 1
    (handover,) = world.handovers
    assert (handover.prefill, handover.decode) == ("failed", "cancelled" if style is None else None)
    assert handover.decode_worker == ("d-0" if style is None else None)
    assert handover.cancel_s is not None
    states = {status.worker_id: status.state for status in world.dispatcher.status()}
    assert states["d-0"] == "ready"
    await world.dispatcher.close()


@STYLES
async def test_kv_that_does_not_arrive_is_computed_locally(style: Any) -> None:
    world = World(style)
    prefill = await world.up("p-0")
    decode = await world.up("d-0", troubles=[NOT_ARRIVED])
    got, explained = await world.run()
    assert got == ANSWER
    assert explained["failed"][0]["reason"] == "the KV did not arrive"
    assert [request.handover is None for request in decode.asked] == [False, True]
    assert prefill.open == 0
    assert [outcome.decode for outcome in world.handovers] == ["failed"]


async def test_the_decode_leg_is_stopped_before_anything_else_is_tried() -> None:
    """The prefill fails while the decode leg waits for its KV."""
    world = World()
    await world.up("p-0", troubles=[LOST])
    decode = await world.up("d-0")
    got, _ = await world.run()
    assert got == ANSWER
    assert decode.aborted == 1
    assert world.sides() == [("failed", "cancelled")]
    await world.dispatcher.close()


async def test_the_prefill_leg_is_stopped_when_the_decode_leg_fails() -> None:
    world = World()
    prefill = await world.up("p-0", holds=asyncio.Event())
    await world.up("d-0", troubles=[NOT_ARRIVED])
    got, _ = await world.run()
    assert got == ANSWER
    assert prefill.aborted == 1
    assert world.sides() == [("cancelled", "failed")]


async def test_a_lost_decode_worker_stops_the_prefill_leg_and_is_reported() -> None:
    world = World()
    prefill = await world.up("p-0", holds=asyncio.Event())
    await world.up("d-0", troubles=[LOST])
    with pytest.raises(EngineUnavailableError):
        await world.run()
    assert prefill.aborted == 1
    (handover,) = world.handovers
    assert (handover.prefill, handover.decode) == ("cancelled", "failed")
    assert handover.cancel_s is not None
    await world.dispatcher.close()


@pytest.mark.parametrize("lost", ["prefill", "decode"])
async def test_the_other_leg_is_stopped_within_a_few_turns_of_the_event_loop(lost: str) -> None:
    """No timer, no question to anybody lies between a leg's failure and the other one's end."""
    world, failing = World(), asyncio.Event()
    prefill = await world.up("p-0", holds=failing, troubles=[LOST])
    decode = await world.up("d-0", troubles=[] if lost == "prefill" else [LOST])
    other = decode if lost == "prefill" else prefill
    running = asyncio.create_task(world.begin_and_read())
    while not (decode.open if lost == "prefill" else decode.asked):
        await asyncio.sleep(0)
    if lost == "prefill":
        failing.set()
    for _ in range(MOST_TURNS):
        await asyncio.sleep(0)
    assert other.aborted == 1
    await asyncio.gather(running, return_exceptions=True)
    await world.dispatcher.close()


async def test_another_prefill_worker_once_and_then_locally() -> None:
    world = World(on_failure="another_worker")
    await world.up("p-0", troubles=[LOST])
    await world.up("p-1")
    await world.up("d-0")
    got, explained = await world.run()
    assert got == ANSWER
    assert explained["outcome"] == "handed over"
    assert explained["prefill_worker_id"] == "p-1"
    await world.dispatcher.close()
    world = World(on_failure="another_worker")
    for number in range(3):
        await world.up(f"p-{number}", troubles=[LOST])
    decode = await world.up("d-0")
    got, explained = await world.run()
    assert got == ANSWER
    assert [failed["prefill_worker"] for failed in explained["failed"]] == ["p-0", "p-1"]
    assert decode.asked[-1].handover is None
    await world.dispatcher.close()


@STYLES
async def test_failing_gives_the_client_an_error_and_blames_no_decode_worker(style: Any) -> None:
    world = World(style, on_failure="fail")
    await world.up("p-0", troubles=[LOST])
    decode = await world.up("d-0")
    await world.up("d-1")
    with pytest.raises(EngineHandoverError, match="prefill at p-0 for d-0 failed: connection"):
        await world.run()
    states = {status.worker_id: status.state for status in world.dispatcher.status()}
    assert (states["d-0"], states["d-1"]) == ("ready", "ready")
    assert all(request.handover is not None for request in decode.asked)
    assert not world.workers["d-1"].asked, "it is no migration"
    await world.dispatcher.close()


async def test_a_full_prefill_worker_is_no_failure() -> None:
    world = World(on_failure="fail")
    full = EngineOverloadedError("full")
    await world.up("p-0", troubles=[full])
    await world.up("p-1")
    await world.up("d-0")
    got, explained = await world.run()
    assert (got, explained["prefill_worker_id"]) == (ANSWER, "p-1")
    world = World(on_failure="fail")
    await world.up("p-0", troubles=[full])
    await world.up("d-0")
    assert (await world.run())[0] == ANSWER


async def test_a_lost_decode_worker_is_a_migration_and_separated_again() -> None:
    world = World()
    prefill = await world.up("p-0")
    await world.up("d-0", troubles=[LOST])
    decode = await world.up("d-1")
    begun = await world.begin()
    assert [token async for delta in begun for token in delta.token_ids] == ANSWER
    assert begun.worker_ids == ("d-0", "d-1")
    assert begun.explain()["disaggregation"]["outcome"] == "handed over"
    assert len(prefill.asked) == 2
    rooms = [request.handover["room"] for request in prefill.asked if request.handover]
    assert rooms[0] != rooms[1], "each try has its own"
    assert decode.asked[0].handover is not None
    await begun.aclose()
    world.check_closed()
    await world.dispatcher.close()


async def test_the_rest_of_an_answer_is_prefilled_as_a_prompt() -> None:
    world = World()
    prefill = await world.up("p-0")
    await world.up("d-0", troubles=[EngineUnavailableError("later")])
    world.policy.answer = DisaggAnswer(separate=False, reason="no")
    begun = await world.begin(max_tokens=6)
    got = [await anext(begun) for _ in range(3)]
    await world.up("d-1")
    world.policy.answer = DisaggAnswer(separate=True, reason="yes")
    got += [delta async for delta in begun]
    assert [token for delta in got for token in delta.token_ids] == [*ANSWER, 5]
    assert prefill.asked[0].generated_prefix == 0
    assert list(prefill.asked[0].token_ids) == [*[7] * 40, 0, 1, 2]
    assert world.workers["d-1"].asked[0].generated_prefix == 3
    await begun.aclose()
    await world.dispatcher.close()


async def test_other_errors_of_the_decode_worker_are_the_clients() -> None:
    world = World()
    prefill = await world.up("p-0", holds=asyncio.Event())
    await world.up("d-0", troubles=[EngineError("logits are not finite")])
    with pytest.raises(EngineError, match="not finite"):
        await world.run()
    assert prefill.aborted == 1


@pytest.mark.parametrize("begun", [False, True])
async def test_a_client_that_leaves_stops_both_legs(begun: bool) -> None:
    world = World()
    prefill = await world.up("p-0", holds=asyncio.Event())
    decode = await world.up("d-0")
    running = asyncio.create_task(world.run())
    while begun and not (prefill.open and decode.open):
        await asyncio.sleep(0)
    await asyncio.sleep(0)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    world.check_closed()


async def test_workers_that_do_not_fit_are_refused_with_the_reason() -> None:
    world = World()
    other = evolve(INFO, handover=evolve(HANDOVER, block_size=64))
    prefill = await world.up("p-0", info=other)
    await world.up("p-1", engine="other")
    await world.up("p-2", info=evolve(INFO, handover=None))
    short = await world.up("p-3", info=evolve(INFO, max_model_len=40))
    await world.up("d-0")
    sizes = "block_size is 64 at the prefill worker and 16 at the decode worker"
    assert [str(pair) for pair in world.dispatcher.membership.refused_handovers()] == [
        f"p-0 cannot prefill for d-0: {sizes}",
        "p-1 cannot prefill for d-0: p-1 supports no hand-over",
        "p-2 cannot prefill for d-0: p-2 supports no hand-over",
    ]
    assert await world.run() == (ANSWER, {})
    assert not prefill.asked
    assert not short.asked, "its context is too short for this prompt"


async def test_a_prefill_that_is_not_wanted_leaves_the_decode_leg_alone() -> None:
    """A decode worker that has everything in its cache lets go before the prefill begins."""
    world = World(on_failure="fail")
    prefill = await world.up("p-0", troubles=[EngineHandoverError("given up already")])
    decode = await world.up("d-0")
    answering = asyncio.create_task(world.run())
    while not (prefill.asked and prefill.open == 0 and decode.asked):
        await asyncio.sleep(0)
    assert world.handovers == [], "the decode side has not ended"
    world.rooms[(decode.asked[0].handover or {})["room"]].set()
    got, explained = await answering
    assert got == ANSWER
    assert explained["outcome"].startswith("not needed")
    assert explained["failed"] == []
    (handover,) = world.handovers
    assert (handover.prefill, handover.decode) == ("failed", "done")
    assert (handover.handover_s, handover.cancel_s) == (None, None)
