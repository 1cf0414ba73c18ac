"""Admission rules: which blocks a tier accepts, apart from those that it has."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterable

from attrs import frozen

from commutator.contract.block import BlockDescriptor, BlockKey
from commutator.contract.tier import AdmissionConfig

__all__ = [
    "AdmissionRule",
    "MinimumHits",
    "NotLongerThan",
    "PromptOnly",
    "UseCounts",
    "admission_rules",
    "count_uses",
]


class AdmissionRule(ABC):
    """One reason not to store a block."""

    counts_uses: bool = False
    """Whether the rule needs ``uses``. Counting takes memory."""

    @abstractmethod
    def refusal(self, offer: BlockDescriptor, uses: int) -> str | None:
        """The reason to refuse the block, or None. A few words without numbers: it names a counter.

        ``uses`` is how often the block was offered or loaded, among the blocks seen last.
        """


@frozen
class MinimumHits(AdmissionRule):
    """Accepts blocks with at least ``hits`` uses; the first computation is a use."""

    hits: int = 2
    counts_uses = True

    def refusal(self, offer: BlockDescriptor, uses: int) -> str | None:
        return "too few hits" if uses < self.hits else None


@frozen
class NotLongerThan(AdmissionRule):
    """Accepts only the first ``blocks`` blocks of a chain."""

    blocks: int

    def refusal(self, offer: BlockDescriptor, uses: int) -> str | None:
        return "too deep in its chain" if offer.facts.depth >= self.blocks else None


@frozen
class PromptOnly(AdmissionRule):
    """Refuses blocks with tokens that the model generated."""

    def refusal(self, offer: BlockDescriptor, uses: int) -> str | None:
        return None if offer.facts.is_prompt else "not part of a prompt"


def count_uses(rules: Iterable[Iterable[AdmissionRule]]) -> bool:
    """Whether any rule of any tier needs the number of uses."""
    return any(rule.counts_uses for tier in rules for rule in tier)


class UseCounts:
    """The number of uses of each of the ``remembered_blocks`` blocks seen last."""

    def __init__(self, remembered_blocks: int) -> None:
        self._most = remembered_blocks
        self._counts: OrderedDict[BlockKey, int] = OrderedDict()

    def used(self, key: BlockKey) -> None:
        self._counts[key] = self._counts.pop(key, 0) + 1
        if len(self._counts) > self._most:
            self._counts.popitem(last=False)

    def __getitem__(self, key: BlockKey) -> int:
        return self._counts.get(key, 0)


def admission_rules(config: AdmissionConfig) -> tuple[AdmissionRule, ...]:
    """The rules that the configuration enables."""
    rules: list[AdmissionRule] = []
    if config.prompt_only:
        rules.append(PromptOnly())
    if config.max_blocks is not None:
        rules.append(NotLongerThan(config.max_blocks))
    if config.min_hits > 1:
        rules.append(MinimumHits(config.min_hits))
    return tuple(rules)
