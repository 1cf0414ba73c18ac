"""An engine in virtual time, for replaying traces through the real routing code."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from attrs import frozen

from commutator.kv.medium import Tier

__all__ = [
    "BlocksGone",
    "BlocksHeld",
    "BlocksPulled",
    "BlocksReady",
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
    exports: bool = False
    """Its blocks are for another worker: they stay until they are released."""
    pulls: bool = False
    """Full blocks of its prompt that are not here come from another worker."""


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


@frozen
class BlocksReady:
    """Another worker can fetch the first ``blocks`` blocks of request ``key``, which exports."""

    key: int
    blocks: int


@frozen
class BlocksPulled:
    """Request ``key``, which pulls, needs nothing more; ``blocks`` came from the other worker."""

    key: int
    blocks: int


VirtualEvent = (
    PrefillDone | RequestDone | TokensMade | BlocksHeld | BlocksGone | BlocksReady | BlocksPulled
)


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

    @property
    def token_bytes(self) -> int | None:
        """KV bytes of one token; None when the engine takes no part in hand-overs.

        Only if it does, what follows is called, and requests export or pull.
        """
        return None

    def next_event_ns(self) -> int | None:
        """Before this time nothing but tokens comes of itself; None: nothing ever will.

        What the present moment brings is told by advancing to it, after this was called.
        """
        raise NotImplementedError

    def offer(self, key: int, blocks: int) -> None:
        """The other worker has the first ``blocks`` blocks ready for a request that pulls."""
        raise NotImplementedError

    def release(self, key: int) -> None:
        """The other worker has what it needs of a request that exports."""
        raise NotImplementedError
