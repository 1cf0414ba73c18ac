"""The decoding requests: all advance one token a step, so only turning points are kept."""

from __future__ import annotations

import heapq
import itertools

from commutator_sim.request import Phase, Run

__all__ = ["DecodeBatch"]


class DecodeBatch:
    """Requests that decode together, and the steps at which one of them fills a block or ends."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._step = 0
        self._turns: list[tuple[int, int, int, Run]] = []
        """Heap of (step, serial number, epoch, run)."""
        self._serial = itertools.count()
        self.runs: dict[int, Run] = {}
        self.growing: list[Run] = []
        """Runs whose blocks are full: they need one more before the next step."""

    def join(self, run: Run) -> None:
        """``run.computed`` tokens are computed; from the next step on it decodes."""
        run.move(Phase.DECODE)
        run.decode_base = run.computed - self._step
        self.runs[run.key] = run
        self._expect_turn(run)

    def leave(self, run: Run) -> None:
        """Take a run out; its counts are right for now."""
        run.computed = run.decode_base + self._step
        run.generated = self.generated(run)
        del self.runs[run.key]

    def generated(self, run: Run) -> int:
        """Tokens of a decoding run's answer so far."""
        return run.decode_base + self._step - run.request.prompt_tokens + 1

    def has_grown(self, run: Run) -> None:
        """``run`` got the block that it needed."""
        self._push(run, self._block_size)

    def steps_to_turn(self) -> int:
        """Steps until something happens to one of the runs. There is at least one run."""
        turns = self._turns
        while turns[0][2] != turns[0][3].epoch:
            heapq.heappop(turns)
        return turns[0][0] - self._step

    def advance(self, steps: int) -> list[Run]:
        """Make ``steps`` steps, none beyond a turn; returns the runs that turn, best order first.

        Their ``computed`` is set: at a block's end, at the answer's end, or both.
        """
        self._step += steps
        turns, now = self._turns, self._step
        due = []
        while turns and turns[0][0] == now:
            _, _, epoch, run = heapq.heappop(turns)
            if epoch == run.epoch:
                run.computed = run.decode_base + now
                due.append(run)
        if len(due) > 1:
            due.sort(key=lambda run: run.order)
        return due

    def _expect_turn(self, run: Run) -> None:
        in_block = run.computed % self._block_size
        if in_block:
            self._push(run, self._block_size - in_block)
        else:
            self.growing.append(run)

    def _push(self, run: Run, to_block_end: int) -> None:
        to_end = run.kv_tokens - run.decode_base - self._step
        turn = self._step + min(to_block_end, to_end)
        heapq.heappush(self._turns, (turn, next(self._serial), run.epoch, run))

    def turned(self, run: Run) -> None:
        """A run returned by ``advance`` goes on decoding."""
        self._expect_turn(run)
