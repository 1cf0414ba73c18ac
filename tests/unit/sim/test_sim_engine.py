"""The served engine in its event loop: speeds, bursts, load, refusals, KV events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from tests.support.virtual_time import in_virtual_time

from commutator import AdapterIdentity
from commutator.contract.block import BlockRemoved, BlockStored, KvEvent
from commutator.contract.request import FinishReason, GenerateRequest, SamplingParams, TokenDelta
from commutator.errors import EngineOverloadedError, RequestError
from commutator_engine_kit import EventPublisher
from commutator_sim.config import SimConfig, SimTier
from commutator_sim.engine import SimEngine
from commutator_sim.kv_events import block_keys


class Outlet:
    """Takes what an engine emits, each delta with its time of arrival."""

    def __init__(self) -> None:
        self.deltas: dict[int, list[TokenDelta]] = {}
        self.times_s: dict[int, list[float]] = {}
        self.ended = asyncio.Event()

    def emit(self, deltas: Sequence[tuple[int, TokenDelta]]) -> None:
        for key, delta in deltas:
            self.deltas.setdefault(key, []).append(delta)
            now_s = asyncio.get_running_loop().time()
            self.times_s.setdefault(key, []).append(now_s)
            if delta.finish_reason is not None:
                self.ended.set()

    async def wait_finished(self, *keys: int) -> None:
        async with asyncio.timeout(10):
            while not all(self.is_finished(key) for key in keys):
                self.ended.clear()
                await self.ended.wait()

    def is_finished(self, key: int) -> bool:
        return bool(self.deltas.get(key)) and self.deltas[key][-1].finish_reason is not None


@asynccontextmanager
async def running(**settings: Any) -> AsyncIterator[tuple[SimEngine, Outlet]]:
    config = SimConfig(kind="sim", **{"speedup": "unlimited", "kv_events": False, **settings})
    engine, outlet = SimEngine(config, model="sim", max_model_len=2000), Outlet()
    engine.start(outlet.emit)
    yield engine, outlet
    await asyncio.to_thread(engine.stop)


def ask(tokens: int, max_tokens: int = 32, **fields: Any) -> GenerateRequest:
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return GenerateRequest(
        request_id="r", token_ids=list(range(1, tokens + 1)), sampling=sampling, **fields
    )


async def test_tokens_come_in_bursts_at_unlimited_speed() -> None:
    async with running(burst_tokens=8) as (engine, outlet):
        for key in range(20):
            engine.submit(key, ask(50 + key))
        await outlet.wait_finished(*range(20))
    for deltas in outlet.deltas.values():
        sizes = [len(delta.token_ids) for delta in deltas]
        assert sum(sizes) == 32
        assert max(sizes) <= 8
        assert deltas[0].cached_tokens == 0
        assert {delta.cached_tokens for delta in deltas[1:]} == {None}


@in_virtual_time
async def test_unlimited_speed_does_not_sleep() -> None:
    """Ten thousand tokens last more than a minute of modelled time."""
    async with running() as (engine, outlet):
        for key in range(10):
            engine.submit(key, ask(10, 1000))
        await outlet.wait_finished(*range(10))
        assert asyncio.get_running_loop().time() == 0


@pytest.mark.parametrize("speedup", [1, 20])
@in_virtual_time
async def test_tokens_stream_at_the_modelled_pace(speedup: float) -> None:
    async with running(speedup=speedup) as (engine, outlet):
        engine.submit(0, ask(400, 21))
        await outlet.wait_finished(0)
    times_s = outlet.times_s[0]
    assert times_s[0] * speedup == pytest.approx(400 / 8000, rel=0.1)
    assert times_s[-1] * speedup == pytest.approx(400 / 8000 + 20 * 0.00635, rel=0.1)
    if speedup == 1:
        assert len(outlet.deltas[0]) == 21, "tokens come one by one"


@in_virtual_time
async def test_load_is_exact() -> None:
    async with running(speedup=1, max_running_requests=2) as (engine, outlet):
        for key in range(5):
            engine.submit(key, ask(33, 500))
        await asyncio.sleep(0.05)
        load = engine.load()
        assert (load.running, load.waiting) == (2, 3)
        said = sum(len(d.token_ids) for d in outlet.deltas[0])
        # The two prompts are equal: they share their two full blocks.
        assert load.kv_used_blocks == 2 + 2 * -(-(33 + said - 32) // 16)
        assert load.kv_capacity_blocks == 16_384
        for key in range(5):
            engine.abort(key)
        load = engine.load()
        assert (load.running, load.waiting, load.kv_used_blocks) == (0, 0, 0)
        assert load.kv_cached_blocks >= 2
        engine.reset_prefix_cache()
        assert engine.load().kv_cached_blocks == 0


@in_virtual_time
async def test_an_aborted_request_says_nothing_more() -> None:
    async with running(speedup=1) as (engine, outlet):
        engine.submit(0, ask(8, 500))
        await asyncio.sleep(0.03)
        engine.abort(0)
        engine.abort(0)
        said = len(outlet.deltas.get(0, []))
        await asyncio.sleep(0.05)
        assert len(outlet.deltas.get(0, [])) == said


async def test_a_full_worker_is_overloaded() -> None:
    async with running(max_running_requests=2, max_queued_requests=1) as (engine, outlet):
        for key in range(3):
            engine.submit(key, ask(8))
        with pytest.raises(EngineOverloadedError, match="no more than 3"):
            engine.submit(3, ask(8))
        await outlet.wait_finished(0, 1, 2)
        engine.submit(4, ask(8))
        await outlet.wait_finished(4)


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (ask(0), "prompt of 0 tokens"),
        (ask(2000), "prompt of 2000 tokens"),
        (ask(8, 0), "max_tokens"),
        (
            GenerateRequest(request_id="r", token_ids=[-1], sampling=SamplingParams()),
            "out of range",
        ),
        (
            GenerateRequest(
                request_id="r", token_ids=[1], sampling=SamplingParams(logit_bias={1: 2.0})
            ),
            "logit_bias",
        ),
    ],
)
async def test_what_cannot_be_answered_is_refused(request_: GenerateRequest, message: str) -> None:
    async with running() as (engine, outlet):
        with pytest.raises(RequestError, match=message):
            engine.submit(0, request_)
        assert engine.load().running == engine.load().waiting == 0
        engine.submit(0, ask(8))
        await outlet.wait_finished(0)


async def test_an_answer_stops_where_the_context_ends() -> None:
    async with running() as (engine, outlet):
        engine.submit(0, ask(1990, 500))
        await outlet.wait_finished(0)
        assert sum(len(delta.token_ids) for delta in outlet.deltas[0]) == 10
        assert outlet.deltas[0][-1].finish_reason is FinishReason.LENGTH


async def test_the_answer_is_cached_for_the_next_turn() -> None:
    async with running() as (engine, outlet):
        engine.submit(0, ask(40, 41))
        await outlet.wait_finished(0)
        answer = [token for delta in outlet.deltas[0] for token in delta.token_ids]
        conversation = [*range(1, 41), *answer, 7, 8, 9]
        engine.submit(
            1,
            GenerateRequest(
                request_id="r", token_ids=conversation, sampling=SamplingParams(max_tokens=1)
            ),
        )
        await outlet.wait_finished(1)
        assert outlet.deltas[1][0].cached_tokens == 80


async def test_without_prefix_caching_nothing_is_found() -> None:
    async with running(prefix_caching=False) as (engine, outlet):
        for key in range(2):
            engine.submit(key, ask(64, 1))
            await outlet.wait_finished(key)
        assert outlet.deltas[1][0].cached_tokens == 0
        assert engine.load().kv_cached_blocks == 0


async def test_kv_events_follow_a_block_through_the_tiers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device holds 8 blocks, the host 2; the event of an offloaded block has its contents."""
    published: list[KvEvent] = []
    monkeypatch.setattr(EventPublisher, "publish", lambda _, events: published.extend(events))
    tiers = (
        SimTier(kind="host", capacity_blocks=2, bandwidth_bytes_per_s=1e9),
        SimTier(kind="object", capacity_blocks=100, bandwidth_bytes_per_s=1e8),
    )
    prompts = [[*range(1, 65)], [*range(100, 180)], [*range(1, 65)], [*range(200, 300)]]
    async with running(kv_events=True, kv_capacity_blocks=8, tiers=tiers) as (engine, outlet):
        for key, prompt in enumerate(prompts):
            request = GenerateRequest(
                request_id="r",
                token_ids=prompt,
                sampling=SamplingParams(max_tokens=2),
                adapter=AdapterIdentity(name="sql", digest="a" * 64),
            )
            engine.submit(key, request)
            await outlet.wait_finished(key)
        assert outlet.deltas[2][0].cached_tokens == 48
        engine.reset_prefix_cache()
        await asyncio.sleep(0.01)
    meaning: dict[Any, tuple[int, ...]] = {}
    places: dict[str | None, set[Any]] = {}
    for event in published:
        here = places.setdefault(getattr(event, "medium", None), set())
        if isinstance(event, BlockStored):
            assert event.adapter == "a" * 64
            parent = event.parent_block_hash
            prefix = () if parent is None else meaning[parent]
            for i, block in enumerate(event.block_hashes):
                prefix += event.token_ids[i * 16 : (i + 1) * 16]
                assert meaning.setdefault(block, prefix) == prefix
            here |= set(event.block_hashes)
        else:
            assert isinstance(event, BlockRemoved)
            assert here >= set(event.block_hashes)
            here -= set(event.block_hashes)
    assert set(places) == {"GPU", "CPU", "EXTERNAL"}
    assert not any(places.values()), "the reset removed every block"
    for prompt in prompts:
        for i in range(len(prompt) // 16):
            assert tuple(prompt[: (i + 1) * 16]) in meaning.values()


def test_hashes_are_chained() -> None:
    """As the events' parent hashes assume."""
    assert block_keys([1] * 32, 16, 0)[0] != block_keys([1] * 32, 16, 0)[1]
