"""Which blocks a tier takes: rules beside the one that a block is stored once only."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterable

from attrs import frozen

from commutator.kv.keys import BlockKey
from commutator.kv.offer import Offer

__all__ = ["AdmissionRule", "MinimumHits", "NotLongerThan", "PromptOnly", "UseCounts", "count_uses"]


class AdmissionRule(ABC):
    """One reason not to store a block."""

    counts_uses: bool = False
    """Whether the rule looks at ``uses``; counting takes memory."""

    @abstractmethod
    def refusal(self, offer: Offer, uses: int) -> str | None:
        """Why not, in a few words without numbers (they name a counter), or None.

        ``uses`` says how often the block was offered or loaded, as far as is remembered.
        """


@frozen
class MinimumHits(AdmissionRule):
    """Only blocks that were used so often; the first computation is a use."""

    hits: int = 2
    counts_uses = True

    def refusal(self, offer: Offer, uses: int) -> str | None:
        return "too few hits" if uses < self.hits else None


@frozen
class NotLongerThan(AdmissionRule):
    """Only the first blocks of a chain."""

    blocks: int

    def refusal(self, offer: Offer, uses: int) -> str | None:
        return "too deep in its chain" if offer.facts.depth >= self.blocks else None


@frozen
class PromptOnly(AdmissionRule):
    """No blocks with tokens that the model generated."""

    def refusal(self, offer: Offer, uses: int) -> str | None:
        return None if offer.facts.is_prompt else "not part of a prompt"


def count_uses(rules: Iterable[Iterable[AdmissionRule]]) -> bool:
    """Whether any rule of any tier asks how often a block was used."""
    return any(rule.counts_uses for tier in rules for rule in tier)


class UseCounts:
    """How often each of the blocks seen last was used."""

    def __init__(self, remembered_blocks: int) -> None:
        self._most = remembered_blocks
        self._counts: OrderedDict[BlockKey, int] = OrderedDict()

    def used(self, key: BlockKey) -> None:
        self._counts[key] = self._counts.pop(key, 0) + 1
        if len(self._counts) > self._most:
            self._counts.popitem(last=False)

    def __getitem__(self, key: BlockKey) -> int:
        return self._counts.get(key, 0)
