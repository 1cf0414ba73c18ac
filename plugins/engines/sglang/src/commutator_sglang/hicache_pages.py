"""SGLang's pages: their memory as an arena, and their way to and from the tiers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from commutator import Memory, RetentionHints
from commutator.contract.block import BlockDescriptor
from commutator_engine_kit.kv import (
    Arena,
    BlockArena,
    BlockPart,
    KvConnector,
    OnboardTicket,
    ScatteredArena,
)

log = logging.getLogger(__name__)

_PLAN_TIMEOUT_S = 10.0
"""Longer than the lookup of any tier may take; pages without an answer by then are computed."""


Pieces = Callable[[int], Sequence[tuple[int, int]]]
"""Maps a page number to the address and size in bytes of each piece, always in the same order."""


def page_arena(pieces: Pieces, pages: int) -> Arena:
    """The arena of all pages of a host pool.

    Raises ValueError when the addresses of a piece are not at equal distances from page to page.
    """
    parts = [
        BlockPart(address=address, size_bytes=size, stride_bytes=_distance(address, last, pages))
        for (address, size), (last, _) in zip(pieces(0), pieces(pages - 1), strict=True)
    ]
    for page in {0, 1, pages // 2, pages - 1} & set(range(pages)):
        expected = [(part.address + page * part.stride_bytes, part.size_bytes) for part in parts]
        if list(pieces(page)) != expected:
            raise ValueError(f"pages are not at equal distances: page {page} of {pages}")
    (first, *others) = parts
    if not others and first.stride_bytes in (0, first.size_bytes):
        return BlockArena(
            memory=Memory.DRAM, address=first.address, block_bytes=first.size_bytes, count=pages
        )
    return ScatteredArena(memory=Memory.DRAM, parts=tuple(parts), count=pages)


def _distance(first: int, last: int, pages: int) -> int:
    return (last - first) // max(1, pages - 1)


class TierPages:
    """Looks up, loads and stores pages. Every failure is a miss.

    Called on SGLang's storage threads, which may block; never raises.

    The name of a page depends on its tokens and all tokens before it; its number is its place in
    host memory. Names are passed in the order of the prompt.
    """

    def __init__(self, connector: KvConnector) -> None:
        self._connector = connector

    def found(self, names: Sequence[str]) -> int:
        """How many of the first pages can be loaded now."""
        try:
            plan = self._plan(names)
            self._connector.loads.cancel(plan)
        except Exception:  # a failed lookup is a miss
            log.exception("lookup of %d pages in the tiers failed", len(names))
            return 0
        return plan.blocks

    def load(self, names: Sequence[str], pages: Sequence[int]) -> list[bool]:
        """Fill pages; True for each that was filled. No page is written after the return."""
        good: list[bool] = []
        try:
            plan = self._plan(names)
            if plan.blocks:
                good = self._connector.loads.onboard(plan, pages[: plan.blocks]).result()
        except Exception:  # pages that cannot be loaded are computed
            log.exception("load of %d pages from the tiers failed", len(names))
        return good + [False] * (len(names) - len(good))

    def store(self, names: Sequence[str], pages: Sequence[int], before: Sequence[str]) -> bool:
        """Offload pages, which follow the pages ``before``; returns when they are no longer read.

        False when it failed. True does not mean that a tier accepted them.
        """
        try:
            keys = [self._key(name) for name in names]
            parents = [self._key(before[-1]) if before else None, *keys[:-1]]
            blocks = [
                BlockDescriptor(
                    key=key,
                    parent=parent,
                    token_ids=(),  # unknown; routers learn of pages from SGLang's own events
                    facts=RetentionHints(depth=len(before) + number),
                )
                for number, (key, parent) in enumerate(zip(keys, parents, strict=True))
            ]
            self._connector.stores.offload(blocks, pages).result()
        except Exception:  # a page that is not stored is computed again
            log.exception("offload of %d pages to the tiers failed", len(names))
            return False
        return True

    def _plan(self, names: Sequence[str]) -> OnboardTicket:
        plan = self._connector.lookups.plan([self._key(name) for name in names])
        try:
            return plan.result(_PLAN_TIMEOUT_S)
        except TimeoutError:
            if not plan.cancel():
                self._connector.loads.cancel(plan.result())
            raise

    def _key(self, name: str) -> bytes:
        return self._connector.lookups.key_of(name.encode())
