"""Moves KV bytes with NIXL. No other package calls NIXL."""

from __future__ import annotations

from commutator_engine_kit.nixl.agent import TransferAgent
from commutator_engine_kit.nixl.library import load_nixl

__all__ = ["TransferAgent", "load_nixl"]
