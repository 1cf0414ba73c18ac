"""How small a mistake in a block the comparisons of answers notice: one block, state or row."""

from __future__ import annotations

import random

import pytest
from tests.support.group_trials import (
    answer,
    close,
    computed,
    distance,
    made_tokens,
    one_thread,
    prompts,
    untiered,
)
from tests.support.grouped_models import FAMILIES

from commutator import GenerateRequest, SamplingParams
from commutator_engine_kit.kv import KvKind
from commutator_reference.block_pool import BlockPool
from commutator_reference.pages import PageArena
from commutator_reference.scheduler import Sequence

__all__ = ["one_thread"]
"""A fixture of every test here."""

POWER = 0.95
SAMPLE, ALL = 8, 200


def blocks_of(pool: BlockPool, arena: PageArena, prompt: list[int], group: int) -> dict[int, int]:
    """The cached blocks of a prompt that its answer reads, by their number in it."""
    asked = GenerateRequest(request_id="a", token_ids=prompt, sampling=SamplingParams(max_tokens=1))
    sequence = Sequence.start(0, asked, 0, 0, groups=arena.groups)
    size = arena.block_size
    boundary = (len(prompt) - 1) // size * size
    found = {}
    for index in arena.groups[group].needed(boundary):
        block = pool.find(sequence.descriptor(index, size, group))
        assert block is not None, "it was just answered"
        found[index] = block
    return found


def alter(arena: PageArena, kind: KvKind, block: int, other: int, rng: random.Random) -> None:
    """Put another block's bytes into one; of latent rows, every second time, one row of a layer."""
    if kind is KvKind.LATENT and rng.random() < 0.5:
        layer = rng.randrange(len(arena.plan.places))
        rows = arena.layer(layer, (arena.block_size, 32), arena.dtype)
        row = rng.randrange(arena.block_size)
        rows[block, row] = rows[other, row]
    else:
        arena.tensor[block] = arena.tensor[other]


@pytest.mark.parametrize(
    "cases",
    [pytest.param(SAMPLE, marks=pytest.mark.slow), pytest.param(ALL, marks=pytest.mark.long)],
)
@pytest.mark.parametrize("family", FAMILIES)
def test_an_altered_block_shows(family: str, cases: int) -> None:
    rng = random.Random(7)
    seen: list[bool] = []
    by_text: list[bool] = []
    engine = untiered(family, blocks=64)
    pool, arena = engine.pool, engine.arena
    assert isinstance(arena, PageArena)
    number = 0
    while len(seen) < cases:
        number += 1
        first, second = (made_tokens(1000 * number + n, rng.randint(40, 140)) for n in (0, 1))
        expected = answer(engine, 10 * number, first)
        answer(engine, 10 * number + 1, second)
        group = number % len(arena.groups)
        theirs = list(blocks_of(pool, arena, second, group).values())
        ours = list(blocks_of(pool, arena, first, group).values())
        if not ours or not theirs:
            continue  # nothing of a chunk's end is read
        chosen = rng.choice(ours)
        before = arena.tensor[chosen].clone()
        alter(arena, arena.groups[group].kind, chosen, rng.choice(theirs), rng)
        altered = answer(engine, 10 * number + 2, first)
        arena.tensor[chosen] = before
        again = answer(engine, 10 * number + 3, first)
        assert again.cached_tokens >= altered.cached_tokens > 0
        assert distance(again, expected) <= close(family), "the engine repeats itself"
        seen.append(distance(altered, expected) > close(family))
        by_text.append(altered.tokens != expected.tokens)
        engine.reset_prefix_cache()
    said = f"{family}: {sum(seen)} of {cases} noticed, {sum(by_text)} by text alone"
    print(said)
    assert sum(seen) >= POWER * cases, said


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_from_caches_are_those_that_are_computed(family: str) -> None:
    """What the test above calls close is close."""
    assert close(family) < 1e-3
    assert len(computed(family)) == len(prompts(8))
