"""A request as the model sees it: lengths and block keys, no tokens."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto

from attrs import define, frozen

from commutator import KvRetention


@frozen
class SimRequest:
    """One request. A trace gives its own block keys; real tokens are hashed to keys."""

    prompt_tokens: int
    output_tokens: int
    """Length of the answer: a simulated request knows when it will end."""
    block_keys: Sequence[int] = ()
    """Keys of the first blocks, each standing for the whole prefix up to the block's end.

    Only full blocks can be found again: a key of a block that is never filled is ignored. There
    may be fewer keys than blocks; blocks without a key are never reused.
    """
    priority: int = 0
    """Lower values are served earlier."""
    exports: bool = False
    """Whether its blocks are for another worker: they are held and announced until released."""
    pulls: int | None = None
    """How many of its prompt's first full blocks another worker has; cached ones are not pulled."""
    tenant: str | None = None
    """The tenant to whose share of a tier its blocks count."""
    retention: tuple[KvRetention, ...] = ()
    """Which blocks tiers should retain longer than others."""

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
    """It has its blocks and waits until a tier or another worker has filled the first of them."""
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
    """``SimRequest.kv_tokens`` of the request."""
    phase: Phase = Phase.WAITING
    computed: int = 0
    """Tokens with KV on the device; while decoding, ``decode_base`` plus the step number."""
    target: int = 0
    """Tokens to compute before the next token exists: the prompt and the tokens generated."""
    generated: int = 0
    """Tokens of the answer; not updated while decoding: it follows from the step number then."""
    decode_base: int = 0
    named: int = 0
    """How many of its first device blocks are held by key."""
    unnamed: int = 0
    """How many of its device blocks are held without a key."""
    cached_tokens: int = -1
    """Found on first admission; -1 before."""
    loaded_tokens: int = 0
    pulling: bool = False
    """Whether it waits for blocks of another worker, or will when it is admitted."""
    offered: int = 0
    """How many of its first blocks the other worker has ready."""
    pulled: int = 0
    """How many of its first blocks have arrived or are on their way."""
    epoch: int = 0
    """Number of phases left; it makes appointments of earlier phases void."""

    def move(self, phase: Phase) -> None:
        self.phase = phase
        self.epoch += 1
