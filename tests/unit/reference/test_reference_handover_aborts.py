"""Hand-overs aborted at random moments, on arenas that are too small for all of them."""

from __future__ import annotations

import asyncio
import random

from tests.support.handover_rig import Worker, phases, request, tiny_worker
from tests.support.reference_integrity import check_engine

from commutator.contract.request import GenerateRequest
from commutator.errors import EngineError


def prompt(number: int, length: int) -> list[int]:
    rng = random.Random(number)
    return [rng.randrange(5, 95) for _ in range(length)]


async def some_of(worker: Worker, asked: GenerateRequest, deltas: int) -> list[int] | None:
    """The answer; None if it failed or was aborted after ``deltas`` deltas."""
    stream = worker.client.generate(asked)
    answer: list[int] = []
    try:
        async for delta in stream:
            answer += delta.token_ids
            if not (deltas := deltas - 1):
                return None
    except EngineError:
        return None
    finally:
        await stream.aclose()
    return answer


async def test_whatever_is_aborted_the_answers_are_right_and_nothing_is_left() -> None:
    rng = random.Random(1)
    async with (
        tiny_worker() as alone,
        tiny_worker(num_blocks=45, max_tokens_per_step=16) as prefill,
        tiny_worker(num_blocks=45, block_size=8) as decode,
    ):
        prompts = [prompt(number, 20 + 17 * number) for number in range(8)]
        expected = [await alone.tokens(request(each)) for each in prompts]

        async def one(number: int) -> None:
            """One hand-over of which one phase, or none, is aborted."""
            await asyncio.sleep(rng.random() * 0.3)
            which = rng.randrange(len(prompts))
            salt = rng.choice(["a", "b", f"{number}"])
            asked = request(prompts[which], cache_salt=salt)
            first, second = phases(asked, prefill, decode, lease_s=60, timeout_s=60)
            begun = [
                asyncio.create_task(some_of(prefill, first, 1_000)),
                asyncio.create_task(some_of(decode, second, rng.choice([1, 2, 1_000]))),
            ]
            victim = rng.choice([0, 1, 2, 2])
            if victim < 2:
                await asyncio.sleep(rng.random() * 0.1)
                begun[victim].cancel()
            await asyncio.wait(begun)
            answer = None if begun[1].cancelled() else begun[1].result()
            assert answer is None or answer == expected[which]

        await asyncio.gather(*(one(number) for number in range(40)))
        # At last a hand-over without a disturbance.
        first, second = phases(request(prompts[5]), prefill, decode)
        both = await asyncio.gather(some_of(prefill, first, 1_000), some_of(decode, second, 1_000))
        assert both[1] == expected[5]
        for worker in (prefill, decode):
            await worker.until_idle()
            assert worker.tiny is not None
            check_engine(worker.tiny.engine)
