"""The interface of an engine's model in virtual time, and how replays find it.

An engine's distribution names a factory, which takes the engine's configuration and returns a
`VirtualEngine`, in the entry-point group `commutator_replay.engines`, under the engine's kind.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from importlib.metadata import entry_points
from typing import Any

from attrs import frozen

from commutator.contract.block import CacheLevel
from commutator.contract.planner import EnginePerformance


@frozen
class VirtualRequest:
    """A request of a trace: lengths, and hashes of its blocks instead of tokens."""

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
    """``tokens`` tokens, each ``interval_ns`` after the one before it in its request."""

    interval_ns: int
    tokens: int


@frozen
class BlocksHeld:
    """Blocks can be reused, from ``tier``."""

    tier: CacheLevel
    block_hashes: Sequence[int]


@frozen
class BlocksGone:
    """Blocks are no longer in ``tier``."""

    tier: CacheLevel
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
    """One worker in virtual time. Pure: time is passed in, and nothing is random."""

    @property
    @abstractmethod
    def block_size(self) -> int:
        """Tokens in one KV block; a request's block hashes are of such blocks."""

    @abstractmethod
    def submit(self, key: int, request: VirtualRequest) -> None:
        """The request arrives at the time last advanced to. Raises ValueError if it cannot fit."""

    @abstractmethod
    def advance(self, until_ns: int | None) -> Sequence[VirtualEvent]:
        """Advance to ``until_ns``; None: until nothing is left to do. Returns the events."""

    @property
    def token_bytes(self) -> int | None:
        """KV bytes of one token; None when the engine takes no part in hand-overs.

        Without it, the methods below are not called, and no request exports or pulls.
        """
        return None

    @property
    def performance(self) -> EnginePerformance | None:
        """How fast it is; None when it cannot tell, and so cannot be planned."""
        return None

    def next_event_ns(self) -> int | None:
        """Until this time no events come but tokens; None: none will come.

        Events that are due now are returned by the ``advance`` that follows this call.
        """
        raise NotImplementedError

    def offer(self, key: int, blocks: int) -> None:
        """The other worker has the first ``blocks`` blocks ready for a request that pulls."""
        raise NotImplementedError

    def release(self, key: int) -> None:
        """The other worker has what it needs of a request that exports."""
        raise NotImplementedError


def virtual_engine_factory(kind: str) -> Callable[[Any], VirtualEngine] | None:
    """The factory for this engine kind, from its configuration; None if it has no model."""
    for found in entry_points(group="commutator_replay.engines", name=kind):
        factory: Callable[[Any], VirtualEngine] = found.load()
        return factory
    return None
