"""The engine on a tiny model: the same tokens however they are computed, and exact accounting."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from tests.support.reference_integrity import check_engine
from tests.support.reference_options import sized
from tests.support.tiny_llama import TINY, tiny_model

from commutator.contract.block import BlockRemoved, BlocksCleared, BlockStored, KvEvent
from commutator.contract.request import FinishReason, GenerateRequest, SamplingParams, TokenDelta
from commutator.contract.worker import EngineLoad
from commutator.errors import EngineOverloadedError, RequestError
from commutator_reference.arena import KVArena
from commutator_reference.engine import Deltas, ReferenceEngine
from commutator_reference.model import build_batch
from commutator_reference.scheduler import Chunk

MODEL = tiny_model()
PROMPTS = [[(7 * i * i + 3 * n) % 90 + 5 for i in range(n)] for n in (1, 2, 7, 16, 17, 33, 60)]


def make(
    *,
    max_running: int = 16,
    max_tokens: int = 128,
    max_model_len: int | None = None,
    hooks: dict[str, Any] | None = None,
    **options: Any,
) -> ReferenceEngine:
    sizes: dict[str, Any] = {
        "num_blocks": 128,
        "block_size": 4,
        "max_running_requests": max_running,
        "max_tokens_per_step": max_tokens,
        **options,
    }
    return ReferenceEngine(MODEL, *sized(**sizes), max_model_len=max_model_len, **(hooks or {}))


def request(prompt: Sequence[int], **sampling: Any) -> GenerateRequest:
    params = {"max_tokens": 12, "temperature": 0.0, "ignore_eos": True, **sampling}
    return GenerateRequest(request_id="r", token_ids=prompt, sampling=SamplingParams(**params))


def finish(engine: ReferenceEngine) -> dict[int, list[TokenDelta]]:
    """Step until nothing is left; every request's deltas."""
    said: dict[int, list[TokenDelta]] = {}
    for _ in range(10_000):
        load = engine.load()
        if not load.running + load.waiting:
            return said
        for key, delta in engine.step():
            said.setdefault(key, []).append(delta)
        check_engine(engine)
    raise AssertionError("the engine does not finish")


def tokens(deltas: list[TokenDelta]) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]


def naive(prompt: Sequence[int], count: int = 12) -> list[int]:
    """Greedy tokens, everything computed anew for each of them."""
    output: list[int] = []
    for _ in range(count):
        ids = (*prompt, *output)
        arena = KVArena(TINY, 1, len(ids), device=MODEL.device, dtype=MODEL.dtype)
        batch = build_batch([Chunk(0, ids, 0, (0,), samples=True)], arena, MODEL.dtype)
        output.append(int(MODEL.forward(batch, arena).argmax()))
    return output


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    outputs = [naive(prompt) for prompt in PROMPTS]
    assert len({tuple(output) for output in outputs}) == len(PROMPTS), "the prompts must differ"
    return outputs


@pytest.mark.parametrize(
    "options",
    [
        {"max_running": 1},
        {},
        {"max_tokens": 3, "max_running": 3},
        {"prefix_caching": False},
        {"block_size": 1, "num_blocks": 512},
        {"block_size": 64},
    ],
    ids=["one at a time", "batched", "chunks of 3", "no prefix cache", "blocks of 1", "of 64"],
)
def test_tokens_do_not_depend_on_how_they_are_computed(
    options: dict[str, Any], expected: list[list[int]]
) -> None:
    engine = make(**options)
    for round_ in range(2):
        for index, prompt in enumerate(PROMPTS):
            engine.submit(100 * round_ + index, request(prompt))
        said = finish(engine)
        for index, output in enumerate(expected):
            assert tokens(said[100 * round_ + index]) == output


