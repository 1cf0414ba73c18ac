"""The prefill side of hand-overs: holds a prompt's blocks for the decode worker, as they are made.

On the engine's thread, all of it.
"""

from __future__ import annotations

from attrs import define

from commutator.engine.handover import PrefillWords, handover_keys
from commutator_reference.blocks import BlockPool
from commutator_reference.handover import Handover
from commutator_reference.sequence import Sequence

__all__ = ["Exporting"]

_ABORTED = "the prefill was aborted or has failed"


@define
class _Export:
    id: str
    sequence: Sequence
    keys: list[bytes]
    """Of the blocks that are handed over."""
    told: int = 0


class Exporting:
    """Between the scheduler's pool and the table of exports."""

    def __init__(self, handover: Handover, pool: BlockPool) -> None:
        self._handover = handover
        self._pool = pool
        self._exports: dict[int, _Export] = {}

    def begin(self, sequence: Sequence, words: PrefillWords) -> str | None:
        """None, or why there is nothing to be done for this request."""
        try:
            wanted = self._handover.exports.begin(words.pull, words.lease_s)
        except ValueError as error:
            return str(error)
        if not wanted:
            return "the decode side has given the hand-over up already"
        info = self._handover.info
        # The last token is computed by the decode worker in any case: it wants the logits.
        count = (len(sequence.tokens) - 1) // info.block_size
        keys = handover_keys(info, sequence.request)[:count]
        self._exports[sequence.key] = _Export(words.pull, sequence, keys)
        return None

    def skip(self, words: PrefillWords) -> None:
        """Its prefill leg was aborted before it began: the decode side need not wait for it."""
        self._handover.exports.fail(words.pull, _ABORTED)

    def advance(self) -> list[int]:
        """Hold and tell of the blocks that are in place since the last call; free what is over.

        Returns the requests of which nothing more is wanted: all is told, or nobody asks.
        """
        done: list[int] = []
        for key, export in self._exports.items():
            end = min(export.sequence.registered, len(export.keys))
            new = slice(export.told, end)
            blocks = export.sequence.blocks[new]
            wanted = self._handover.exports.hold(export.id, blocks)
            if wanted and blocks:
                for block in blocks:
                    self._pool.acquire(block)
                contents = [(self._pool, self._pool.generation(block)) for block in blocks]
                self._handover.publish(export.id, blocks, export.keys[new], contents)
                export.told = end
            if not wanted or export.told == len(export.keys):
                done.append(key)
        for key in done:
            self._handover.complete(self._exports.pop(key).id)
        # Each hand-over's blocks are in the order of its tokens.
        self._pool.release(self._handover.exports.take_freed())
        return done

    def ready(self, sequence: Sequence, hits: list[int]) -> bool:
        """A prefill leg waits for nothing."""
        del sequence, hits
        return True

    def drop(self, key: int) -> None:
        """The request is gone, before all of it was told."""
        if (export := self._exports.pop(key, None)) is not None:
            self._handover.exports.fail(export.id, _ABORTED)

    def held_blocks(self) -> set[int]:
        """Blocks that are held for hand-overs."""
        return set(self._handover.exports.held())

    def give_up(self) -> None:
        """The pool's books are broken: nothing of it is handed over any more."""
        self._exports.clear()
        self._handover.exports.fail_all("the prefill worker lost its books and begins anew")
