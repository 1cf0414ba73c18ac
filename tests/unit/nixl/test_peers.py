"""Two processes by UCX: metadata, reading and writing, a peer that stops and one that dies."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator

import psutil
import pytest
from tests.support.transfer import Buffer, PeerProcess, blocks_of, moves_between, peer_process
from tests.support.work import calls_of

from commutator.contract.tier import Direction, Memory
from commutator.errors import TransferError, TransferTimeoutError
from commutator_engine_kit.nixl.agent import Transfer, TransferAgent, TransferPath
from commutator_engine_kit.nixl.moves import MoveLimits, move_blocks

MIB = 1 << 20
SIZE = 64 * MIB
SEED = 5
READ = TransferPath(Direction.READ, Memory.DRAM, Memory.DRAM, "UCX", "other")

pytestmark = pytest.mark.slow


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> None:
    """As between two hosts: without it the kernel copies, even out of a stopped process."""
    monkeypatch.setenv("UCX_TLS", "tcp")


@pytest.fixture
def peer() -> Iterator[PeerProcess]:
    with peer_process("other", SIZE, SEED) as made:
        yield made


@pytest.fixture
def reader() -> Buffer:
    return Buffer(SIZE)


@pytest.fixture
def other(reader: Buffer, peer: PeerProcess) -> Iterator[TransferAgent]:
    """An agent that knows the peer."""
    agent = TransferAgent("mine", {"UCX": {}})
    agent.register([reader.region], "UCX")
    assert agent.add_peer(peer.metadata) == "other"
    yield agent
    agent.close()


def start(agent: TransferAgent, memory: Buffer, peer: PeerProcess, blocks: int = 64) -> Transfer:
    return agent.start(READ, memory.blocks(MIB)[:blocks], blocks_of(peer.span, MIB)[:blocks])


@pytest.mark.parametrize("prepared", [False, True])
def test_read_and_write(
    other: TransferAgent, reader: Buffer, peer: PeerProcess, *, prepared: bool
) -> None:
    expected = Buffer(SIZE)
    expected.fill(SEED)
    if prepared:
        other.prepare(Memory.DRAM, reader.span, MIB, "UCX")
        other.prepare(Memory.DRAM, peer.span, MIB, "UCX", peer="other")
    forwards = moves_between(reader.blocks(MIB), blocks_of(peer.span, MIB))
    backwards = moves_between(reader.blocks(MIB), blocks_of(peer.span, MIB)[::-1])
    for direction, moves in (
        (Direction.READ, forwards),
        (Direction.WRITE, backwards),
        (Direction.READ, forwards),
    ):
        path = TransferPath(direction, Memory.DRAM, Memory.DRAM, "UCX", "other")
        results = move_blocks(other, path, moves, MoveLimits(timeout_s=20))
        assert results == [None] * 64
    backward = [expected.bytes[i * MIB : (i + 1) * MIB] for i in reversed(range(64))]
    assert reader.bytes[:] == b"".join(backward)


def test_known_metadata_are_not_loaded_again(
    other: TransferAgent, reader: Buffer, peer: PeerProcess
) -> None:
    assert other.add_peer(peer.metadata) == "other"
    calls = calls_of(lambda: other.add_peer(peer.metadata))
    print(calls)
    assert calls < 5, "NIXL is not asked"
    other.remove_peer("other")
    with pytest.raises(TransferError, match="other"):
        start(other, reader, peer)
    other.add_peer(peer.metadata)
    start(other, reader, peer).wait(20)


@pytest.mark.usefixtures("network")
def test_a_peer_that_dies_during_a_read_is_an_error_in_time(
    other: TransferAgent, reader: Buffer, peer: PeerProcess
) -> None:
    start(other, reader, peer, blocks=1).wait(20)  # connected
    threading.Timer(0.02, peer.process.kill).start()
    started_s = time.perf_counter()
    moves = moves_between(reader.blocks(MIB), blocks_of(peer.span, MIB)) * 50
    results = move_blocks(other, READ, moves, MoveLimits(timeout_s=20))
    assert time.perf_counter() - started_s < 20
    failed = [error for error in results if error]
    assert failed
    assert results[-1] is not None
    assert not any(isinstance(error, TransferTimeoutError) for error in failed)
    other.remove_peer("other")


@pytest.mark.usefixtures("network")
def test_memory_stays_pinned_while_a_peer_hangs(
    other: TransferAgent, reader: Buffer, peer: PeerProcess
) -> None:
    start(other, reader, peer, blocks=1).wait(20)  # connected
    reader.clear()
    os.kill(peer.process.pid, signal.SIGSTOP)
    while psutil.Process(peer.process.pid).status() != psutil.STATUS_STOPPED:
        time.sleep(0.001)
    transfer = start(other, reader, peer)
    with pytest.raises(TransferTimeoutError) as caught:
        transfer.wait(0.3)
    assert caught.value.token == transfer.token
    # What NIXL would grant at once, although the peer's bytes still come:
    with pytest.raises(TransferError, match="under way"):
        other.remove_peer("other")
    with pytest.raises(TransferTimeoutError, match="stays pinned"):
        other.close(0.1)
    time.sleep(0.2)
    assert other.reap() == []
    expected = Buffer(SIZE)
    expected.fill(SEED)
    assert reader.bytes[:] != expected.bytes[:]
    os.kill(peer.process.pid, signal.SIGCONT)
    deadline_s = time.monotonic() + 20
    while not (reaped := other.reap()) and time.monotonic() < deadline_s:
        time.sleep(0.001)
    assert reaped == [transfer.token]
    assert reader.bytes[:] == expected.bytes[:]
