"""What an engine tells about a KV block when it offers it to be kept."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import evolve, frozen

from commutator.kv.keys import BlockKey
from commutator.types import KvRetention

__all__ = [
    "MAX_PRIORITY",
    "PLAIN",
    "BlockFacts",
    "Offer",
    "block_facts",
    "holds_over",
    "is_stronger",
    "strongest",
]

MAX_PRIORITY = 10
"""Priorities run from minus this to this; beyond is cut."""


@frozen(kw_only=True)
class BlockFacts:
    """The retention that a request asked for, and where the block lies in its chain."""

    priority: int = 0
    """Blocks of a lower priority are evicted first."""
    ttl_s: float | None = None
    """So long after its last use the block is the first to be evicted."""
    pinned: bool = False
    """Not evicted to make room before ``ttl_s`` has passed."""
    is_prompt: bool = True
    """Whether the tokens are a prompt's, not an answer's."""
    tenant: str | None = None
    """The cache salt of the request."""
    depth: int = 0
    """Number of blocks before it in its chain."""

    @property
    def is_plain(self) -> bool:
        """Whether no retention was asked for."""
        return self.priority == 0 and self.ttl_s is None and not self.pinned


PLAIN = BlockFacts()


@frozen(kw_only=True)
class Offer:
    """One full block that was computed, by its key, with what must be known to announce it."""

    key: BlockKey
    parent: BlockKey | None
    token_ids: tuple[int, ...]
    facts: BlockFacts = PLAIN
    lora_name: str | None = None


def block_facts(
    index: int,
    block_size: int,
    prompt_tokens: int,
    tenant: str | None = None,
    retention: Sequence[KvRetention] = (),
) -> BlockFacts:
    """Of full block ``index`` of a request: its place, and the most that the client asked for."""
    end = (index + 1) * block_size
    plain = BlockFacts(is_prompt=end <= prompt_tokens, tenant=tenant, depth=index)
    asked = [
        evolve(plain, priority=kept.priority, ttl_s=kept.ttl_s, pinned=kept.pinned)
        for kept in retention
        if end <= (prompt_tokens if kept.tokens is None else kept.tokens)
    ]
    return strongest(asked) if asked else plain


def strongest(facts: Sequence[BlockFacts]) -> BlockFacts:
    """Of several that hold for one block, the one that asks most."""
    return max(facts, key=_strength)


def is_stronger(new: BlockFacts, old: BlockFacts) -> bool:
    """Whether ``new`` asks to keep the block more than ``old`` does: pinned, priority, TTL."""
    return _strength(new) > _strength(old)


def holds_over(new: BlockFacts, old: BlockFacts) -> bool:
    """Whether ``new`` holds from now on for a block for which ``old`` did: something, or more."""
    return not new.is_plain if old.is_plain else is_stronger(new, old)


def _strength(facts: BlockFacts) -> tuple[bool, int, float]:
    return facts.pinned, facts.priority, float("inf") if facts.ttl_s is None else facts.ttl_s
