"""Eviction policies for KV tiers: `lru`, `tinylfu`, `s3fifo`, `arc` and `leaf_first`."""

from __future__ import annotations

from typing import Annotated

from attrs import frozen

from commutator import Bounds, EvictionConfig, EvictionPolicy, EvictionRegister, hookimpl, setting
from commutator_eviction.arc import Arc
from commutator_eviction.leaf_first import LeafFirst
from commutator_eviction.lru import Lru
from commutator_eviction.s3fifo import S3Fifo
from commutator_eviction.tinylfu import TinyLfu

__all__ = ["Arc", "LeafFirst", "Lru", "S3Fifo", "S3FifoConfig", "TinyLfu", "TinyLfuConfig"]

Part = Annotated[float, Bounds(above=0, maximum=0.9)]


@frozen(kw_only=True)
class S3FifoConfig(EvictionConfig):
    """Options of `s3fifo`."""

    small: Part = setting("Share of the tier for the queue of new blocks.", 0.1)


@frozen(kw_only=True)
class TinyLfuConfig(EvictionConfig):
    """Options of `tinylfu`."""

    window: Part = setting("Share of the tier for new blocks.", 0.01)


def _s3fifo(config: S3FifoConfig, capacity_blocks: int) -> EvictionPolicy:
    return S3Fifo(capacity_blocks, config.small)


def _tinylfu(config: TinyLfuConfig, capacity_blocks: int) -> EvictionPolicy:
    return TinyLfu(capacity_blocks, config.window)


@hookimpl
def eviction_register(register: EvictionRegister) -> None:
    register("lru", EvictionConfig, lambda _config, _blocks: Lru(), stability="beta")
    register("tinylfu", TinyLfuConfig, _tinylfu, stability="beta")
    register("s3fifo", S3FifoConfig, _s3fifo, stability="beta")
    register("arc", EvictionConfig, lambda _config, blocks: Arc(blocks), stability="beta")
    register("leaf_first", EvictionConfig, lambda _config, _blocks: LeafFirst(), stability="beta")