def test_a_step_that_no_request_needs_is_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make()
    engine.submit(1, request(PROMPTS[-1]))
    engine.submit(2, request(PROMPTS[-2]))
    forward = MODEL.forward

    def abort_first(*args: Any, **options: Any) -> torch.Tensor:
        engine.abort(1)
        engine.abort(2)
        return forward(*args, **options)

    monkeypatch.setattr(MODEL, "forward", abort_first)
    assert engine.step() == []
    assert not engine.arena.tensor.any(), "no layer was computed"
    assert engine.step() == []
    assert engine.load() == EngineLoad(kv_capacity_blocks=128)
    check_engine(engine)


def test_preemption_changes_nothing(expected: list[list[int]]) -> None:
    engine = make(num_blocks=20)
    for index, prompt in enumerate(PROMPTS):
        engine.submit(index, request(prompt))
    said = finish(engine)
    assert engine.preemptions > 0
    assert [tokens(said[index]) for index in range(len(PROMPTS))] == expected


def test_seeded_sampling_is_the_same_alone_in_a_batch_and_after_preemption() -> None:
    sampling = {"temperature": 1.5, "top_p": 0.95, "seed": 42}

    def sampled(engine: ReferenceEngine, *, crowd: bool) -> list[int]:
        if crowd:
            for key, prompt in enumerate(PROMPTS):
                engine.submit(key, request(prompt, temperature=1.0))
        engine.submit(99, request(PROMPTS[3], **sampling))
        return tokens(finish(engine)[99])

    alone = sampled(make(), crowd=False)
    tight = make(num_blocks=20)
    assert sampled(make(), crowd=True) == alone
    assert sampled(tight, crowd=True) == alone
    assert tight.preemptions > 0
    engine = make()
    engine.submit(1, request(PROMPTS[3], **{**sampling, "seed": 43}))
    engine.submit(2, request(PROMPTS[3], temperature=1.5))
    engine.submit(3, request(PROMPTS[3], temperature=1.5))
    said = finish(engine)
    assert len({tuple(alone), *(tuple(tokens(said[key])) for key in (1, 2, 3))}) == 4


def test_deltas_carry_cached_tokens_once_and_the_reason_last() -> None:
    engine = make()
    for key in (1, 2):
        engine.submit(key, request(PROMPTS[4], max_tokens=3))
        deltas = finish(engine)[key]
        assert [delta.cached_tokens for delta in deltas] == [0 if key == 1 else 16, None, None]
        reasons = [delta.finish_reason for delta in deltas]
        assert reasons == [None, None, FinishReason.LENGTH]


def test_the_model_length_ends_a_request() -> None:
    engine = make(max_model_len=20)
    engine.submit(1, request(PROMPTS[4], max_tokens=100))
    deltas = finish(engine)[1]
    assert len(tokens(deltas)) == 3
    assert deltas[-1].finish_reason is FinishReason.LENGTH
    with pytest.raises(RequestError, match="takes 20 in all"):
        engine.submit(2, request([1] * 20))


def test_the_arena_bounds_the_model_length() -> None:
    assert make(num_blocks=3).max_model_len == 12
    assert make(num_blocks=500).max_model_len == TINY.context_length


def test_eos_ends_a_request_and_stays_in_its_tokens() -> None:
    engine = make()
    engine.submit(1, request([5], logit_bias={2: 100.0}, ignore_eos=False))
    (delta,) = finish(engine)[1]
    assert (delta.token_ids, delta.finish_reason, delta.stop_reason) == (
        (2,), FinishReason.STOP, None,
    )  # fmt: skip


def test_stop_strings_use_the_decoder() -> None:
    engine = make(hooks={"decode": lambda ids: "".join(f"<{token}>" for token in ids)})
    output = naive(PROMPTS[2], 6)
    stop = f"{output[3]}><{output[4]}"
    engine.submit(1, request(PROMPTS[2], stop=("never", stop)))
    deltas = finish(engine)[1]
    assert tokens(deltas) == output[:5]
    assert deltas[-1].finish_reason is FinishReason.STOP
    assert deltas[-1].stop_reason == stop


