"""Explains which blocks of a prompt would be reused, from which tier, and why others not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from commutator.contract.block import BlockKey
from commutator.contract.worker import BlockExplanation, HeldBlock
from commutator_engine_kit.kv.block_manager.block_pool import TierBlockPool
from commutator_engine_kit.kv.block_manager.index import BlockIndex

__all__ = ["explain"]


def explain(
    index: BlockIndex, keys: Sequence[BlockKey], first: int, now_s: float
) -> list[BlockExplanation]:
    """One explanation for each key. The device has the first ``first`` blocks."""
    answers: list[BlockExplanation] = []
    broken = False
    for position, key in enumerate(keys):
        held = tuple(_held(index, key, now_s))
        node = index.nodes.get(key)
        tiers = node.published & index.up if node is not None else 0
        tier = (tiers & -tiers).bit_length() - 1 if tiers else None
        if position < first:
            reusable, tier, reason = True, None, "on the device"
        elif broken:
            reusable, reason = False, "a block before it is missing"
        elif tier is not None:
            reusable, reason = True, f"in {index.pools[tier].spec.name}"
        else:
            reusable, broken = False, True
            reason = _missing(index, key, held)
        answers.append(
            BlockExplanation(
                key=key.hex(),
                held=held,
                reusable=reusable,
                tier=None if tier is None or not reusable else index.pools[tier].spec.name,
                reason=reason,
            )
        )
    return answers


def _held(index: BlockIndex, key: BlockKey, now_s: float) -> list[HeldBlock]:
    node = index.nodes.get(key)
    if node is None:
        return []
    held: list[HeldBlock] = []
    for pool in index.pools:
        if node.published & pool.bit:
            held.append(_copy(pool, "published", _note(pool, key, now_s)))
        elif node.staged & pool.bit:
            held.append(_copy(pool, "being stored"))
        elif node.evicting & pool.bit:
            held.append(_copy(pool, "leaving"))
    return held


def _copy(
    pool: TierBlockPool, state: Literal["published", "being stored", "leaving"], note: str = ""
) -> HeldBlock:
    return HeldBlock(name=pool.spec.name, state=state, note=note)


def _note(pool: TierBlockPool, key: BlockKey, now_s: float) -> str:
    notes = [] if pool.up else ["tier is down"]
    notes += ["moving down"] if key in pool.moving_down else []
    if (retained := pool.retention.note(key, now_s)) is not None:
        notes.append(retained)
    return ", ".join(notes)


def _missing(index: BlockIndex, key: BlockKey, held: Sequence[HeldBlock]) -> str:
    if held:
        return ", ".join(
            f"{copy.name}: {copy.note if copy.state == 'published' else copy.state}"
            for copy in held
        )
    waiting = [pool.spec.name for pool in index.pools if key in pool.waiting]
    if waiting:
        return f"waiting for room in {waiting[0]}"
    return index.fates.of(key) or "never offered"
