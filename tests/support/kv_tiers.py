"""Entries of `tiers` for tests, and tiers that fail on purpose."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from attrs import evolve
from tests.support.faults import FaultyIo, FaultyTier, IoFaults, TierFaults
from tests.support.kv_rig import BLOCK_BYTES

from commutator_engine_kit.kv.tiers.setup import TierSetup

__all__ = ["DRAM", "ON_EVICT", "faults_of", "faulty", "hanging", "nvme"]

DRAM: dict[str, Any] = {"kind": "dram", "capacity": "1MB", "huge_pages": "off"}
ON_EVICT: dict[str, Any] = {"write": "on_evict"}


def nvme(folder: Path, blocks: int = 128, /, **options: Any) -> dict[str, Any]:
    size = blocks * BLOCK_BYTES
    return {"kind": "nvme", "path": str(folder), "capacity": size, **options}


def hanging(setup: TierSetup, **options: Any) -> TierSetup:
    faults = IoFaults(hang=1.0)
    return evolve(setup, wrap_io=lambda io: FaultyIo(io, faults, random.Random(0)), **options)


def faulty(setup: TierSetup, faults: TierFaults, **options: Any) -> TierSetup:
    tier = FaultyTier(setup.tier, faults, random.Random(0))
    return evolve(setup, tier=tier, **options)


def faults_of(setup: TierSetup, **faults: float) -> None:
    assert isinstance(setup.tier, FaultyTier)
    setup.tier.faults = TierFaults(**faults)
