"""Served sim workers that hand modelled KV over."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from typing import Any

import pytest

from commutator.contract.disagg import HandoverRequest
from commutator.contract.request import GenerateRequest, SamplingParams
from commutator.contract.worker import WorkerRecord
from commutator.engine.client import TokenApiClient
from commutator.errors import EngineHandoverError, RequestError
from commutator_engine_kit.kv.transfer.protocol import PullHandover, ReadyBlock, ReleaseRequest
from commutator_engine_kit.kv.transfer.reader import ReadTarget
from commutator_engine_kit.kv.transfer.sources import Connection
from commutator_engine_kit.server import TokenApiServer
from commutator_sim.config import SimConfig
from commutator_sim.engine import SimEngine
from commutator_sim.handover import WaitingMover, handover_info, handover_source

PROMPT = tuple(range(1, 1001))


@asynccontextmanager
async def worker(**settings: Any) -> AsyncIterator[tuple[TokenApiClient, WorkerRecord]]:
    config = SimConfig(kind="sim", **{"speedup": "unlimited", **settings})
    server = TokenApiServer(SimEngine(config, model="sim", max_model_len=8192))
    address = f"127.0.0.1:{await server.start('127.0.0.1', 0)}"
    client = TokenApiClient(address)
    try:
        info = await client.start()
        yield (
            client,
            WorkerRecord(
                worker_id=address, engine="sim", kind="sim", model="sim", address=address, info=info
            ),
        )
    finally:
        await client.close()
        await server.stop()


def request(prompt: Sequence[int] = PROMPT) -> GenerateRequest:
    return GenerateRequest(
        request_id="r",
        token_ids=list(prompt),
        sampling=SamplingParams(max_tokens=9, ignore_eos=True),
    )


async def tokens_of(client: TokenApiClient, asked: GenerateRequest) -> list[int]:
    async with aclosing(client.generate(asked)) as stream:
        return [token async for delta in stream for token in delta.token_ids]


async def handed_over(
    prefill: tuple[TokenApiClient, WorkerRecord], decode: tuple[TokenApiClient, WorkerRecord]
) -> list[int]:
    style = PullHandover()
    handover = HandoverRequest(
        handover_id="one", request=request(), prefill=prefill[1], decode=decode[1]
    )
    prefilling = asyncio.create_task(tokens_of(prefill[0], style.prefill_request(handover)))
    try:
        return await tokens_of(decode[0], style.decode_request(handover, None))
    finally:
        with suppress(EngineHandoverError):  # the decode side may be done before it begins
            await prefilling


@pytest.mark.parametrize("sizes", [(16, 16), (16, 64), (64, 16)])
async def test_blocks_of_other_sizes_become_ones_own(sizes: tuple[int, int]) -> None:
    async with worker(block_size=sizes[0]) as prefill, worker(block_size=sizes[1]) as decode:
        assert await handed_over(prefill, decode) == list(PROMPT[:9])
        told = await decode[0].handover_statistics(timeout_s=30)
        whole = 999 // max(sizes) * max(sizes)
        assert told.pulls.succeeded == 1
        assert told.pulls.pulled_bytes == whole * 131_072
        deadline = asyncio.get_running_loop().time() + 60
        while (await prefill[0].load()).kv_used_blocks:
            assert asyncio.get_running_loop().time() < deadline
            await asyncio.sleep(0.01)
        again = await decode[0].load()
        assert again.kv_cached_blocks >= whole // sizes[1]


async def test_a_prompt_that_fills_no_block_is_computed_where_it_is_decoded() -> None:
    async with worker(block_size=2048) as prefill, worker(block_size=2048) as decode:
        assert await handed_over(prefill, decode) == list(PROMPT[:9])


async def test_sizes_that_do_not_divide_are_refused() -> None:
    async with worker(block_size=16) as prefill, worker(block_size=24) as decode:
        infos = [record.info.handover for _, record in (prefill, decode)]
        assert infos[0] is not None
        assert infos[1] is not None
        assert PullHandover().mismatch(infos[0], infos[1]) is not None
        with pytest.raises(RequestError, match="cannot be read as blocks"):
            await handed_over(prefill, decode)


async def test_without_a_prefix_cache_nothing_is_handed_over() -> None:
    async with worker(prefix_caching=False) as (client, record):
        assert record.info.handover is None
        handover = HandoverRequest(
            handover_id="one", request=request(), prefill=record, decode=record
        )
        with pytest.raises(RequestError, match="prefix_caching"):
            await tokens_of(client, PullHandover().prefill_request(handover))


async def test_a_prefill_that_is_not_wanted_any_more_is_not_begun() -> None:
    async with worker() as (client, record):
        assert record.info.handover is not None
        exporter = Connection(record.info.handover.address or "")
        await exporter.start()
        await exporter.ask("release", ReleaseRequest("one"), timeout_s=30)
        await exporter.close()
        handover = HandoverRequest(
            handover_id="one", request=request(), prefill=record, decode=record
        )
        with pytest.raises(EngineHandoverError, match="given the hand-over up"):
            await tokens_of(client, PullHandover().prefill_request(handover))


async def test_transfers_take_their_time_one_after_the_other() -> None:
    config = SimConfig(
        kind="sim",
        speedup=10,
        kv_bytes_per_token=1000,
        handover_bandwidth_bytes_per_s=160_000,
        handover_latency_s=0.5,
    )
    mover, source = WaitingMover(config), handover_source(config, handover_info(config, "m"), "a")
    blocks = [(place, ReadyBlock(place, b"", 0)) for place in range(2)]
    released = []
    target = ReadTarget(0, 32, (0, 1), on_released=lambda: released.append(True))
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    await asyncio.gather(*(mover.fetch(source, blocks, target, 60) for _ in range(2)))
    # Four blocks of 0.1 s and the latency, ten times as fast.
    assert loop.time() - began_s >= 0.09 - 0.001
    assert released == [True]


async def test_a_transfer_that_takes_too_long_brings_nothing() -> None:
    config = SimConfig(kind="sim", speedup=1, handover_latency_s=1000)
    mover, source = WaitingMover(config), handover_source(config, handover_info(config, "m"), "a")
    target = ReadTarget(0, 16, (0,))
    (problem,) = await mover.fetch(source, [(0, ReadyBlock(0, b"", 0))], target, 0.01)
    assert problem is not None
    assert target.under_way == 0