def test_logprobs_come_with_their_tokens() -> None:
    engine = make()
    engine.submit(1, request([5], top_logprobs=3, max_tokens=2))
    for delta in finish(engine)[1]:
        (logprob,) = delta.logprobs
        assert logprob.token_id == delta.token_ids[0]
        assert len(logprob.top) == 3
        assert logprob.top[0] == (logprob.token_id, logprob.logprob)


def test_load_counts_exactly() -> None:
    engine = make(max_running=2)
    for key in range(3):
        engine.submit(key, request(PROMPTS[3] if key == 2 else [key + 5], max_tokens=8))
    assert engine.load() == EngineLoad(waiting=3, kv_capacity_blocks=128)
    engine.step()
    assert engine.load() == EngineLoad(
        running=2, waiting=1, kv_used_blocks=2, kv_capacity_blocks=128
    )
    finish(engine)
    # The keys of [5] and [6] with 7 of 8 answers, and of 16 tokens with 7: 2 + 2 + 5 full blocks.
    assert engine.load() == EngineLoad(kv_cached_blocks=9, kv_capacity_blocks=128)
    engine.reset_prefix_cache()
    engine.step()
    assert engine.load() == EngineLoad(kv_capacity_blocks=128)


def test_aborted_requests_free_everything_and_say_nothing_more() -> None:
    engine = make(max_running=2, prefix_caching=False)
    for key in range(4):
        engine.submit(key, request(PROMPTS[5]))
    engine.abort(3)  # not seen yet
    engine.step()
    for key in (0, 2, 77):  # running, waiting, unknown
        engine.abort(key)
    assert set(finish(engine)) == {1}
    assert engine.load() == EngineLoad(kv_capacity_blocks=128)


def test_a_key_can_be_used_again_at_once() -> None:
    engine = make()
    engine.submit(1, request(PROMPTS[3]))
    with pytest.raises(ValueError, match="key 1 is in use"):
        engine.submit(1, request(PROMPTS[4]))
    engine.abort(1)
    engine.submit(1, request(PROMPTS[2]))
    assert tokens(finish(engine)[1]) == naive(PROMPTS[2])


def test_too_many_requests_are_refused_as_overload() -> None:
    engine = make(max_running=2, max_queued_requests=1)
    for key in range(3):
        engine.submit(key, request([5]))
    with pytest.raises(EngineOverloadedError, match="3 requests"):
        engine.submit(3, request([5]))
    engine.abort(0)
    engine.submit(4, request([5]))
    assert set(finish(engine)) == {1, 2, 4}
    engine.submit(5, request([5]))


def test_kv_events_tell_what_is_cached() -> None:
    events: list[KvEvent] = []
    engine = make(hooks={"on_kv_events": events.extend}, num_blocks=6)
    engine.submit(1, request(PROMPTS[3], max_tokens=6))
    finish(engine)
    stored = [event for event in events if isinstance(event, BlockStored)]
    assert len(events) == len(stored)
    ids = [token for event in stored for token in event.token_ids]
    assert ids == [*PROMPTS[3], *naive(PROMPTS[3], 4)]
    assert stored[0].parent_block_hash is None
    assert stored[1].parent_block_hash == stored[0].block_hashes[-1]
    events.clear()
    engine.submit(2, request(PROMPTS[4], max_tokens=1))
    finish(engine)
    assert any(isinstance(event, BlockRemoved) for event in events)
    events.clear()
    engine.reset_prefix_cache()
    engine.step()
    assert events == [BlocksCleared()]


