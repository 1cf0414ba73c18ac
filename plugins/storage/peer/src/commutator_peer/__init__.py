"""Other workers' host memory as a read-only storage tier, read with UCX."""

from __future__ import annotations

from commutator import TierRegister, hookimpl
from commutator_peer.config import PeerTierConfig
from commutator_peer.tier import PeerTier

__all__ = ["PeerTier", "PeerTierConfig"]


@hookimpl
def tier_register(register: TierRegister) -> None:
    register("peer", PeerTierConfig, PeerTier, stability="beta")
