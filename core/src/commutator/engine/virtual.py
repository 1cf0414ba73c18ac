"""An engine in virtual time, for replaying traces through the real routing code."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from attrs import frozen

from commutator.kv.medium import Tier

__all__ = [
    "BlocksGone",
    "BlocksHeld",
    "PrefillDone",
    "RequestDone",
    "TokensMade",
    "VirtualEngine",
    "VirtualEvent",
    "VirtualRequest",
]


@frozen
class VirtualRequest:
    """A request of a trace: lengths, and names of its blocks instead of tokens."""

    prompt_tokens: int
    output_tokens: int
    block_hashes: Sequence[int]
    """One for each full block of the prompt; each stands for the whole prefix up to its end."""


@frozen
class PrefillDone:
    """The first token of request ``key`` exists."""

    time_ns: int
    key: int
    cached_tokens: int
    """Prompt tokens found in the engine's KV cache, in any tier."""


@frozen
class RequestDone:
    """The last token of request ``key`` exists."""

    time_ns: int
    key: int


@frozen
class TokensMade:
    """``tokens`` tokens came ``interval_ns`` after the ones before them in their requests."""

    interval_ns: int
    tokens: int


@frozen
class BlocksHeld:
    """Blocks can be reused, from ``tier``."""

    tier: Tier
    block_hashes: Sequence[int]


@frozen
class BlocksGone:
    """Blocks are no longer in ``tier``."""

    tier: Tier
    block_hashes: Sequence[int]


VirtualEvent = PrefillDone | RequestDone | TokensMade | BlocksHeld | BlocksGone


class VirtualEngine(ABC):
    """One worker in virtual time. Pure: no clock but the one passed in, no chance."""

    @property
    @abstractmethod
    def block_size(self) -> int:
        """Tokens in one KV block; a request's block hashes are of such blocks."""

    @abstractmethod
    def submit(self, key: int, request: VirtualRequest) -> None:
        """The request arrives at the time last advanced to. Raises ValueError if it cannot fit."""

    @abstractmethod
    def advance(self, until_ns: int | None) -> Sequence[VirtualEvent]:
        """Let time pass; None: until nothing is left to do. Returns what happened, in order."""
