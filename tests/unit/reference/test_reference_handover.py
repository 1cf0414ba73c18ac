"""Two tiny workers hand KV over by NIXL: the answers stay the same, and no block is left behind."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import attrs
import pytest
from tests.support.handover_rig import Worker, hand_over, phases, request, tiny_worker
from tests.support.reference_integrity import check_engine

from commutator.contract.engine import ModelConfig
from commutator.contract.request import TokenDelta
from commutator.contract.tier import Span
from commutator.errors import ConfigError, EngineHandoverError, RequestError
from commutator_engine_kit.process import EngineStart
from commutator_reference.arena import KVArena
from commutator_reference.config import ReferenceConfig
from commutator_reference.server import ReferenceServer

LENGTHS = (1, 4, 5, 8, 9, 61, 128, 300)


def prompt(number: int, length: int) -> list[int]:
    rng = random.Random(number)
    return [rng.randrange(5, 95) for _ in range(length)]


def tokens(deltas: Sequence[TokenDelta]) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]


async def counted(worker: Worker) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = attrs.asdict(await worker.client.handover_statistics())
    return found


@pytest.mark.parametrize(("theirs", "ours"), [(4, 4), (4, 8), (8, 4)])
async def test_answers_are_those_of_one_worker(theirs: int, ours: int) -> None:
    prompts = [prompt(length, length) for length in LENGTHS]
    async with (
        tiny_worker() as alone,
        tiny_worker(block_size=theirs, max_tokens_per_step=32) as prefill,
        tiny_worker(block_size=ours) as decode,
    ):
        expected = [await alone.tokens(request(each)) for each in prompts]
        unit = max(theirs, ours)
        for each, answer in zip(prompts, expected, strict=True):
            before = (await counted(decode))["pulls"]
            deltas = await hand_over(request(each), prefill, decode)
            assert tokens(deltas) == answer
            assert deltas[0].cached_tokens == 0
            after = (await counted(decode))["pulls"]
            moved = after["pulled_bytes"] - before["pulled_bytes"]
            assert decode.tiny is not None
            wanted = (len(each) - 1) // unit * unit
            assert moved == wanted * decode.tiny.info.token_bytes
        both = asyncio.gather(
            *(hand_over(request(each, cache_salt="x"), prefill, decode) for each in prompts)
        )
        assert [tokens(deltas) for deltas in await both] == expected
        await prefill.until_idle()
        await decode.until_idle()
        for worker in (prefill, decode):
            assert worker.tiny is not None
            check_engine(worker.tiny.engine)


@pytest.mark.parametrize(("theirs", "ours"), [(4, 4), (4, 8)])
async def test_blocks_are_verified_in_copies_where_the_cpu_cannot_read_them(
    theirs: int, ours: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU. A copy of the wrong bytes would fail every checksum."""
    copied = []

    def copy(arena: KVArena, span: Span) -> memoryview:
        copied.append(span.size_bytes)
        return arena.copied_bytes(span)

    monkeypatch.setattr(KVArena, "host_bytes", copy)
    whole = prompt(3, 60)
    async with tiny_worker(block_size=theirs) as prefill, tiny_worker(block_size=ours) as decode:
        expected = await prefill.tokens(request(whole))
        assert tokens(await hand_over(request(whole), prefill, decode)) == expected
        assert (await counted(decode))["pulls"]["pulled_bytes"] > 0
        assert decode.tiny is not None
        blocks = (len(whole) - 1) // max(theirs, ours) * max(theirs, ours)
        # Once by the worker that sums, once by the one that verifies.
        assert sum(copied) >= 2 * blocks * decode.tiny.info.token_bytes


async def test_only_what_the_decode_worker_lacks_is_moved() -> None:
    whole = prompt(1, 120)
    async with tiny_worker() as alone, tiny_worker() as prefill, tiny_worker() as decode:
        expected = await alone.tokens(request(whole))
        # Both hold some of it already, the prefill worker more.
        await prefill.tokens(request(whole[:90]))
        await decode.tokens(request(whole[:41]))
        deltas = await hand_over(request(whole), prefill, decode)
        assert tokens(deltas) == expected
        assert deltas[0].cached_tokens == 40
        assert decode.tiny is not None
        moved = (await counted(decode))["pulls"]["pulled_bytes"]
        assert moved == (116 - 40) * decode.tiny.info.token_bytes
        # Now it has everything: nothing is moved, and the prefill worker is let go.
        assert tokens(await hand_over(request(whole), prefill, decode)) == expected
        assert (await counted(decode))["pulls"]["pulled_bytes"] == moved
        await prefill.until_idle()
        await decode.until_idle()


