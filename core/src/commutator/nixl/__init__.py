"""Moves KV bytes with NIXL. No other package calls NIXL."""

from __future__ import annotations

from commutator.contract.tier import Direction
from commutator.nixl.agent import TransferAgent
from commutator.nixl.library import load_nixl

__all__ = ["Direction", "TransferAgent", "load_nixl"]
