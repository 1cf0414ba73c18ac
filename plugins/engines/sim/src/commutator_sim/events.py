"""The model's events: everything that happened, in order, with its virtual time."""

from __future__ import annotations

from attrs import frozen

DEVICE = "device"


@frozen
class Steps:
    """``count`` equal engine steps, one after the other, from ``start_ns`` on.

    Each gave one token to each of ``decoding`` requests and computed ``prefill_tokens``.
    """

    start_ns: int
    count: int
    step_ns: int
    decoding: int
    prefill_tokens: int


@frozen
class FirstToken:
    """The prompt of request ``key`` is computed and its first token exists."""

    time_ns: int
    key: int
    cached_tokens: int
    """Prompt tokens found in the KV cache on admission, in any tier."""
    loaded_tokens: int
    """Those of them that a tier behind the device loaded."""


@frozen
class Finished:
    """The last token of request ``key`` exists."""

    time_ns: int
    key: int


@frozen
class Preempted:
    """Request ``key`` lost its blocks and waits again; it keeps its tokens."""

    time_ns: int
    key: int


@frozen
class Stored:
    """Consecutive blocks of request ``key`` became reusable on the device."""

    time_ns: int
    key: int
    first_block: int
    """Index in the request of the first of ``blocks``."""
    blocks: tuple[int, ...]


@frozen
class Offloaded:
    """Blocks were copied to ``tier``; they need not be consecutive."""

    time_ns: int
    tier: str
    blocks: tuple[int, ...]


@frozen
class Removed:
    """Blocks are no longer in ``tier``."""

    time_ns: int
    tier: str
    blocks: tuple[int, ...]


@frozen
class Ready:
    """Another worker can pull the first ``blocks`` blocks of request ``key``."""

    time_ns: int
    key: int
    blocks: int


@frozen
class Pulling:
    """Request ``key`` has its blocks and waits for another worker to fill some of them."""

    time_ns: int
    key: int
    first_block: int
    end_block: int


@frozen
class Pulled:
    """Request ``key`` needs no more blocks of another worker."""

    time_ns: int
    key: int
    blocks: int
    """How many were pulled."""


Event = (
    Steps
    | FirstToken
    | Finished
    | Preempted
    | Stored
    | Offloaded
    | Removed
    | Ready
    | Pulling
    | Pulled
)
