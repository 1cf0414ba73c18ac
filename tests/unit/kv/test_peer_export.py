"""Who lends blocks keeps no leases but for those that it lends, and those not for ever."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import zmq
from tests.support.exporter import plain_geometry, store
from tests.support.kv_rig import wait_for

from commutator.kv import ExportOptions, PeerExport
from commutator.kv.peer_leases import NO_LEASE
from commutator.kv.peer_wire import (
    PeerAnswer,
    PeerAsk,
    PeerRelease,
    decode_peer_message,
    encode_peer_message,
)
from commutator_dram import DramConfig, DramTier

BLOCK_BYTES = 4096
KEYS = [bytes([number]) * 32 for number in range(4)]
GEOMETRY = plain_geometry(BLOCK_BYTES)


class Reader:
    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket

    def ask(self, identity: str = GEOMETRY.identity) -> PeerAnswer:
        self._socket.send(encode_peer_message(PeerAsk(1, identity, BLOCK_BYTES, KEYS)))
        assert self._socket.poll(5000)
        answer = decode_peer_message(self._socket.recv())
        assert isinstance(answer, PeerAnswer)
        return answer

    def release(self, answer: PeerAnswer) -> None:
        slots = [block.slot for block in answer.blocks]
        self._socket.send(encode_peer_message(PeerRelease(answer.lease, slots)))


@contextmanager
def lent() -> Iterator[tuple[PeerExport, DramTier, Reader]]:
    tier = DramTier(DramConfig(kind="dram", capacity=16 * BLOCK_BYTES, huge_pages="off"))
    tier.open(GEOMETRY)
    store(tier, KEYS, [bytes(BLOCK_BYTES)] * len(KEYS))
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    with ThreadPoolExecutor(1) as thread:
        export = PeerExport(
            tier,
            GEOMETRY,
            agent_name="lender",
            metadata=lambda: b"metadata",
            on_tier=thread.submit,
            options=ExportOptions(listen="tcp://127.0.0.1:*", lease_s=0.3),
        )
        try:
            socket.connect(export.start())
            yield export, tier, Reader(socket)
        finally:
            context.destroy(linger=0)
            export.close()
    tier.close()


def test_who_gets_no_block_gets_no_lease() -> None:
    with lent() as (export, _, reader):
        for _ in range(20):
            answer = reader.ask(identity="another")
            assert (answer.blocks, answer.lease) == ([], NO_LEASE)
        assert export.leases == 0


def test_leases_end_whether_their_blocks_came_back_or_not() -> None:
    with lent() as (export, tier, reader):
        reader.release(reader.ask())
        assert export.leases == 1
        wait_for(lambda: export.leases == 0)
        answer = reader.ask()
        assert len(answer.blocks) == len(KEYS)
        assert answer.lease != NO_LEASE
        wait_for(lambda: export.leases == 0)
        wait_for(lambda: tier.statistics().pinned == 0)