async def test_an_answer_that_was_begun_elsewhere_is_handed_over_too() -> None:
    async with tiny_worker() as alone, tiny_worker() as prefill, tiny_worker() as decode:
        whole = await alone.tokens(request(prompt(2, 50), 12))
        asked = request([*prompt(2, 50), *whole[:5]], 12, generated_prefix=5)
        assert tokens(await hand_over(asked, prefill, decode)) == whole[5:]
        await prefill.until_idle()
        await decode.until_idle()


async def test_a_prefill_of_another_prompt_is_refused() -> None:
    async with tiny_worker() as prefill, tiny_worker() as decode:
        first, _ = phases(request(prompt(3, 60)), prefill, decode)
        _, second = phases(request(prompt(4, 60)), prefill, decode)
        assert first.handover is not None
        assert second.handover is not None
        mixed = {**second.handover, "pull": first.handover["pull"]}
        second = request(prompt(4, 60), handover=mixed)
        prefilling = asyncio.create_task(prefill.tokens(first))
        with pytest.raises(EngineHandoverError, match="another prompt"):
            await decode.tokens(second)
        await prefilling
        await prefill.until_idle()
        await decode.until_idle()


async def test_a_worker_with_other_weights_is_refused() -> None:
    async with tiny_worker() as prefill, tiny_worker() as decode:
        assert decode.tiny is not None
        assert prefill.tiny is not None
        object.__setattr__(prefill.tiny.handed.info, "identity", "other weights")
        with pytest.raises(EngineHandoverError, match="identity"):
            await hand_over(request(prompt(3, 60)), prefill, decode)
        await prefill.until_idle()
        await decode.until_idle()


async def test_damage_between_two_hand_overs_of_one_prompt_is_seen() -> None:
    async with tiny_worker() as prefill, tiny_worker() as decode:
        answer = tokens(await hand_over(request(prompt(7, 60)), prefill, decode))
        await prefill.until_idle()
        assert prefill.tiny is not None
        prefill.tiny.engine.arena.tensor.mul_(1.01)
        await decode.client.reset_prefix_cache()
        with pytest.raises(EngineHandoverError, match="checksum"):
            await hand_over(request(prompt(7, 60)), prefill, decode)
        # Computed anew in the same blocks, they are what they should be.
        await prefill.until_idle()
        await prefill.client.reset_prefix_cache()
        assert tokens(await hand_over(request(prompt(7, 60)), prefill, decode)) == answer
        await prefill.until_idle()
        await decode.until_idle()


async def test_words_that_make_no_sense_are_refused() -> None:
    async with tiny_worker() as worker:
        for words in ({"pull": 7, "lease_s": 1.0}, {"lease_s": 1.0}, {"pull": "x"}):
            with pytest.raises(RequestError):
                await worker.tokens(request(prompt(5, 20), handover=words))
        _, second = phases(request(prompt(5, 20)), worker, worker)
        words = {**(second.handover or {}), "block_size": 3}
        with pytest.raises(RequestError, match="blocks of 3 tokens"):
            await worker.tokens(request(prompt(5, 20), handover=words))


async def test_one_hand_over_has_one_prefill() -> None:
    async with tiny_worker() as prefill, tiny_worker() as decode:
        first, second = phases(request(prompt(6, 40)), prefill, decode)
        await prefill.tokens(first)
        with pytest.raises(EngineHandoverError, match="begun already"):
            await prefill.tokens(first)
        assert len(await decode.tokens(second)) == 6
        await prefill.until_idle()
        await decode.until_idle()
        with pytest.raises(EngineHandoverError, match="given the hand-over up"):
            await prefill.tokens(first)


async def test_preemption_on_either_side_changes_nothing() -> None:
    prompts = [prompt(number, 60) for number in range(10, 16)]
    async with (
        tiny_worker() as alone,
        tiny_worker(num_blocks=40) as prefill,
        tiny_worker(num_blocks=40) as decode,
    ):
        expected = [await alone.tokens(request(each, 30)) for each in prompts]
        answers = await asyncio.gather(
            *(hand_over(request(each, 30), prefill, decode) for each in prompts)
        )
        assert [tokens(deltas) for deltas in answers] == expected
        await prefill.until_idle()
        await decode.until_idle()
        for worker in (prefill, decode):
            assert worker.tiny is not None
            check_engine(worker.tiny.engine)


def started(**options: Any) -> ReferenceServer:
    config = ReferenceConfig(kind="reference", role="prefill", **options)
    return ReferenceServer(config, EngineStart(ModelConfig(name="m", source="nowhere"), "w0"))


def test_a_prefill_worker_without_nixl_is_refused_with_what_to_install() -> None:
    with (
        patch("commutator_reference.preflight.find_spec", return_value=None),
        pytest.raises(ConfigError, match="pip install"),
    ):
        started(device="cpu")


def test_a_prefill_worker_without_a_prefix_cache_is_refused() -> None:
    with pytest.raises(ConfigError, match="prefix_caching"):
        started(prefix_caching=False)
