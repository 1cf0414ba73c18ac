"""The scheduler against a model that counts: everything ends, nothing leaks, KV is right."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.support.reference_integrity import check_scheduler

from commutator.contract.request import GenerateRequest, SamplingParams
from commutator_reference.block_pool import BlockPool
from commutator_reference.scheduler import Chunk, Scheduler, Sequence, Step

BLOCK_SIZE = 2
# Mostly zeros, so that prompts, and prompts with answers, often begin alike.
prompts = st.builds(
    lambda length, last: [0] * length + last,
    st.integers(1, 12),
    st.lists(st.integers(0, 1), max_size=1),
)

# The KV of a token stands for everything before it, as attention makes it.
Slot = tuple[int, int]
KV = tuple[str | None, tuple[int, ...]]


class SchedulerMachine(RuleBasedStateMachine):
    """Submits, steps and aborts in any order, on memory that remembers what was computed."""

    @initialize(
        num_blocks=st.integers(2, 9),
        max_running=st.integers(1, 5),
        max_tokens=st.integers(1, 12),
        prefix_caching=st.booleans(),
    )
    def start(
        self, num_blocks: int, max_running: int, max_tokens: int, *, prefix_caching: bool
    ) -> None:
        self.pool = BlockPool(num_blocks, BLOCK_SIZE, prefix_caching=prefix_caching)
        self.max_tokens = max_tokens
        self.scheduler = Scheduler(
            self.pool,
            num_blocks * BLOCK_SIZE,
            max_running_requests=max_running,
            max_tokens_per_step=max_tokens,
        )
        self.wanted: dict[int, int] = {}
        self.memory: dict[Slot, KV] = {}
        self.keys = 0

    @rule(
        prompt=prompts,
        output=st.integers(1, 12),
        priority=st.integers(0, 2),
        salt=st.sampled_from([None, None, "salt"]),
    )
    def submit(self, prompt: list[int], output: int, priority: int, salt: str | None) -> None:
        prompt = prompt[: self.scheduler.max_model_len - 1]
        request = GenerateRequest(
            request_id="r",
            token_ids=prompt,
            sampling=SamplingParams(),
            priority=priority,
            cache_salt=salt,
        )
        self.scheduler.add(Sequence.start(self.keys, request, self.keys, seed=0))
        self.wanted[self.keys] = min(output, self.scheduler.max_model_len - len(prompt))
        self.keys += 1

    @rule(count=st.integers(1, 8), token=st.sampled_from([0, 0, 0, 1]))
    def steps(self, count: int, token: int) -> None:
        for _ in range(count):
            self._step(token)

    @rule(token=st.integers(0, 1))
    def step(self, token: int) -> None:
        self._step(token)

    @precondition(lambda self: self.wanted)
    @rule(kind=st.sampled_from(["abort", "fail", "clear"]), data=st.data())
    def disturb(self, kind: str, data: st.DataObject) -> None:
        if kind == "abort":
            key = data.draw(st.sampled_from(sorted(self.wanted)))
            self._end(key)
            assert not self.scheduler.remove(key)
        elif kind == "clear":
            self.pool.clear()
        else:
            self._step_that_fails()

    @invariant()
    def books_balance(self) -> None:
        check_scheduler(self.scheduler)
        assert self.scheduler.running + len(self.scheduler.queue) == len(self.wanted)

    def teardown(self) -> None:
        if not hasattr(self, "pool"):
            return
        steps = 0
        while self.wanted:
            self._step(1)
            steps += 1
            assert steps < 5_000, "a request starves"
        self.books_balance()
        assert self.pool.held == 0
        assert self.scheduler.running == len(self.scheduler.queue) == 0

    def _step(self, token: int) -> None:
        before = {key: self._sequence(key).rank for key in self.wanted}
        step = self.scheduler.schedule()
        assert bool(step.chunks) == bool(self.wanted), "live requests, and nothing to do"
        assert sum(len(chunk.token_ids) for chunk in step.chunks) <= self.max_tokens
        assert all(chunk.token_ids for chunk in step.chunks)
        last_served = max((before[chunk.key] for chunk in step.chunks), default=(0, 0))
        assert all(before[key] > last_served for key in step.preempted), "the wrong one gave way"
        self._run(step)
        self.scheduler.complete(step)
        for chunk in step.chunks:
            if chunk.samples:
                sequence = self._sequence(chunk.key)
                sequence.tokens.append(token)
                if sequence.output_length >= self.wanted[chunk.key]:
                    self._end(chunk.key)

    def _step_that_fails(self) -> None:
        """The requests of the step end; their KV of this step must never be reused."""
        for chunk in self.scheduler.schedule().chunks:
            for position in range(chunk.start, chunk.end):
                self.memory[self._slot(chunk, position)] = ("garbage", ())
            self._end(chunk.key)

    def _end(self, key: int) -> None:
        assert self.scheduler.remove(key)
        del self.wanted[key]

    def _run(self, step: Step) -> None:
        """Read the KV of every earlier token, then write that of the chunk's own."""
        written: set[Slot] = set()
        for chunk in step.chunks:
            sequence = self._sequence(chunk.key)
            salt = sequence.request.cache_salt
            for position in range(chunk.end):
                slot = self._slot(chunk, position)
                kv = (salt, tuple(sequence.tokens[: position + 1]))
                if position < chunk.start:
                    assert self.memory[slot] == kv, "another content was served"
                    assert slot not in written, "a block is written and read in one step"
                else:
                    self.memory[slot] = kv
                    written.add(slot)

    def _sequence(self, key: int) -> Sequence:
        sequence = self.scheduler.get(key)
        assert sequence is not None
        return sequence

    @staticmethod
    def _slot(chunk: Chunk, position: int) -> Slot:
        return chunk.block_table[position // BLOCK_SIZE], position % BLOCK_SIZE


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
