"""What embedded tiers keep of their questions, loads and stores until they are over."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future

from attrs import define, field, frozen

from commutator.kv.break_even import PrefillSpeed
from commutator.kv.keys import BlockKey

__all__ = ["Question", "TierPlan", "Use", "load_of", "store_of"]


@frozen
class TierPlan:
    """What could be loaded of a chain: its ``blocks`` are kept until ``load`` or ``drop``."""

    load_id: str
    first: int
    """Position in the chain of the first block that would be loaded."""
    media: tuple[str, ...] = ()
    """Where each of the blocks lies, as KV events name it."""

    @property
    def blocks(self) -> int:
        return len(self.media)


@define(eq=False)
class Question:
    """A plan that was asked for."""

    load_id: str
    keys: Sequence[BlockKey]
    first: int
    prefill: PrefillSpeed
    future: Future[TierPlan] = field(factory=Future)


@define(eq=False)
class Use:
    """Device blocks that were handed to the service, for one load or store."""

    blocks: int
    out: int
    """So many have not come back."""
    good: int | None
    """How many of the first hold what they should, once that is known."""
    _loaded: Future[list[bool]] | None = None
    _stored: Future[None] | None = None

    @property
    def over(self) -> bool:
        """Whether nothing touches its blocks any more, and it is known what became of them."""
        return not self.out and self.good is not None

    def end(self) -> None:
        """Tell whoever waits."""
        if self._loaded is not None:
            good = self.good or 0
            self._loaded.set_result([number < good for number in range(self.blocks)])
        if self._stored is not None:
            self._stored.set_result(None)

    def fail(self, error: Exception) -> None:
        """Tell whoever waits that it will not end."""
        for future in (self._loaded, self._stored):
            if future is not None:
                future.set_exception(error)


def load_of(blocks: int) -> tuple[Use, Future[list[bool]]]:
    """A load of so many blocks, and its future, which cannot be cancelled."""
    future: Future[list[bool]] = Future()
    future.set_running_or_notify_cancel()
    return Use(blocks, blocks, None, loaded=future), future


def store_of(blocks: int) -> tuple[Use, Future[None]]:
    """A store that so many blocks come back from, and its future, which cannot be cancelled."""
    future: Future[None] = Future()
    future.set_running_or_notify_cancel()
    return Use(blocks, blocks, 0, stored=future), future
