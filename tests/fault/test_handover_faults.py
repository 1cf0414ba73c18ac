"""Hand-overs between real processes that are killed, paused, or full: nothing is left behind."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from attrs import frozen
from tests.support.handover_rig import (
    Worker,
    connect,
    hand_over,
    phases,
    request,
    tiny_worker,
)

from commutator.contract.request import TokenDelta
from commutator.errors import EngineError, EngineHandoverError, EngineUnavailableError

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
WAIT_S = 60.0
STEP_TOKENS = 16
STEP_PAUSE_S = 0.05
"""A prompt of 300 tokens then takes a second, in which it can be disturbed."""


def prompt(number: int, length: int = 300) -> list[int]:
    rng = random.Random(number)
    return [rng.randrange(5, 95) for _ in range(length)]


def tokens(deltas: Sequence[TokenDelta]) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]


@frozen(eq=False)
class Process:
    """A worker in a process of its own."""

    worker: Worker
    process: subprocess.Popen[bytes]

    def send(self, number: signal.Signals) -> None:
        os.kill(self.process.pid, number)


def _start() -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.support.handover_rig"],
        cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip


_spares: list[subprocess.Popen[bytes]] = []
"""At most one, which loads its libraries, seconds of work, while a test runs."""


@pytest.fixture(scope="module", autouse=True)
def spare() -> Iterator[None]:
    _spares.append(_start())
    yield
    for one in _spares:
        with one:  # closes its standard input, by which it ends, and waits
            pass
    _spares.clear()


@asynccontextmanager
async def process(**options: Any) -> AsyncIterator[Process]:
    started = _spares.pop()
    _spares.append(_start())
    assert started.stdin is not None
    assert started.stdout is not None
    try:
        started.stdin.write(f"{json.dumps(options)}\n".encode())
        started.stdin.flush()
        async with asyncio.timeout(120):
            port = json.loads(await asyncio.to_thread(started.stdout.readline))["port"]
        worker = await connect(f"127.0.0.1:{port}")
        yield Process(worker, started)
        await worker.client.close()
    finally:
        started.kill()
        await asyncio.to_thread(started.communicate)


async def answer(worker: Worker, token_ids: Sequence[int]) -> list[int]:
    return await worker.tokens(request(token_ids))


async def still_serves(decode: Worker, expected: Sequence[int], **options: Any) -> None:
    """What failed is computed here, and a new prefill worker can be read from."""
    assert await answer(decode, prompt(1)) == expected
    async with process(**options) as other:
        await decode.client.reset_prefix_cache()
        deltas = await hand_over(request(prompt(1)), other.worker, decode)
        assert tokens(deltas) == expected
        assert deltas[0].cached_tokens == 0
        await other.worker.until_idle()


@pytest.fixture(scope="module")
def expected() -> list[int]:
    async def alone() -> list[int]:
        async with tiny_worker() as worker:
            return await answer(worker, prompt(1))

    return asyncio.run(alone())


SLOW = {"max_tokens_per_step": STEP_TOKENS, "step_pause_s": STEP_PAUSE_S}
SLOWER = {"max_tokens_per_step": STEP_TOKENS, "step_pause_s": 0.3}


@pytest.mark.parametrize("when", ["before", "during", "after"])
async def test_the_prefill_worker_is_killed(when: str, expected: list[int]) -> None:
    async with process(silence_s=5.0) as decode:
        async with process(**SLOW, hangs_after_steps=6 if when == "during" else None) as prefill:
            first, second = phases(request(prompt(1)), prefill.worker, decode.worker)
            prefilling = asyncio.create_task(prefill.worker.tokens(first))
            if when == "before":
                prefill.send(signal.SIGKILL)
                await asyncio.to_thread(prefill.process.wait)
            decoding = asyncio.create_task(decode.worker.tokens(second))
            if when == "during":
                await asyncio.sleep(STEP_PAUSE_S * 6)
                prefill.send(signal.SIGKILL)
            elif when == "after":
                assert await decoding == expected
                await prefilling
                prefill.send(signal.SIGKILL)
            if when != "after":
                with pytest.raises(EngineHandoverError):
                    await decoding
                with pytest.raises(EngineUnavailableError):
                    await prefilling
        await decode.worker.until_idle()
        await still_serves(decode.worker, expected)
        await decode.worker.until_idle()


@pytest.mark.parametrize("when", ["before", "during", "after"])
async def test_the_decode_worker_is_killed(when: str, expected: list[int]) -> None:
    async with process(**SLOW) as prefill:
        async with process() as decode:
            first, second = phases(request(prompt(1)), prefill.worker, decode.worker, lease_s=3.0)
            prefilling = asyncio.create_task(prefill.worker.tokens(first))
            if when != "before":
                decoding = asyncio.create_task(decode.worker.tokens(second))
                if when == "during":
                    await asyncio.sleep(STEP_PAUSE_S * 4)
                else:
                    assert await decoding == expected
                decode.send(signal.SIGKILL)
                await asyncio.gather(decoding, return_exceptions=True)
            else:
                decode.send(signal.SIGKILL)
            await prefilling
        # Only "after" was released; the lease releases the rest.
        await prefill.worker.until_idle()
        async with process() as other:
            deltas = await hand_over(request(prompt(1)), prefill.worker, other.worker)
            assert tokens(deltas) == expected
            await other.worker.until_idle()
        await prefill.worker.until_idle()


async def test_the_prefill_worker_is_paused(expected: list[int]) -> None:
    async with process(silence_s=3.0) as decode, process(**SLOWER) as prefill:
        first, second = phases(request(prompt(1)), prefill.worker, decode.worker, lease_s=3.0)
        prefilling = asyncio.create_task(prefill.worker.tokens(first))
        decoding = asyncio.create_task(decode.worker.tokens(second))
        await asyncio.sleep(2 * SLOWER["step_pause_s"])
        prefill.send(signal.SIGSTOP)
        try:
            async with asyncio.timeout(WAIT_S):
                with pytest.raises(EngineHandoverError):
                    await decoding
            await still_serves(decode.worker, expected)
        finally:
            prefill.send(signal.SIGCONT)
        # It goes on, and its blocks come free although the release may be lost; so do those that
        # NIXL was still reading into.
        await asyncio.gather(prefilling, return_exceptions=True)
        await prefill.worker.until_idle()
        await decode.worker.until_idle()


async def test_a_release_that_is_lost_costs_a_lease(expected: list[int]) -> None:
    """The decode leg never comes; it is as if its connection were cut before it could release."""
    async with process(**SLOW) as prefill, process() as decode:
        first, _ = phases(request(prompt(1)), prefill.worker, decode.worker, lease_s=2.0)
        await prefill.worker.tokens(first)
        await prefill.worker.until_idle()
        assert (await prefill.worker.client.handover_statistics()).exports.lapsed == 1
        deltas = await hand_over(request(prompt(1)), prefill.worker, decode.worker)
        assert tokens(deltas) == expected


async def test_a_full_decode_arena_waits_and_then_gives_up(expected: list[int]) -> None:
    async with process() as prefill, process(num_blocks=90, step_pause_s=0.02) as decode:
        stream = decode.worker.client.generate(request(prompt(7, 60), 290))
        await anext(stream)  # it holds 15 blocks, and is owed up to 88
        # With a long limit it waits until there is room; the prefill worker keeps the blocks.
        patient = asyncio.create_task(
            hand_over(request(prompt(1)), prefill.worker, decode.worker, lease_s=3.0)
        )
        with pytest.raises(EngineHandoverError, match="did not arrive within"):
            await hand_over(
                request(prompt(8)), prefill.worker, decode.worker, lease_s=3.0, timeout_s=0.3
            )
        async for _ in stream:
            pass
        assert tokens(await patient) == expected
        await prefill.worker.until_idle()
        await decode.worker.until_idle()


async def test_workers_killed_again_and_again_leave_nothing(expected: list[int]) -> None:
    """At random moments, one side or the other."""
    rng = random.Random(5)
    async with process(silence_s=2.0) as decode:
        for _ in range(4):
            async with process(**SLOW) as prefill:
                asked = [
                    asyncio.create_task(
                        hand_over(request(prompt(1), cache_salt=f"{number}"), prefill.worker,
                                  decode.worker)
                    )
                    for number in range(3)
                ]  # fmt: skip
                await asyncio.sleep(rng.random())
                prefill.send(signal.SIGKILL)
                for result in await asyncio.gather(*asked, return_exceptions=True):
                    if isinstance(result, BaseException):
                        assert isinstance(result, EngineError)
                    else:
                        assert tokens(result) == expected
        await decode.worker.until_idle()
        await still_serves(decode.worker, expected)
        await decode.worker.until_idle()
