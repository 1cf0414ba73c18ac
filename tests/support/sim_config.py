"""The options of a `sim` entry for tests that count in the model's nanoseconds."""

from __future__ import annotations

from typing import Any, cast

from commutator_sim.config import SimConfig, SimTier

TOKEN_BYTES = 131_072


def sim_config(**options: Any) -> SimConfig:
    """As of a configuration, but checked by nothing."""
    return SimConfig(kind="sim", **options)


def bandwidth(block_ns: int, block_size: int = 16) -> float:
    """In bytes per second, of a link that a block occupies for this time."""
    return block_size * TOKEN_BYTES * 1e9 / block_ns


def sim_tier(
    kind: str,
    capacity_blocks: int,
    block_ns: int,
    *,
    block_size: int = 16,
    latency_ns: int = 0,
    **policy: Any,
) -> SimTier:
    return SimTier(
        kind=cast("Any", kind),
        capacity_blocks=capacity_blocks,
        bandwidth_bytes_per_s=bandwidth(block_ns, block_size),
        latency_s=latency_ns / 1e9,
        **policy,
    )
