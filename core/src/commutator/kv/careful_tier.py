"""Asks a tier for what its worker needs, and has an answer also when the tier raises something."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from types import TracebackType

from commutator.errors import TierError
from commutator.kv.keys import BlockKey
from commutator.kv.tier import Slot, StorageTier, Stored

__all__ = ["CarefulTier"]

log = logging.getLogger(__name__)


class CarefulTier:
    """Others write tiers, too: what one raises is logged, and costs no more than its blocks."""

    def __init__(self, tier: StorageTier, name: str) -> None:
        self._tier = tier
        self._name = name

    def reserve(self, keys: Sequence[BlockKey]) -> Sequence[Slot | None] | None:
        """As the tier's; None when it failed."""
        with self._telling("no slots can be reserved"):
            return self._tier.reserve(keys)
        return None

    def commit(self, blocks: Sequence[Stored]) -> bool:
        """Whether they are committed. If not, their slots are given back."""
        with self._telling("blocks could not be committed"):
            self._tier.commit(blocks)
            return True
        self.release([stored.slot for stored in blocks])
        return False

    def release(self, slots: Sequence[Slot]) -> None:
        with self._telling("slots could not be given back"):
            self._tier.release(slots)

    def lookup(self, keys: Sequence[BlockKey]) -> Sequence[Stored | None] | None:
        """As the tier's; None when it failed."""
        with self._telling("its books cannot be read"):
            return self._tier.lookup(keys)
        return None

    def probe(self, keys: Sequence[BlockKey]) -> list[Stored] | None:
        """What it has of a chain; None when it failed."""
        with self._telling("it cannot be asked"):
            return [stored for stored in self._tier.probe(keys) if stored is not None]
        return None

    def pin(self, slot: Slot) -> bool:
        """Whether it is pinned."""
        with self._telling("a slot could not be pinned"):
            self._tier.pin(slot)
            return True
        return False

    def unpin(self, slot: Slot) -> None:
        with self._telling("a slot could not be unpinned"):
            self._tier.unpin(slot)

    def free(self, keys: Sequence[BlockKey], *, makes_room: bool) -> bool:
        """Whether they are forgotten; with ``makes_room``, others' blocks stay on the medium."""
        with self._telling("blocks could not be freed"):
            (self._tier.make_room if makes_room else self._tier.evict)(keys)
            return True
        return False

    def _telling(self, what: str) -> _Telling:
        return _Telling(f"tier {self._name}: {what}")


class _Telling:
    """Logs whatever is raised inside, and lets nothing of it out."""

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        if isinstance(error, TierError):
            log.warning("%s: %s", self._what, error)
        elif isinstance(error, Exception):
            log.error("%s", self._what, exc_info=error)
        else:
            return False
        return True
