"""Packets that a process of the run, gone wrong, may send to a worker that lends blocks."""

from __future__ import annotations

import socket
import struct
from contextlib import ExitStack, suppress

import msgspec
import pytest
from tests.support.exporter import exporter

from commutator_engine_kit.kv.transfer.event_loop import EventLoopThread
from commutator_engine_kit.kv.transfer.protocol import LentBlocks, LookupRequest
from commutator_engine_kit.kv.transfer.sources import Sources

pytestmark = pytest.mark.security

DEEP = b"\x91" * 100_000
ASK = b"\x94\xa3ask\x01\xa7look_up"
LOOK_UP = {"id": "x", "identity": "any", "slot_bytes": 4096, "keys": []}


def frame(body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + body


PACKETS = {
    "a deep unknown field": frame(ASK + b"\x81\xa1x" + DEEP),
    "an unknown field as deep as can be decoded": frame(
        ASK + msgspec.msgpack.encode(LOOK_UP)[:1].replace(b"\x84", b"\x85")
        + msgspec.msgpack.encode(LOOK_UP)[1:] + b"\xa1x" + b"\x91" * 900 + b"\xc0"
    ),
    "a deep frame": frame(DEEP),
    "no MessagePack": frame(b"\xc1" * 64),
    "cut off": frame(ASK),
    "an empty array": frame(b"\x90"),
    "no array": frame(b"\x01"),
    "a length over the limit": b"\xff\xff\xff\xff",
    "a frame that never ends": struct.pack(">I", 1 << 20) + b"\x91",
    "arguments of another type": frame(msgspec.msgpack.encode(["ask", 1, "look_up", 7])),
    "a watch for ever": frame(
        msgspec.msgpack.encode(
            ["ask", 1, "watch", {"id": "x", "have": 0, "state": "unknown", "wait_s": 1e300}]
        )
    ),
    "not a number": frame(
        msgspec.msgpack.encode(
            ["ask", 1, "watch", {"id": "x", "have": -9, "state": "?", "wait_s": float("nan")}]
        )
    ),
    "a release of nothing": frame(
        msgspec.msgpack.encode(["ask", 1, "release", {"id": "x", "blocks": [-1, 1 << 60]}])
    ),
}  # fmt: skip


def test_no_packet_ends_lending() -> None:
    with exporter(4, 4096) as lender, ExitStack() as open_:
        host, _, port = lender.address.rpartition(":")

        def connection() -> socket.socket:
            return open_.enter_context(socket.create_connection((host, int(port)), 10))

        for packet in PACKETS.values():
            with suppress(OSError):
                connection().sendall(packet)
        for _ in range(200):
            connection().send(b"\x00")  # slow senders
        loop, sources = EventLoopThread("reader"), Sources()
        try:
            for number in range(3):
                request = LookupRequest(f"after-{number}", "ab" * 32, 4096, ())
                asking = sources.ask(lender.address, "look_up", request, LentBlocks, timeout_s=30)
                assert loop.run(asking).agent.name
        finally:
            loop.run(sources.close())
            loop.close()
        assert lender.process.poll() is None
