"""Blocks read out of another process's memory: real processes, real UCX."""

from __future__ import annotations

import ctypes
import mmap
import signal
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.support.exporter import exporter, plain_geometry
from tests.support.tier_mover import block_of, random_keys

from commutator.contract.block import BlockKey
from commutator.contract.tier import Direction, Memory
from commutator_engine_kit.kv.arena import BlockArena, bytes_at, checksum
from commutator_engine_kit.kv.tiers.mover import IoContext, TierMover
from commutator_engine_kit.nixl.agent import TransferAgent
from commutator_peer.config import PeerTierConfig
from commutator_peer.tier import PeerTier

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

BLOCK_BYTES = 20_000

Outcome = bytes | str


class Reader:
    """A peer tier with memory to read into."""

    def __init__(self, tier: PeerTier) -> None:
        self.tier = tier
        self._memory = mmap.mmap(-1, BLOCK_BYTES * 64)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._arena = BlockArena(
            memory=Memory.DRAM, address=address, block_bytes=BLOCK_BYTES, count=64
        )
        self.agent = TransferAgent(f"reader-{uuid.uuid4().hex}", {"UCX": {}})
        self.agent.register([self._arena.region], "UCX")
        self._mover = TierMover([self.agent], tier, self._arena)

    def load(self, keys: Sequence[BlockKey], timeout_s: float = 10.0) -> list[Outcome]:
        """What ``lookup`` knows of, read as the service reads it."""
        found = [stored for stored in self.tier.lookup(keys) if stored is not None]
        for stored in found:
            self.tier.pin(stored.slot)
        spans = [self._arena.span(number) for number in range(len(found))]
        for span in spans:
            bytes_at(span)[:] = b"\xee" * BLOCK_BYTES
        errors = self._mover.move(
            Direction.READ,
            [
                (span, stored.slot, stored.size_bytes)
                for span, stored in zip(spans, found, strict=True)
            ],
            IoContext(time.monotonic() + timeout_s),
        )
        outcomes: dict[BlockKey, Outcome] = {}
        for span, stored, error in zip(spans, found, errors, strict=True):
            read = bytes(bytes_at(span))
            intact = checksum(read) == stored.checksum
            outcomes[stored.key] = "failed" if error is not None else read if intact else "corrupt"
            self.tier.unpin(stored.slot)
        return [outcomes.get(key, "missing") for key in keys]


@contextmanager
def reader(*addresses: str, timeout_s: float = 2.0, identity: str = "ab" * 32) -> Iterator[Reader]:
    tier = PeerTier(PeerTierConfig(kind="peer", ask_timeout_s=timeout_s))
    tier.use_peers(lambda: addresses)
    tier.open(plain_geometry(BLOCK_BYTES, identity))
    reading = Reader(tier)
    yield reading
    tier.close()
    reading.agent.close()


def blocks_of(keys: Sequence[BlockKey]) -> list[Outcome]:
    return [block_of(key, BLOCK_BYTES) for key in keys]


def test_blocks_are_found_read_and_given_back() -> None:
    keys, strangers = random_keys(30), random_keys(3, seed=1)
    with exporter(30, BLOCK_BYTES) as worker, reader(worker.address) as mine:
        assert mine.tier.lookup(keys) == [None] * 30
        found = mine.tier.probe(keys[:20] + strangers + keys[20:])
        assert [stored is not None for stored in found] == [True] * 20 + [False] * 13
        assert worker.tell("pinned") == "20"
        assert mine.load(keys[:20]) == blocks_of(keys[:20])
        wait_for(lambda: worker.tell("pinned") == "0")
        assert mine.tier.lookup(keys) == [None] * 30
        assert None not in mine.tier.probe(keys), "and again"
        assert mine.load(keys) == blocks_of(keys)


def test_what_is_lent_is_not_overwritten() -> None:
    keys = random_keys(8)
    with exporter(8, BLOCK_BYTES) as worker, reader(worker.address) as mine:
        mine.tier.probe(keys)
        worker.tell("evict 8")
        worker.tell("overwrite")
        assert mine.load(keys) == blocks_of(keys)
        assert mine.tier.probe(keys) == [None] * 8


def test_a_reader_that_dies_pins_nothing_for_ever() -> None:
    keys = random_keys(8)
    with exporter(8, BLOCK_BYTES, lease_s=3.0) as worker, reader(worker.address) as mine:
        mine.tier.probe(keys)
        assert worker.tell("pinned") == "8"
        wait_for(lambda: worker.tell("pinned") == "0")


