"""What waits in a worker, and which inputs are computed together. Pure."""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Iterator, Sequence

from attrs import define, field

from commutator import GenerateRequest, Pooling


@define(eq=False)
class Job:
    """One request, until all of its inputs are computed."""

    key: int
    request: GenerateRequest
    pooling: Pooling
    rows: list[bytes | None] = field(init=False)
    """The result of each input."""
    left: int = field(init=False)
    """Inputs without a result."""
    aborted: bool = False

    def __attrs_post_init__(self) -> None:
        self.left = len(self.pooling.lengths)
        self.rows = [None] * self.left

    def inputs(self) -> Iterator[Input]:
        """Each input of the request."""
        at, ids, firsts = 0, array("I", self.request.token_ids), self.pooling.firsts
        for number, length in enumerate(self.pooling.lengths):
            yield Input(self, number, ids[at : at + length], firsts[number] if firsts else length)
            at += length


@define(eq=False)
class Input:
    """One sequence of tokens."""

    job: Job
    number: int
    """Its place in the request."""
    token_ids: Sequence[int]
    first: int
    """How many of them belong to the first text."""


class Waiting:
    """The requests that wait, in the order of priority, then of arrival."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Job, list[Input]]] = []
        self._arrived = 0

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, job: Job) -> None:
        """Let a request wait."""
        self._arrived += 1
        inputs = [*job.inputs()][::-1]
        heapq.heappush(self._heap, (job.request.priority, self._arrived, job, inputs))

    def take(self, most_tokens: int) -> list[Input]:
        """The next inputs, of up to ``most_tokens`` tokens in all, but at least one.

        A request whose inputs do not all fit keeps its place with the others.
        """
        taken: list[Input] = []
        tokens = 0
        while self._heap:
            _, _, job, inputs = self._heap[0]
            while inputs and not job.aborted:
                tokens += len(inputs[-1].token_ids)
                if taken and tokens > most_tokens:
                    return taken
                taken.append(inputs.pop())
            heapq.heappop(self._heap)
        return taken


def batches_of(inputs: Sequence[Input], most_tokens: int) -> list[list[Input]]:
    """``inputs`` by length, in batches whose padded attention has up to ``most_tokens`` tokens."""
    batches: list[list[Input]] = []
    for one in sorted(inputs, key=lambda one: len(one.token_ids)):
        last = batches[-1] if batches else []
        if last and (len(last) + 1) * len(one.token_ids) <= most_tokens:
            last.append(one)
        else:
            batches.append([one])
    return batches
