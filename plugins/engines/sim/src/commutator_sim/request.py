"""A request as the model sees it: lengths and block keys, no tokens."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto

from attrs import define, frozen

from commutator.types import KvRetention

__all__ = ["Phase", "Run", "SimRequest"]


@frozen
class SimRequest:
    """One request. A trace gives its own block keys; real tokens are hashed to keys."""

    prompt_tokens: int
    output_tokens: int
    """How long the answer is: a simulated request knows when it will end."""
    block_keys: Sequence[int] = ()
    """Keys of the first blocks, each standing for the whole prefix up to the block's end.

    Only full blocks can be found again: a key of a block that is never filled is ignored. There
    may be fewer keys than blocks; blocks without a key are never reused.
    """
    priority: int = 0
    """Lower is served earlier."""
    exports: bool = False
    """Its blocks are for another worker: they are held, and told of, until they are released."""
    pulls: int | None = None
    """Of its prompt's first full blocks so many come from another worker, unless they are here."""
    tenant: str | None = None
    """Whose share of a tier its blocks take."""
    retention: tuple[KvRetention, ...] = ()
    """What tiers are asked to keep longer than other blocks."""

    def __attrs_post_init__(self) -> None:
        if self.prompt_tokens < 1 or self.output_tokens < 1:
            raise ValueError("a request needs at least one token in and one out")

    @property
    def kv_tokens(self) -> int:
        """Tokens whose KV exists at the end; the last token's own is never computed."""
        return self.prompt_tokens + self.output_tokens - 1


class Phase(Enum):
    """Where a request is."""

    WAITING = auto()
    LOADING = auto()
    """It has its blocks and waits for a tier, or another worker, to fill the first of them."""
    PREFILL = auto()
    DECODE = auto()
    OVER = auto()


@define(eq=False)
class Run:
    """One request inside the model."""

    key: int
    request: SimRequest
    order: tuple[int, int]
    """Priority, then arrival: smaller is served first and preempted last."""
    kv_tokens: int
    """Those of the request."""
    phase: Phase = Phase.WAITING
    computed: int = 0
    """Tokens with KV on the device; while decoding, ``decode_base`` plus the step number."""
    target: int = 0
    """Tokens to compute before the next token exists: the prompt and what was generated."""
    generated: int = 0
    """Tokens of the answer; while decoding it follows from the step number instead."""
    decode_base: int = 0
    named: int = 0
    """Of its device blocks, the first ones that are held by key."""
    unnamed: int = 0
    cached_tokens: int = -1
    """Found on first admission; -1 before."""
    loaded_tokens: int = 0
    pulling: bool = False
    """It waits for blocks of another worker, or will when it is admitted."""
    offered: int = 0
    """Of its first blocks, those that the other worker has ready."""
    pulled: int = 0
    """Of its first blocks, those that are here or on their way."""
    epoch: int = 0
    """Counts the phases left, so that appointments made in an earlier one are void."""

    def move(self, phase: Phase) -> None:
        self.phase = phase
        self.epoch += 1
