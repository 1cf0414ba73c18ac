"""SGLang's pages in our tiers: found, loaded and kept. Whatever goes wrong is a miss."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import Future

from commutator.engine import EmbeddedTiers, TierPlan
from commutator.kv import BlockFacts, Offer

__all__ = ["TierPages"]

log = logging.getLogger(__name__)

_ASK_S = 10.0
"""Longer than any tier is asked; whoever is not answered by then computes."""


class TierPages:
    """Called on SGLang's storage threads, which may wait; never raises.

    Pages have names, which depend on their tokens and on all tokens before them, and numbers in
    host memory. Names follow each other as in the chain.
    """

    def __init__(self, tiers: EmbeddedTiers) -> None:
        self._tiers = tiers

    def found(self, names: Sequence[str]) -> int:
        """How many of the first pages could be loaded now."""
        try:
            plan = self._plan(names)
            self._tiers.drop(plan)
        except Exception:  # a question that fails is a miss
            log.exception("the tiers could not be asked for %d pages", len(names))
            return 0
        return plan.blocks

    def load(self, names: Sequence[str], pages: Sequence[int]) -> list[bool]:
        """Fill pages; only those with True hold what was asked for. Nobody writes there after."""
        good: list[bool] = []
        try:
            plan = self._plan(names)
            if plan.blocks:
                good = self._tiers.load(plan, pages[: plan.blocks]).result()
        except Exception:  # pages that do not come are computed
            log.exception("%d pages could not be loaded", len(names))
        return good + [False] * (len(names) - len(good))

    def store(self, names: Sequence[str], pages: Sequence[int], before: Sequence[str]) -> bool:
        """Keep pages, which come after those ``before``; returns once nobody reads them any more.

        True does not say that any tier wanted them.
        """
        try:
            keys = [self._key(name) for name in names]
            parents = [self._key(before[-1]) if before else None, *keys[:-1]]
            offers = [
                Offer(
                    key=key,
                    parent=parent,
                    token_ids=(),  # not known; SGLang's own events tell routers of its pages
                    facts=BlockFacts(depth=len(before) + number),
                )
                for number, (key, parent) in enumerate(zip(keys, parents, strict=True))
            ]
            self._tiers.store(offers, pages).result()
        except Exception:  # a page that is not kept is computed again
            log.exception("%d pages could not be stored", len(names))
            return False
        return True

    def _plan(self, names: Sequence[str]) -> TierPlan:
        asked = self._tiers.plan([self._key(name) for name in names])
        try:
            return asked.result(_ASK_S)
        except TimeoutError:
            self._forget(asked)
            raise

    def _forget(self, asked: Future[TierPlan]) -> None:
        if not asked.cancel():
            self._tiers.drop(asked.result())

    def _key(self, name: str) -> bytes:
        return self._tiers.key_of(name.encode())
