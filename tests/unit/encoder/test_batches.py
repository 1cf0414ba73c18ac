"""What is computed together: every input once, in order of priority, within the bound."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from commutator import GenerateRequest, Pooling, SamplingParams
from commutator_encoder.batches import Job, Waiting, batches_of

requests = st.lists(
    st.tuples(st.lists(st.integers(1, 50), min_size=1, max_size=6), st.integers(-2, 2)),
    min_size=1,
    max_size=12,
)


def job(key: int, lengths: list[int], priority: int = 0) -> Job:
    pooling = Pooling(operation="embed", lengths=tuple(lengths))
    request = GenerateRequest(
        request_id=str(key),
        token_ids=[*range(sum(lengths))],
        sampling=SamplingParams(),
        priority=priority,
        pooling=pooling,
    )
    return Job(key, request, pooling)


@given(requests, st.integers(1, 120))
def test_every_input_is_taken_once_in_order_of_priority(
    asked: list[tuple[list[int], int]], most: int
) -> None:
    waiting = Waiting()
    for key, (lengths, priority) in enumerate(asked):
        waiting.add(job(key, lengths, priority))
    seen: list[tuple[int, int, int]] = []
    while taken := waiting.take(most):
        tokens = sum(len(one.token_ids) for one in taken)
        assert tokens <= most or len(taken) == 1
        seen += [(one.job.request.priority, one.job.key, one.number) for one in taken]
    assert seen == sorted(seen)
    assert len(seen) == sum(len(lengths) for lengths, _ in asked)
    assert not len(waiting)


def test_inputs_follow_one_another_in_the_tokens() -> None:
    found = [[*one.token_ids] for one in job(1, [2, 3, 1]).inputs()]
    assert found == [[0, 1], [2, 3, 4], [5]]


def test_what_was_aborted_is_not_computed() -> None:
    waiting = Waiting()
    gone, kept = job(1, [3, 3]), job(2, [4])
    waiting.add(gone)
    waiting.add(kept)
    assert [one.job for one in waiting.take(3)] == [gone]
    gone.aborted = True
    assert [one.job for one in waiting.take(100)] == [kept]


@given(st.lists(st.integers(1, 60), min_size=1, max_size=40), st.integers(1, 200))
def test_batches_are_padded_within_the_bound(lengths: list[int], most: int) -> None:
    inputs = [*job(1, lengths).inputs()]
    batches = batches_of(inputs, most)
    assert sorted(one.number for batch in batches for one in batch) == [*range(len(lengths))]
    for batch in batches:
        longest = max(len(one.token_ids) for one in batch)
        assert len(batch) == 1 or longest * len(batch) <= most
