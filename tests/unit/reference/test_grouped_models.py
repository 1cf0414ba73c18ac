"""Models with several kinds of KV: as transformers computes them, however blocks come and go."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from tests.support.faults import damage
from tests.support.grouped_models import FAMILIES, VOCABULARY, grouped_model, oracle
from tests.support.kv_rig import setups
from tests.support.reference_options import sized
from tests.support.tiered_engine import TieredEngine

from commutator import GenerateRequest, SamplingParams
from commutator_engine_kit.kv import KvKind
from commutator_reference.scheduler import Chunk, Sequence

EVERY = pytest.mark.parametrize("family", FAMILIES)
WINDOWED = ("gemma3", "gpt_oss", "llama4", "qwen3_next")


def tokens(seed: int, count: int) -> list[int]:
    return random.Random(seed).choices(range(3, VOCABULARY), k=count)


def greedy(family: str, prompt: list[int], count: int) -> list[int]:
    """The answer of transformers, each token from the whole text, without a cache."""
    text = list(prompt)
    with torch.no_grad():
        for _ in range(count):
            logits = oracle(family)(torch.tensor([text])).logits[0, -1]
            text.append(int(logits.argmax()))
    return text[len(prompt) :]


@EVERY
def test_logits_are_those_of_transformers(family: str) -> None:
    model, rows = grouped_model(family), {0: tokens(1, 150), 1: tokens(2, 67), 2: tokens(3, 110)}
    with torch.no_grad():
        wanted = {row: oracle(family)(torch.tensor([ids])).logits[0] for row, ids in rows.items()}
    arena = model.arena(400, 8)
    groups, size = len(arena.groups), arena.block_size
    pages = iter(random.Random(0).sample(range(400), 400))
    tables = {
        row: [tuple(next(pages) for _ in range(-(-len(ids) // size))) for _ in range(groups)]
        for row, ids in rows.items()
    }
    done, rng, compared = dict.fromkeys(rows, 0), random.Random(7), 0
    while left := [row for row, ids in rows.items() if done[row] < len(ids)]:
        chunks = []
        for row in rng.sample(left, rng.randint(1, len(left))):
            start = done[row]
            end = min(len(rows[row]), start + rng.choice([1, 1, 1, 2, 7, 8, 33]))
            first, *others = tables[row]
            ids = tuple(rows[row][start:end])
            chunks.append(Chunk(row, ids, start, first, samples=True, others=tuple(others)))
            done[row] = end
        batch = model.batch(chunks, arena)
        for row, logits in zip(batch.sample_keys, model.forward(batch, arena), strict=True):
            difference = (logits - wanted[row][done[row] - 1]).abs().max()
            assert difference < 1e-3, f"after {done[row]} tokens of {row}"
            compared += 1
    assert compared > 30


def shared_prompts() -> list[list[int]]:
    """Turns of conversations that branch at and around ends of blocks, windows and chunks."""
    base = tokens(10, 96)
    cuts = [16, 23, 24, 25, 40, 41, 64, 95, 96]
    return [base[:cut] + tokens(cut, 9) for cut in cuts] * 2


@EVERY
def test_answers_do_not_depend_on_caching_batching_and_preemption(family: str) -> None:
    prompts = shared_prompts()
    wanted = [greedy(family, prompt, 4) for prompt in prompts[: len(prompts) // 2]] * 2
    model = grouped_model(family)
    groups = len(model.pages(8).groups)
    options = sized(num_blocks=28 * groups, block_size=8, max_tokens_per_step=24)
    with TieredEngine(model, setups({"kind": "dram", "capacity": "8MB"}), options) as tiered:
        assert tiered.answers(prompts, 4, at_once=4) == wanted
        load = tiered.engine.load()
        assert load.kv_cached_blocks > 0
        tiered.until_settled()


@EVERY
def test_what_tiers_had_gives_the_same_answer_as_computing_it(family: str, tmp_path: Path) -> None:
    prompt, other = tokens(20, 120), tokens(21, 120)
    wanted = greedy(family, prompt, 6)
    model = grouped_model(family)
    groups = len(model.pages(8).groups)
    nvme = {"kind": "nvme", "path": str(tmp_path), "capacity": "16MB"}
    options = sized(num_blocks=20 * groups, block_size=8, max_tokens_per_step=32)
    with TieredEngine(model, setups(nvme), options) as tiered:
        assert tiered.answers([prompt], 6, at_once=1)[0] == wanted
        tiered.until_settled()  # what is reallocated before it is stored is not stored
        tiered.answers([other], 6, first_key=1, at_once=1)
        tiered.until_settled()
    with TieredEngine(model, setups(nvme), options) as tiered:  # restarted: the arena is empty
        assert tiered.answers([prompt], 6, at_once=1) == [wanted]
        (first,) = tiered.said[0][:1]
        assert first.cached_tokens == 119 // model.pages(8).block_size * model.pages(8).block_size


@pytest.mark.parametrize(("family", "num_blocks"), [("gemma3", 56), ("qwen3_next", 36)])
def test_a_request_that_lost_its_blocks_gives_the_same_answer(family: str, num_blocks: int) -> None:
    prompts = [tokens(seed, 30) for seed in (40, 41, 42)]
    preempted, answers = [], []
    for blocks in (400, num_blocks):
        options = sized(num_blocks=blocks, block_size=8, max_tokens_per_step=24)
        dram = setups({"kind": "dram", "capacity": "8MB"})
        with TieredEngine(grouped_model(family), dram, options) as tiered:
            answers.append(tiered.answers(prompts, 90, at_once=3))
            preempted.append(tiered.engine.preemptions > 0)
    assert preempted == [False, True]
    assert answers[0] == answers[1]


@EVERY
def test_a_damaged_block_of_any_group_is_found_and_never_used(family: str, tmp_path: Path) -> None:
    prompt = tokens(20, 120)
    wanted = greedy(family, prompt, 4)
    model = grouped_model(family)
    nvme = {"kind": "nvme", "path": str(tmp_path), "capacity": "16MB"}
    groups = model.pages(8).groups
    options = sized(num_blocks=20 * len(groups), block_size=8, max_tokens_per_step=32)
    with TieredEngine(model, setups(nvme), options) as tiered:
        tiered.answers([prompt, tokens(21, 120)], 4, at_once=1)
        tiered.until_settled()
    for number in range(len(groups)):
        (setup,) = setups(nvme)
        with TieredEngine(model, [setup], options) as tiered:
            asked = GenerateRequest(
                request_id="a", token_ids=prompt, sampling=SamplingParams(max_tokens=1)
            )
            identity = tiered.connector.identity
            sequence = Sequence.start(0, asked, 0, 0, identity, groups)
            chain = sequence.reusable(tiered.engine.block_size, number)
            stored = [each for each in setup.tier.lookup([one.key for one in chain]) if each]
            damage(setup.tier, stored[-1], 5)
            assert tiered.answers([prompt], 4, at_once=1) == [wanted]
            (tier,) = tiered.connector.statistics().tiers
            assert tier.loads.get("corrupt") == 1, (number, tier.loads)


@pytest.mark.parametrize("family", WINDOWED)
def test_blocks_behind_a_window_are_released_while_a_request_runs(family: str) -> None:
    model = grouped_model(family)
    options = sized(num_blocks=200, block_size=8, max_tokens_per_step=16)
    with TieredEngine(model, setups({"kind": "dram", "capacity": "8MB"}), options) as tiered:
        tiered.submit(0, tokens(30, 160), 8)
        while len(tiered.said.get(0, ())) < 4:
            tiered.step()
        (sequence,) = tiered.engine._scheduler._running.values()
        size = tiered.engine.block_size
        for group, table in zip(sequence.groups, sequence.tables, strict=True):
            held = sum(block >= 0 for block in table)
            if group.keeps_prefix:
                assert held == len(table)
            else:
                assert held <= group.window // size + 3, group.kind
        tiered.until_ended([0])


def test_states_are_kept_at_ends_of_blocks_that_hold_as_much_attention() -> None:
    plan = grouped_model("qwen3_next").pages(8)
    kinds = [group.kind for group in plan.groups]
    assert kinds.count(KvKind.RECURRENT) == 3
    assert kinds.count(KvKind.FULL) == 1
    assert plan.block_size % 8 == 0
    assert {group.block_bytes for group in plan.groups} == {plan.page_bytes}
