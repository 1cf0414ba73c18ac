"""Who lends blocks keeps no leases but for those that it lends, and those not for ever."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
from tests.support.exporter import plain_geometry, store
from tests.support.kv_rig import wait_for

from commutator.contract.tier import ExportOptions
from commutator.errors import EngineHandoverError
from commutator_dram.tier import DramConfig, DramTier
from commutator_engine_kit.kv.lending import TierExporter
from commutator_engine_kit.kv.transfer.event_loop import EventLoopThread
from commutator_engine_kit.kv.transfer.protocol import LentBlocks, LookupRequest, ReleaseRequest
from commutator_engine_kit.kv.transfer.sources import Sources

BLOCK_BYTES = 4096
KEYS = [bytes([number]) * 32 for number in range(4)]
GEOMETRY = plain_geometry(BLOCK_BYTES)


class Reader:
    def __init__(self, address: str) -> None:
        self._loop = EventLoopThread("reader")
        self._sources = Sources()
        self._address = address

    def ask(self, lease_id: str, identity: str = GEOMETRY.identity) -> LentBlocks:
        request = LookupRequest(lease_id, identity, BLOCK_BYTES, tuple(KEYS))
        asking = self._sources.ask(self._address, "look_up", request, LentBlocks, timeout_s=10.0)
        return self._loop.run(asking)

    def release(self, lease_id: str, *blocks: int) -> None:
        request = ReleaseRequest(lease_id, blocks or None)
        asking = self._sources.ask(self._address, "release", request, type(None), timeout_s=10.0)
        self._loop.run(asking)

    def close(self) -> None:
        self._loop.run(self._sources.close())
        self._loop.close()


@contextmanager
def lent() -> Iterator[tuple[TierExporter, DramTier, Reader]]:
    tier = DramTier(DramConfig(kind="dram", capacity=16 * BLOCK_BYTES, huge_pages="off"))
    tier.open(GEOMETRY)
    store(tier, KEYS, [bytes(BLOCK_BYTES)] * len(KEYS))
    with ThreadPoolExecutor(1) as thread:
        export = TierExporter(
            tier,
            GEOMETRY,
            agent_name="lender",
            metadata=lambda: b"metadata",
            on_tier=thread.submit,
            options=ExportOptions(lease_s=0.5),
        )
        reader = Reader(export.start())
        try:
            yield export, tier, reader
        finally:
            reader.close()
            export.close()
            assert tier.statistics().pinned == 0
    tier.close()


def test_a_reader_that_gets_no_block_gets_no_lease() -> None:
    with lent() as (export, _, reader):
        for number in range(20):
            assert reader.ask(f"{number}", identity="another").blocks == ()
        assert export.statistics().active == 0


def test_leases_end_whether_their_blocks_came_back_or_not() -> None:
    with lent() as (export, tier, reader):
        blocks = reader.ask("first").blocks
        assert [block.key for block in blocks] == KEYS
        assert tier.statistics().pinned == len(KEYS)
        reader.release("first", blocks[0].index)
        wait_for(lambda: tier.statistics().pinned == len(KEYS) - 1)
        assert export.statistics().active == 1
        reader.release("first", *(block.index for block in blocks))
        wait_for(lambda: tier.statistics().pinned == 0)
        assert export.statistics().released == 1
        assert len(reader.ask("second").blocks) == len(KEYS)
        wait_for(lambda: export.statistics().lapsed == 1)
        wait_for(lambda: tier.statistics().pinned == 0)


def test_a_look_up_that_was_released_already_lends_nothing() -> None:
    """The reader has given up; an answer would pin blocks that are never read."""
    with lent() as (export, tier, reader):
        reader.release("late")
        with pytest.raises(EngineHandoverError, match="released already"):
            reader.ask("late")
        assert tier.statistics().pinned == 0
        assert export.statistics().active == 0


def test_blocks_are_released_while_the_exporter_ends() -> None:
    with lent() as (_, tier, reader):
        reader.ask("never released")
        assert tier.statistics().pinned == len(KEYS)
