"""What two workers of our own style say to each other, and what routing says to each of them.

Routing, in ``GenerateRequest.handover``: a ``PrefillWords`` to one, a ``DecodeWords`` to the other.
The decode worker asks the prefill worker, by the token API's "handover" questions:

    hello      {}                     a Source: who it is, and where its blocks lie
    watch      Watch                  an ExportNews, once there is any, or after ``wait_s``
    release    {id}                   nothing; the blocks are not needed any longer
    statistics {}                     what is counted, for anybody
"""

from __future__ import annotations

from enum import StrEnum

import msgspec
from attrs import frozen

from commutator.engine.handover.geometry import convertible
from commutator.errors import RequestError
from commutator.types import GenerateRequest, HandoverInfo

__all__ = [
    "DecodeWords",
    "ExportNews",
    "ExportState",
    "PrefillWords",
    "ReadyBlock",
    "Source",
    "Watch",
    "read_words",
]


@frozen
class PrefillWords:
    """To the prefill worker: keep the prompt's blocks until the decode worker has them."""

    pull: str
    """Names the hand-over; the decode leg is told the same."""
    lease_s: float
    """The blocks are freed when nobody asked for them for so long."""


@frozen
class DecodeWords:
    """To the decode worker: get the prompt's blocks from there, as far as it has none itself."""

    pull: str
    address: str
    """Of the prefill worker, "host:port"."""
    block_size: int
    """Tokens in a block of the prefill worker."""
    timeout_s: float
    """After so long the request fails."""


class ExportState(StrEnum):
    """How far a prefill leg is."""

    UNKNOWN = "unknown"
    """It has not come yet."""
    RUNNING = "running"
    COMPLETE = "complete"
    """No more blocks will come."""
    FAILED = "failed"
    """There is nothing to be had, or not any longer."""


@frozen
class ReadyBlock:
    """A full block of a prompt, computed, and held until it is released."""

    index: int
    """In the prefill worker's arena."""
    key: bytes
    """What it was computed from; see ``handover_keys``."""
    checksum: int
    """Of its bytes; see ``kv.checksum``."""


@frozen
class Watch:
    """Asks for what is new."""

    id: str
    have: int
    """So many of the prompt's first blocks are known already."""
    state: ExportState
    """As it was last told."""
    wait_s: float
    """An answer without news comes after so long."""


@frozen
class ExportNews:
    """The prompt's blocks after those that were known."""

    state: ExportState
    blocks: tuple[ReadyBlock, ...] = ()
    reason: str = ""
    """Why it failed."""


@frozen
class Source:
    """A prefill worker's memory. It changes when the process is another one."""

    info: HandoverInfo
    agent: str
    """The name of its NIXL agent; no other process ever has the same."""
    metadata: bytes
    """What another NIXL agent must know to read from it."""
    memory: str
    """Which kind, as NIXL calls it."""
    address: int
    """Block ``i`` begins ``i * block_bytes`` after it."""
    block_bytes: int
    blocks: int
    device: int = 0
    runs: int = 1
    """A block is so many runs of equal size, each with something of all its tokens, in order."""


def read_words(request: GenerateRequest, block_size: int) -> PrefillWords | DecodeWords | None:
    """Which leg a request is at a worker with such blocks; None when it is a whole one.

    Raises RequestError for words that are none of these, or cannot be followed.
    """
    if request.handover is None:
        return None
    try:
        if "address" not in request.handover:
            return msgspec.convert(request.handover, PrefillWords)
        words = msgspec.convert(request.handover, DecodeWords)
    except msgspec.ValidationError as error:
        raise RequestError(f"handover: {error}", "handover") from error
    if not convertible(words.block_size, block_size):
        raise RequestError(
            f"handover: blocks of {words.block_size} tokens do not become blocks of {block_size}",
            "handover",
        )
    return words
