"""Prefill at one real SGLang server and decode at another, over NIXL."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from typing import Literal

import pytest
import pytest_asyncio
from tests.support.oracle import greedy
from tests.support.sglang_server import SglangServer, running_sglang

from commutator.contract.engine import EngineClient
from commutator.contract.request import SamplingParams
from commutator.contract.worker import EngineInfo, WorkerRecord
from commutator_sglang.client import SglangClient
from commutator_sglang.handover import RoomHandover
from commutator_testing.engines import WorkerPair, make_request

pytestmark = [pytest.mark.sglang, pytest.mark.long]

SIX_TOKENS = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
Servers = tuple[SglangServer, SglangServer]


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    with (
        running_sglang(tmp_path_factory.mktemp("prefill"), role="prefill") as prefill,
        running_sglang(tmp_path_factory.mktemp("decode"), role="decode") as decode,
    ):
        yield prefill, decode


@pytest_asyncio.fixture
async def pair(servers: Servers) -> AsyncIterator[WorkerPair]:
    prefill, decode = (SglangClient(server.url) for server in servers)
    records = (
        record(prefill.server.url, await prefill.start()),
        record(decode.server.url, await decode.start()),
    )
    yield WorkerPair(RoomHandover(), prefill, decode, records, timeout_s=300.0)
    await prefill.close()
    await decode.close()


def record(url: str, info: EngineInfo) -> WorkerRecord:
    return WorkerRecord(
        worker_id=url, engine="sglang", kind="sglang", model=info.model, address=url, info=info
    )


async def until(client: EngineClient, *, busy: bool) -> None:
    async with asyncio.timeout(120):
        while True:
            load = await client.load()
            if bool(load.running or load.waiting) == busy:
                return
            await asyncio.sleep(0.02)


def test_they_fit(pair: WorkerPair) -> None:
    here, there = (each.info.handover for each in pair.records)
    assert here is not None
    assert there is not None
    assert pair.style.mismatch(here, there) is None


@pytest.mark.proves(
    "sglang", "prefill and decode apart: the right tokens", how="real engine on CPU"
)
async def test_the_right_ids_and_nothing_left_behind(pair: WorkerPair) -> None:
    for prompt in (list(range(100, 148)), list(range(400, 470))):
        deltas = await pair.run(make_request("a", prompt, SIX_TOKENS))
        ids = [token for delta in deltas for token in delta.token_ids]
        assert ids == greedy(prompt, 6)
    await until(pair.prefill, busy=False)
    await until(pair.decode, busy=False)


@pytest.mark.proves("sglang", "prefill and decode apart: one side killed", how="real engine on CPU")
@pytest.mark.parametrize("leg", ["prefill", "decode"])
async def test_a_leg_whose_other_is_lost_ends_at_once(
    pair: WorkerPair, leg: Literal["prefill", "decode"]
) -> None:
    """It waits for the other one, as far as it is left to; then its server is as before."""
    handover = pair.handover(make_request("a", range(700, 780), SIX_TOKENS))
    if leg == "prefill":
        client, request = pair.prefill, pair.style.prefill_request(handover)
    else:
        client, request = pair.decode, pair.style.decode_request(handover, None)
    stream = client.generate(request)
    await until(client, busy=True)
    begun_s = time.monotonic()
    await stream.aclose()
    await until(client, busy=False)
    print(f"the {leg} server was idle {time.monotonic() - begun_s:.3f} s after the abort")