def test_a_failing_step_ends_its_requests_and_no_other(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    engine = make(max_running=1)
    engine.submit(1, request(PROMPTS[3]))
    engine.submit(2, request(PROMPTS[3]))
    with monkeypatch.context() as patched:
        patched.setattr(MODEL, "forward", lambda *_, **__: 1 / 0)
        ((key, delta),) = engine.step()
    assert key == 1
    assert delta.finish_reason is FinishReason.ERROR
    assert "ZeroDivisionError" in (delta.error or "")
    said = finish(engine)
    assert tokens(said[2]) == naive(PROMPTS[3])
    assert said[2][0].cached_tokens == 0, "what the failed step wrote is not reused"


def test_an_answer_that_cannot_go_on_is_the_requests_fault() -> None:
    engine = make()
    engine.submit(1, request([5]))
    engine.step()

    class Matcher:
        complete = hurried = False

        def allow(self, logits: Any, raw: Any, left: int, most: int) -> Any:
            del raw, left, most
            return logits

        def advance(self, token_id: int) -> None:
            raise RequestError(f"{token_id} is not allowed")

    sequence = engine._scheduler.get(1)
    assert sequence is not None
    sequence.matcher = Matcher()  # type: ignore[assignment]
    ((_, delta),) = engine.step()
    assert (delta.finish_reason, delta.refused) == (FinishReason.ERROR, True)
    assert delta.error is not None
    assert delta.error.endswith("is not allowed")


def test_a_failing_decoder_ends_only_the_request_that_needs_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.CRITICAL)
    engine = make(hooks={"decode": lambda _: 1 / 0})
    engine.submit(1, request([5], stop=("x",)))
    engine.submit(2, request([5]))
    said = finish(engine)
    assert said[1][-1].finish_reason is FinishReason.ERROR
    assert len(tokens(said[2])) == 12
    assert engine.load().kv_used_blocks == 0


def test_an_error_in_the_block_accounting_stops_the_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = make()
    engine.submit(1, request(PROMPTS[3]))
    monkeypatch.setattr(engine._scheduler, "complete", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        engine.run(lambda _: None, threading.Event())


def test_the_loop_survives_failing_receivers_and_serves_other_threads(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.CRITICAL)
    said: dict[int, list[int]] = {}
    failures = iter([True, False, True])

    def emit(deltas: Deltas) -> None:
        for key, delta in deltas:
            said.setdefault(key, []).extend(delta.token_ids)
        if next(failures, False):
            raise ValueError("the receiver is broken")

    engine = make(hooks={"on_kv_events": lambda _: 1 / 0})
    stop = threading.Event()
    thread = threading.Thread(target=engine.run, args=(emit, stop))
    thread.start()
    try:
        for key in range(20):
            engine.submit(key, request(PROMPTS[key % len(PROMPTS)]))
            if key % 3 == 0:
                engine.abort(key)
        deadline = time.monotonic() + 20
        while engine.load().running + engine.load().waiting:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        stop.set()
        thread.join()
    assert engine.load().kv_used_blocks == 0
    for key in range(20):
        if key % 3:
            assert said[key] == naive(PROMPTS[key % len(PROMPTS)])


def test_one_block_is_one_range_of_bytes() -> None:
    arena = KVArena(TINY, 5, 4, device=MODEL.device, dtype=torch.bfloat16)
    size = TINY.kv_bytes(4, 2)
    assert arena.tensor[3].is_contiguous()
    assert arena.tensor[3].nbytes == size
    assert arena.tensor[3].data_ptr() - arena.tensor.data_ptr() == 3 * size


def test_bfloat16_runs() -> None:
    half = tiny_model(dtype=torch.bfloat16)
    engine = ReferenceEngine(half, *sized(num_blocks=32))
    engine.submit(1, request(PROMPTS[4]))
    engine.submit(2, request(PROMPTS[2]))
    assert all(len(tokens(deltas)) == 12 for deltas in finish(engine).values())


def test_every_step_is_in_memory_before_others_may_read_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A GPU computes later than the call; most steps of a long prompt sample no token."""
    engine = make(max_tokens=16)
    done: list[str] = []
    settle, complete = engine.arena.settle, engine._scheduler.complete

    def recorded(name: str, call: Callable[..., None]) -> Callable[..., None]:
        def record(*arguments: Any) -> None:
            done.append(name)
            call(*arguments)

        return record

    monkeypatch.setattr(engine.arena, "settle", recorded("settled", settle))
    monkeypatch.setattr(engine._scheduler, "complete", recorded("completed", complete))
    engine.submit(1, request(PROMPTS[-1], max_tokens=2))
    finish(engine)
    assert done == ["settled", "completed"] * 5
