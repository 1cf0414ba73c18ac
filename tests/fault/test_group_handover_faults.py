"""Hand-overs of models with several kinds of KV, between processes that are killed."""

from __future__ import annotations

import asyncio
import random
import signal
from contextlib import AsyncExitStack

import pytest
from tests.fault.test_handover_faults import answer, process, spare, tokens
from tests.support.group_trials import made_tokens, one_thread
from tests.support.grouped_models import FAMILIES
from tests.support.handover_rig import Worker, hand_over, request, tiny_worker

from commutator.errors import EngineError

__all__ = ["one_thread", "spare"]
"""Fixtures of every test here."""

PROMPT = made_tokens(1, 200)
STEP_TOKENS = 16
STEP_PAUSE_S = 0.03
LONGEST_S = 0.6
"""A hand-over takes about this long."""
MOMENTS, SAMPLE = 40, 2
"""Of each family, half of them for either side."""


async def expected_of(family: str) -> list[int]:
    async with tiny_worker(family=family, num_blocks=400, block_size=8) as worker:
        return await answer(worker, PROMPT)


def slow(family: str) -> dict[str, object]:
    return {
        "family": family,
        "num_blocks": 400,
        "block_size": 8,
        "max_tokens_per_step": STEP_TOKENS,
        "step_pause_s": STEP_PAUSE_S,
        "silence_s": 3.0,
    }


async def outcomes(
    prefill: Worker, decode: Worker, count: int, *, first: int
) -> list[asyncio.Task[list[int]]]:
    async def one(number: int) -> list[int]:
        asked = request(PROMPT, cache_salt=f"{number}")
        return tokens(await hand_over(asked, prefill, decode, lease_s=3.0))

    return [asyncio.create_task(one(first + number)) for number in range(count)]


@pytest.mark.parametrize(
    ("family", "moments"),
    [
        *[pytest.param(one, SAMPLE, marks=pytest.mark.slow) for one in ("gemma3", "qwen3_next")],
        *[pytest.param(one, MOMENTS, marks=pytest.mark.long) for one in FAMILIES],
    ],
)
async def test_either_side_is_killed(family: str, moments: int) -> None:
    """What is answered is right; what survives frees all that it held, and serves on."""
    expected = await expected_of(family)
    rng = random.Random(family)
    async with AsyncExitStack() as kept:
        survivor = await kept.enter_async_context(process(**slow(family)))
        for moment in range(moments):
            async with process(**slow(family)) as victim:
                kills_prefill = moment % 2 == 0
                prefill, decode = (victim, survivor) if kills_prefill else (survivor, victim)
                asked = await outcomes(prefill.worker, decode.worker, 2, first=10 * moment)
                await asyncio.sleep(LONGEST_S * (moment // 2 + rng.random()) / (moments / 2))
                victim.send(signal.SIGKILL)
                for result in await asyncio.gather(*asked, return_exceptions=True):
                    if isinstance(result, BaseException):
                        assert isinstance(result, EngineError), result
                    else:
                        assert result == expected
            # A killed reader's blocks come back when its lease lapses.
            await survivor.worker.until_idle()
        assert await answer(survivor.worker, PROMPT) == expected
        async with process(**slow(family)) as other:
            deltas = await hand_over(request(PROMPT), survivor.worker, other.worker)
            assert tokens(deltas) == expected
