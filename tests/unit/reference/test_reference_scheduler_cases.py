"""Single decisions of the scheduler, each in a situation made for it."""

from __future__ import annotations

import pytest
from tests.support.reference_integrity import check_scheduler

from commutator.contract.request import GenerateRequest, SamplingParams
from commutator_reference.block_pool import BlockPool
from commutator_reference.scheduler import Scheduler, Sequence, Step

BLOCK_SIZE = 4


def make(
    num_blocks: int, *, max_running: int = 8, max_tokens: int = 64, prefix_caching: bool = True
) -> Scheduler:
    pool = BlockPool(num_blocks, BLOCK_SIZE, prefix_caching=prefix_caching)
    return Scheduler(
        pool,
        num_blocks * BLOCK_SIZE,
        max_running_requests=max_running,
        max_tokens_per_step=max_tokens,
    )


def add(scheduler: Scheduler, key: int, prompt: list[int], *, priority: int = 0) -> Sequence:
    request = GenerateRequest(
        request_id=str(key), token_ids=prompt, sampling=SamplingParams(), priority=priority
    )
    sequence = Sequence.start(key, request, arrival=key, seed=0)
    scheduler.add(sequence)
    return sequence


def run(scheduler: Scheduler, token: int = 9) -> Step:
    step = scheduler.schedule()
    scheduler.complete(step)
    for chunk in step.chunks:
        if chunk.samples:
            sequence = scheduler.get(chunk.key)
            assert sequence is not None
            sequence.tokens.append(token)
    check_scheduler(scheduler)
    return step


def sizes(step: Step) -> dict[int, int]:
    return {chunk.key: len(chunk.token_ids) for chunk in step.chunks}


def test_a_long_prompt_is_computed_in_chunks_beside_decodes() -> None:
    scheduler = make(16, max_tokens=8)
    add(scheduler, 1, [1, 2])
    run(scheduler)
    add(scheduler, 2, list(range(20)))
    assert [sizes(run(scheduler)) for _ in range(3)] == [{1: 1, 2: 7}, {1: 1, 2: 7}, {1: 1, 2: 6}]
    assert sizes(run(scheduler)) == {1: 1, 2: 1}


def test_admission_follows_priority_then_arrival() -> None:
    scheduler = make(16, max_running=1)
    for key, priority in ((1, 0), (2, 5), (3, -1), (4, 0)):
        add(scheduler, key, [key], priority=priority)
    served = []
    for _ in range(4):
        (chunk,) = run(scheduler).chunks
        served.append(chunk.key)
        scheduler.remove(chunk.key)
    assert served == [3, 1, 4, 2]


def test_never_more_run_than_a_step_has_tokens() -> None:
    scheduler = make(16, max_running=8, max_tokens=2)
    for key in range(5):
        add(scheduler, key, [key])
    run(scheduler)
    assert (scheduler.running, len(scheduler.queue)) == (2, 3)


def test_a_shared_prefix_is_computed_once() -> None:
    scheduler = make(16)
    prompt = list(range(10))
    add(scheduler, 1, prompt)
    run(scheduler)
    second = add(scheduler, 2, prompt)
    assert sizes(run(scheduler)) == {1: 1, 2: 2}
    assert second.cached_tokens == 8
    first = scheduler.get(1)
    assert first is not None
    assert second.blocks[:2] == first.blocks[:2]


def test_the_last_token_of_a_wholly_cached_prompt_is_computed_again() -> None:
    scheduler = make(16)
    add(scheduler, 1, [1] * 8)
    run(scheduler)
    scheduler.remove(1)
    second = add(scheduler, 2, [1] * 8)
    assert sizes(run(scheduler)) == {2: 4}
    assert second.cached_tokens == 4


def test_generated_tokens_are_cached_too() -> None:
    scheduler = make(16)
    add(scheduler, 1, [1, 2])
    for _ in range(8):
        run(scheduler, token=7)
    scheduler.remove(1)
    again = add(scheduler, 2, [1, 2, *[7] * 7])
    run(scheduler)
    assert again.cached_tokens == 8


def test_another_salt_shares_nothing() -> None:
    scheduler = make(16)
    for key, salt in ((1, None), (2, "a"), (3, "b")):
        request = GenerateRequest(
            request_id=str(key), token_ids=[5] * 9, sampling=SamplingParams(), cache_salt=salt
        )
        sequence = Sequence.start(key, request, arrival=key, seed=0)
        scheduler.add(sequence)
        run(scheduler)
        assert sequence.cached_tokens == 0


def test_twins_computed_together_end_up_in_the_same_blocks() -> None:
    scheduler = make(16)
    twins = [add(scheduler, key, [3] * 9) for key in (1, 2)]
    run(scheduler)
    assert twins[0].blocks[:2] == twins[1].blocks[:2]
    assert scheduler.pool.held == 4


def test_the_last_in_rank_is_preempted_and_keeps_its_tokens() -> None:
    scheduler = make(5, prefix_caching=False)
    add(scheduler, 1, [1] * 7)
    second = add(scheduler, 2, [2] * 3)
    preempted: list[int] = []
    while not preempted:
        preempted += run(scheduler).preempted
    assert preempted == [2]
    assert scheduler.preemptions == 1
    tokens = list(second.tokens)
    assert len(tokens) > 3
    assert second.blocks == []
    scheduler.remove(1)
    (chunk,) = scheduler.schedule().chunks
    assert list(chunk.token_ids) == tokens, "prompt and answer so far are computed again"


def test_the_last_in_rank_waits_with_what_it_has() -> None:
    scheduler = make(3, prefix_caching=False)
    add(scheduler, 1, [1] * 4)
    last = add(scheduler, 2, [2] * 3)
    while 2 in sizes(run(scheduler)):
        pass
    assert scheduler.preemptions == 0
    assert last.blocks


def test_a_decode_already_planned_gives_way_to_an_earlier_prefill() -> None:
    scheduler = make(7, max_tokens=2, prefix_caching=False)
    add(scheduler, 1, [1], priority=1)
    run(scheduler)
    urgent = add(scheduler, 2, [2] * 16, priority=0)
    step = Step()
    while not step.preempted:
        assert urgent.uncomputed, "the prompt was computed without any preemption"
        step = run(scheduler)
    assert step.preempted == (1,)
    assert sizes(step) == {2: 1}


def test_a_request_is_not_admitted_beside_prompts_still_to_be_computed() -> None:
    scheduler = make(8, max_tokens=4)
    add(scheduler, 1, [1] * 20)
    add(scheduler, 2, [2] * 20)
    run(scheduler)
    assert (scheduler.running, len(scheduler.queue)) == (1, 1)


@pytest.mark.parametrize("length", [0, 16, 17])
def test_a_prompt_that_cannot_fit_is_refused(length: int) -> None:
    with pytest.raises(ValueError, match=f"prompt of {length} tokens"):
        add(make(4), 1, [1] * length)


def test_a_key_in_use_is_refused() -> None:
    scheduler = make(4)
    add(scheduler, 1, [1])
    with pytest.raises(ValueError, match="key 1 is in use"):
        add(scheduler, 1, [1])


@pytest.mark.parametrize("max_model_len", [1, 17])
def test_a_model_length_that_the_pool_cannot_hold_is_refused(max_model_len: int) -> None:
    with pytest.raises(ValueError, match="expected 2 to 16"):
        Scheduler(BlockPool(4, 4), max_model_len, max_running_requests=1, max_tokens_per_step=1)
