"""Hand-overs of models with several kinds of KV: all that the last boundary needs, and no more."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

import pytest
from attrs import evolve
from tests.support.group_trials import made_tokens, one_thread
from tests.support.grouped_models import FAMILIES, grouped_model
from tests.support.handover_rig import Worker, hand_over, request, tiny_worker
from tests.support.reference_integrity import check_engine

from commutator.contract.request import TokenDelta
from commutator.errors import EngineHandoverError
from commutator_engine_kit.kv import KvGroup
from commutator_engine_kit.kv.transfer import PullHandover, handover_places

__all__ = ["one_thread"]
"""A fixture of every test here."""

EVERY = pytest.mark.parametrize("family", FAMILIES)
LENGTHS = (1, 8, 9, 24, 25, 40, 41, 79, 80, 81, 150)
"""Around ends of blocks, windows (24) and chunks (40)."""


def tokens(deltas: Sequence[TokenDelta]) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]


def counted_needs(groups: Sequence[KvGroup], length: int) -> int:
    """How many blocks of 8 tokens the last boundary needs, token by token."""
    boundary = (length - 1) // 8 * 8
    needed = set()
    for number, group in enumerate(groups):
        for at in range(boundary):
            reads = {
                "full": True,
                "latent": True,
                "sliding": boundary - at < group.window,
                "chunked": group.window and at // group.window == boundary // group.window,
                "recurrent": at == boundary - 1,
            }
            if reads[group.kind]:
                needed.add((number, at // 8))
    return len(needed)


async def pulled_bytes(worker: Worker) -> int:
    return (await worker.client.handover_statistics()).pulls.pulled_bytes


async def left_nothing(*workers: Worker) -> None:
    for worker in workers:
        await worker.until_idle()
        assert worker.tiny is not None
        check_engine(worker.tiny.engine)


@EVERY
async def test_answers_are_those_of_one_worker(family: str) -> None:
    prompts = [made_tokens(length, length) for length in LENGTHS]
    plan = grouped_model(family).pages(8)
    async with (
        tiny_worker(family=family, num_blocks=400, block_size=8) as alone,
        tiny_worker(family=family, num_blocks=400, block_size=8, max_tokens_per_step=32) as prefill,
        tiny_worker(family=family, num_blocks=400, block_size=8) as decode,
    ):
        for each in prompts:
            answer = await alone.tokens(request(each))
            before = await pulled_bytes(decode)
            deltas = await hand_over(request(each), prefill, decode)
            assert tokens(deltas) == answer, len(each)
            assert deltas[0].cached_tokens == 0
            moved = await pulled_bytes(decode) - before
            assert moved == counted_needs(plan.groups, len(each)) * plan.page_bytes
        again = await asyncio.gather(
            *(hand_over(request(each, cache_salt="x"), prefill, decode) for each in prompts)
        )
        expected = [await alone.tokens(request(each)) for each in prompts]
        assert [tokens(deltas) for deltas in again] == expected
        await left_nothing(prefill, decode)


@EVERY
async def test_only_what_the_decode_worker_lacks_is_moved(family: str) -> None:
    whole = made_tokens(1, 120)
    plan = grouped_model(family).pages(8)
    async with (
        tiny_worker(family=family, num_blocks=400, block_size=8) as alone,
        tiny_worker(family=family, num_blocks=400, block_size=8) as prefill,
        tiny_worker(family=family, num_blocks=400, block_size=8) as decode,
    ):
        expected = await alone.tokens(request(whole))
        await prefill.tokens(request(whole[:90]))
        await decode.tokens(request(whole[:41], 1))
        deltas = await hand_over(request(whole), prefill, decode)
        assert tokens(deltas) == expected
        assert deltas[0].cached_tokens == 40
        here = {(g, n) for g, n in handover_places(plan.groups, 120) if n < 5}
        wanted = len(handover_places(plan.groups, 120)) - len(here)
        assert await pulled_bytes(decode) == wanted * plan.page_bytes
        # Now it has everything: nothing is moved.
        assert tokens(await hand_over(request(whole), prefill, decode)) == expected
        assert await pulled_bytes(decode) == wanted * plan.page_bytes
        await left_nothing(prefill, decode)


@EVERY
async def test_a_damaged_block_of_any_group_fails_the_hand_over(family: str) -> None:
    """The prefill worker's memory changes after it summed its blocks."""
    whole = made_tokens(5, 100)
    async with (
        tiny_worker(family=family, num_blocks=400, block_size=8) as prefill,
        tiny_worker(family=family, num_blocks=400, block_size=8) as decode,
    ):
        answer = tokens(await hand_over(request(whole), prefill, decode))
        await left_nothing(prefill, decode)
        assert prefill.tiny is not None
        engine = prefill.tiny.engine
        rng = random.Random(3)
        for number, group in enumerate(engine.arena.groups):
            if not group.needed(96):
                continue
            registered = engine.pool._registered
            keys = _keys_of(prefill, whole, number)
            block = rng.choice([b for b, one in enumerate(registered) if one and one.key in keys])
            before = engine.arena.tensor[block].clone()
            engine.arena.tensor[block, rng.randrange(64)] ^= 4
            await decode.client.reset_prefix_cache()
            with pytest.raises(EngineHandoverError, match="checksum"):
                await hand_over(request(whole), prefill, decode)
            engine.arena.tensor[block] = before
            await left_nothing(prefill, decode)
        await decode.client.reset_prefix_cache()
        assert tokens(await hand_over(request(whole), prefill, decode)) == answer
        await left_nothing(prefill, decode)


