"""What workers say to each other to read blocks out of each other's memory. Msgpack, by ZMQ.

A reader (DEALER) asks an exporter (ROUTER) for a chain of blocks. What the answer names stays where
it is until the reader gives it back, or until the lease ends, whichever is first.
"""

from __future__ import annotations

import msgspec

__all__ = [
    "PeerAnswer",
    "PeerAsk",
    "PeerBlock",
    "PeerRelease",
    "decode_peer_message",
    "encode_peer_message",
]


class PeerAsk(msgspec.Struct, tag="ask", frozen=True):
    """Which of these does the exporter have? Answered by ``PeerAnswer``."""

    number: int
    """Repeated in the answer."""
    identity: str
    slot_bytes: int
    """Blocks of another deployment, or encoded in another way, are never exchanged."""
    keys: list[bytes]
    """A chain from its beginning."""


class PeerBlock(msgspec.Struct, array_like=True, frozen=True):
    """One block in the exporter's memory."""

    slot: int
    address: int
    size_bytes: int
    device: int
    checksum: int


class PeerAnswer(msgspec.Struct, tag="answer", frozen=True):
    """The blocks of the chain's beginning that the exporter has, in order."""

    number: int
    agent: str
    """Name of the exporter's NIXL agent."""
    metadata: bytes
    """What another agent must know to reach it."""
    lease: int
    lease_s: float
    """How long the blocks stay from now on, if they are not given back."""
    blocks: list[PeerBlock]


class PeerRelease(msgspec.Struct, tag="release", frozen=True):
    """The reader is done with these slots of a lease. Not answered."""

    lease: int
    slots: list[int]


Message = PeerAsk | PeerAnswer | PeerRelease

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Message)


def encode_peer_message(message: Message) -> bytes:
    return _encoder.encode(message)


def decode_peer_message(data: bytes) -> Message:
    """Raises ValueError for what is no message."""
    message: Message = _decoder.decode(data)
    return message
