"""Random histories of the KV service on real tiers that fail, spoil bytes and end at any moment.

The rig compares every block that counts as loaded, and every device block must come back.
"""

from __future__ import annotations

import random
import shutil
import tempfile
from pathlib import Path
from typing import Any, Literal

import pytest
from attrs import evolve
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support.faults import FaultyIo, FaultyTier, IoFaults, TierFaults
from tests.support.kv_integrity import check_connector
from tests.support.kv_rig import BLOCK_BYTES, KvRig, chain, folder_setup, setups, wait_for

from commutator_engine_kit.kv.tiers.block_io import BlockIo
from commutator_engine_kit.kv.tiers.codecs import AesGcm, Codec, Lz4, Zstd
from commutator_engine_kit.kv.tiers.guards import Breaker
from commutator_engine_kit.kv.tiers.setup import TierSetup

pytestmark = pytest.mark.slow

SECRET = bytes(range(32))
CODECS = [(), (Zstd(),), (Lz4(),), (AesGcm(SECRET),), (Zstd(), AesGcm(SECRET))]
IN_MEMORY: list[dict[str, Any]] = [
    {"kind": "dram", "capacity": 24 * BLOCK_BYTES, "huge_pages": "off"},
    {"kind": "hbm", "capacity": 24 * BLOCK_BYTES},
]
Write = Literal["through", "on_evict"]
chance = st.sampled_from((0.0, 0.0, 0.1, 0.4))
io_faults = st.builds(
    IoFaults, fail=chance, short=chance, slow=chance, hang=st.sampled_from((0.0, 0.0, 0.0, 0.1))
)
tier_faults = st.builds(
    TierFaults,
    open=st.sampled_from((0.0, 0.1)),
    no_slot=chance,
    commit=chance,
    evict=chance,
    corrupt=chance,
    cut=chance,
)
chains = st.builds(chain, st.integers(0, 11), st.integers(1, 10))
operations = st.one_of(
    st.tuples(st.just("offer"), chains),
    st.tuples(st.just("offer"), chains),
    st.tuples(st.just("evicting"), chains),
    st.tuples(st.just("begin"), chains),
    st.tuples(st.just("begin"), chains),
    st.tuples(st.just("load"), chains),
    st.tuples(st.just("drop"), st.integers(0, 3)),
    st.tuples(st.just("evict"), chains),
    st.tuples(st.just("settle"), st.none()),
    st.tuples(st.just("restart"), st.none()),
)


class World:
    """Three tiers, of which the last two outlive a restart."""

    def __init__(
        self,
        folder: Path,
        in_memory: dict[str, Any],
        writes: tuple[Write, Write, Write],
        codecs: tuple[Codec, ...],
        faults: tuple[IoFaults, TierFaults],
        seed: int,
    ) -> None:
        self._folder, self._in_memory = folder, in_memory
        self._writes, self._codecs = writes, codecs
        self._io, self._tier = faults
        self._rng = random.Random(seed)
        self.faulty: list[FaultyTier | FaultyIo] = []
        self.rig = self._start()

    def _start(self) -> KvRig:
        first, second = setups(
            self._in_memory,
            {"kind": "nvme", "path": str(self._folder / "nvme"), "capacity": 64 * BLOCK_BYTES},
        )
        made = [
            first,
            evolve(second, codecs=self._codecs),
            folder_setup(self._folder / "files", 64),
        ]
        self.faulty = []
        return KvRig(
            [self._spoiled(setup, write) for setup, write in zip(made, self._writes, strict=True)]
        )

    def _spoiled(self, setup: TierSetup, write: Write) -> TierSetup:
        faulty = FaultyTier(setup.tier, self._tier, self._rng)
        self.faulty.append(faulty)
        return evolve(
            setup,
            tier=faulty,
            config=evolve(setup.config, write=write, load_timeout_s=0.1, store_timeout_s=0.1),
            breaker=Breaker(max_failures=2, pause_s=0.05, max_pause_s=0.05),
            wrap_io=self._spoiled_io,
        )

    def _spoiled_io(self, io: BlockIo) -> BlockIo:
        faulty = FaultyIo(io, self._io, self._rng)
        self.faulty.append(faulty)
        return faulty

    def run(self, operation: str, argument: Any) -> None:
        rig = self.rig
        rig.poll()
        match operation:
            case "offer" | "evicting" if len(rig.free) >= len(argument):
                rig.offload(argument, evicting=operation == "evicting")
            case "begin":
                rig.begin(argument)
            case "load":
                rig.load(argument)
            case "drop" if rig.loads:
                rig.cancel(list(rig.loads)[argument % len(rig.loads)])
            case "evict":
                rig.connector.stores.evict(argument)
            case "settle":
                rig.settle()
            case "restart":
                rig.close()
                rig.wait_for(lambda: not +rig.lent)
                self.rig = self._start()
        check_connector(self.rig.connector)

    def recover(self) -> None:
        """The faults end: the service must, too."""
        self._io = IoFaults()
        for one in self.faulty:
            if isinstance(one, FaultyIo):
                one.faults = IoFaults()
            else:
                one.faults = TierFaults()
        rig = self.rig
        rig.settle()
        assert len(rig.free) == 64, "device blocks are missing"
        wait_for(lambda: all(tier.up for tier in rig.connector.statistics().tiers), 60)
        rig.connector.stores.evict()
        rig.settle()
        rig.offload(chain(99, 8))
        rig.offload(chain(99, 8), evicting=True)
        rig.settle()
        assert rig.load(chain(99, 8)) == 8 or "through" not in self._writes
        rig.settle()


@settings(
    max_examples=16, deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
@given(
    writes=st.tuples(*[st.sampled_from(("through", "on_evict"))] * 3),
    in_memory=st.sampled_from(IN_MEMORY),
    codecs=st.sampled_from(CODECS),
    faults=st.tuples(io_faults, tier_faults),
    seed=st.integers(0, 1000),
    history=st.lists(operations, min_size=5, max_size=40),
)
def test_whatever_happens_no_wrong_block_is_loaded_and_none_is_lost(
    writes: tuple[Write, Write, Write],
    in_memory: dict[str, Any],
    codecs: tuple[Codec, ...],
    faults: tuple[IoFaults, TierFaults],
    seed: int,
    history: list[tuple[str, Any]],
) -> None:
    folder = Path(tempfile.mkdtemp(prefix="kv-service-"))
    world = World(folder, in_memory, writes, codecs, faults, seed)
    try:
        for operation, argument in history:
            world.run(operation, argument)
        world.recover()
    finally:
        world.rig.close()
        shutil.rmtree(folder)
