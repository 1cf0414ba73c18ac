"""A rank's blocks as plain lists and numbers, for MessagePack."""

from __future__ import annotations

from typing import Any

from commutator.kv.medium import Tier
from commutator.routing.orphans import BlockKey
from commutator.routing.rank_blocks import RankBlocks

__all__ = ["IndexSnapshot", "rank_from_snapshot", "rank_to_snapshot"]

IndexSnapshot = dict[str, Any]


def rank_to_snapshot(blocks: RankBlocks) -> dict[str, Any]:
    return {
        "engine_block_size": blocks.engine_block_size,
        "group": blocks.group,
        "tiers": [[[_to_plain(key) for key in held], list(held.values())] for held in blocks.held],
        "orphans": [
            [_to_plain(key), _to_plain(orphan.parent), orphan.local_hash, sorted(orphan.tiers)]
            for key, orphan in blocks.orphans
        ],
    }


def rank_from_snapshot(blocks: RankBlocks, state: dict[str, Any]) -> None:
    """Fill empty ``blocks``."""
    blocks.engine_block_size = state["engine_block_size"]
    blocks.group = state["group"]
    for tier in Tier:
        keys, hashes = state["tiers"][tier]
        blocks.hold(tier, [_from_plain(key) for key in keys], hashes)
    for key, parent, local_hash, tiers in state["orphans"]:
        for tier in tiers:
            blocks.orphans.add(_from_plain(key), _from_plain(parent), local_hash, Tier(tier))


def _to_plain(key: BlockKey) -> Any:
    return list(key) if isinstance(key, tuple) else key


def _from_plain(key: Any) -> BlockKey:
    return tuple(key) if isinstance(key, list) else key