def _keys_of(worker: Worker, prompt: Sequence[int], group: int) -> set[bytes]:
    """The pool's keys of what a group needs at the prompt's last boundary."""
    from commutator_reference.scheduler import ANONYMOUS, Sequence

    assert worker.tiny is not None
    groups = worker.tiny.engine.arena.groups
    sequence = Sequence.start(0, request(prompt), 0, 0, ANONYMOUS, groups)
    return {
        sequence.descriptor(number, 8, which).key
        for which, number in handover_places(groups, len(prompt))
        if which == group
    }


async def test_preemption_on_either_side_changes_nothing() -> None:
    for family in ("gemma3", "qwen3_next"):
        blocks = 14 * len(grouped_model(family).pages(8).groups)
        prompts = [made_tokens(number, 60) for number in range(10, 14)]
        async with (
            tiny_worker(family=family, num_blocks=400, block_size=8) as alone,
            tiny_worker(family=family, num_blocks=blocks, block_size=8) as prefill,
            tiny_worker(family=family, num_blocks=blocks, block_size=8) as decode,
        ):
            expected = [await alone.tokens(request(each, 30)) for each in prompts]
            answers = await asyncio.gather(
                *(hand_over(request(each, 30), prefill, decode) for each in prompts)
            )
            assert [tokens(deltas) for deltas in answers] == expected
            await left_nothing(prefill, decode)


async def test_pages_that_do_not_fit_are_refused_by_name() -> None:
    async with (
        tiny_worker(family="gemma3", num_blocks=400, block_size=8) as one,
        tiny_worker(family="gemma3", num_blocks=400, block_size=16) as larger,
        tiny_worker(family="gpt_oss", num_blocks=400, block_size=8) as other,
        tiny_worker() as llama,
    ):
        infos = [worker.record.info.handover for worker in (one, larger, other, llama)]
        style = PullHandover()
        ours = infos[0]
        assert ours is not None
        problems = [style.mismatch(ours, info) for info in infos if info is not None]
        assert problems[0] is None
        assert problems[1] == "block_size is 8 at the prefill worker and 16 at the decode worker"
        assert problems[2] is not None
        assert "5 sliding of 24 tokens" in problems[2]
        assert "2 sliding of 24 tokens" in problems[2]
        assert problems[3] is not None
        assert problems[3].startswith("protocol is pull-groups-1")
        half = evolve(ours, identity=ours.identity.replace("float32", "bfloat16"))
        assert "bfloat16" in (style.mismatch(ours, half) or "")
        # Where routing was passed over, the decode worker refuses.
        with pytest.raises(EngineHandoverError, match="block_size"):
            await hand_over(request(made_tokens(3, 60)), one, larger)
        await left_nothing(one, larger)