def test_what_was_overwritten_after_its_lease_is_noticed() -> None:
    keys = random_keys(8)
    with exporter(8, BLOCK_BYTES, lease_s=3.0) as worker, reader(worker.address) as mine:
        stored = [block for block in mine.tier.probe(keys) if block is not None]
        for block in stored:
            mine.tier.pin(block.slot)
        wait_for(lambda: worker.tell("pinned") == "0")
        worker.tell("evict 8")
        worker.tell("overwrite")
        assert mine.tier.lookup(keys) == [None] * 8, "a lease that is over is not begun to be read"
        mine.tier.lookup = lambda keys: list(stored)  # type: ignore[method-assign]
        assert mine.load(keys) == ["corrupt"] * 8


def test_two_peers_make_one_answer() -> None:
    keys = random_keys(6)
    with (
        exporter(6, BLOCK_BYTES) as first,
        exporter(3, BLOCK_BYTES) as second,
        reader(first.address, second.address) as mine,
    ):
        assert None not in mine.tier.probe(keys)
        assert first.tell("pinned") == "6"
        wait_for(lambda: second.tell("pinned") == "0")
        assert mine.load(keys) == blocks_of(keys)


def test_another_identity_is_never_lent() -> None:
    keys = random_keys(4)
    with exporter(4, BLOCK_BYTES) as worker, reader(worker.address, identity="cd" * 32) as mine:
        assert mine.tier.probe(keys) == [None] * 4
        assert worker.tell("pinned") == "0"


def test_a_killed_peer_costs_little_and_comes_back() -> None:
    keys = random_keys(4)
    with exporter(4, BLOCK_BYTES) as worker, exporter(4, BLOCK_BYTES) as other:
        addresses = [worker.address]
        with reader(timeout_s=0.3) as mine:
            mine.tier.use_peers(lambda: addresses)
            assert None not in mine.tier.probe(keys)
            worker.kill()
            assert mine.load(keys, timeout_s=5.0) == ["failed"] * 4
            for _ in range(2):
                assert mine.tier.probe(random_keys(4, seed=7)) == [None] * 4
            started = time.monotonic()
            assert mine.tier.probe(keys) == [None] * 4
            assert time.monotonic() - started < 0.1, "it is left alone after missed answers"
            addresses.append(other.address)
            assert None not in mine.tier.probe(keys)
            assert mine.load(keys) == blocks_of(keys)


def is_stopped(pid: int) -> bool:
    """Whether every thread of the process has stopped; a signal reaches them one by one."""
    states = [file.read_text() for file in Path(f"/proc/{pid}/task").glob("*/stat")]
    return all(state.rpartition(")")[2].split()[0] == "T" for state in states)


def test_a_peer_that_hangs_is_not_waited_for_and_recovers() -> None:
    keys = random_keys(4)
    with (
        exporter(4, BLOCK_BYTES, lease_s=4.0) as worker,
        reader(worker.address, timeout_s=0.3) as mine,
    ):
        assert None not in mine.tier.probe(keys[:1])
        mine.load(keys[:1])
        worker.process.send_signal(signal.SIGSTOP)
        wait_for(lambda: is_stopped(worker.process.pid))
        for _ in range(3):
            started = time.monotonic()
            assert mine.tier.probe(keys) == [None] * 4
            assert time.monotonic() - started < 1.0
        worker.process.send_signal(signal.SIGCONT)
        wait_for(lambda: None not in mine.tier.probe(keys))
        assert mine.load(keys) == blocks_of(keys)
        wait_for(lambda: worker.tell("pinned") == "0")


def test_a_busy_tier_thread_is_not_waited_for() -> None:
    keys = random_keys(4)
    with (
        exporter(4, BLOCK_BYTES, lease_s=4.0) as worker,
        reader(worker.address, timeout_s=0.3) as mine,
    ):
        worker.tell("busy 1")
        assert mine.tier.probe(keys) == [None] * 4
        wait_for(lambda: None not in mine.tier.probe(keys))


def test_a_damaged_block_is_not_asked_for_again_at_once() -> None:
    keys = random_keys(4)
    with exporter(4, BLOCK_BYTES) as worker, reader(worker.address) as mine:
        mine.tier.probe(keys)
        mine.tier.evict(keys[2:3])
        assert [block is not None for block in mine.tier.probe(keys)] == [True, True, False, True]
        mine.load(keys)
        assert [block is not None for block in mine.tier.probe(keys)] == [True, True, False, False]
        assert worker.process.poll() is None


def test_nothing_can_be_stored() -> None:
    with reader() as mine:
        assert mine.tier.reserve(random_keys(2)) == [None, None]
        assert mine.tier.probe(random_keys(2)) == [None, None]
        with pytest.raises(ValueError, match="read-only"):
            mine.tier.release([0])


def wait_for(condition: object, timeout_s: float = 15.0) -> None:
    assert callable(condition)
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "it did not happen in time"
        time.sleep(0.05)
