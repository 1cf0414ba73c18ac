"""Which blocks of a prompt would be reused, from where, and why not the others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from attrs import frozen

from commutator.kv.index import BlockIndex
from commutator.kv.keys import BlockKey
from commutator.kv.tier_book import TierBook

__all__ = ["BlockWhy", "HeldIn", "explain"]


@frozen(kw_only=True)
class HeldIn:
    """One copy of a block."""

    tier: int
    name: str
    state: Literal["published", "being stored", "leaving"]
    note: str = ""
    """Such as "tier is down" or "pinned for 20 s"."""


@frozen(kw_only=True)
class BlockWhy:
    """One block of the prompt."""

    key: BlockKey
    held: tuple[HeldIn, ...]
    reusable: bool
    tier: int | None
    """Where it would be loaded from."""
    reason: str
    """Why it is not reusable, or from where it is."""


def explain(
    index: BlockIndex, keys: Sequence[BlockKey], first: int, now_s: float
) -> list[BlockWhy]:
    """One answer for each key; the first ``first`` ones are on the device already."""
    answers: list[BlockWhy] = []
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
            reusable, reason = True, f"in {index.books[tier].spec.name}"
        else:
            reusable, broken = False, True
            reason = _missing(index, key, held)
        answers.append(
            BlockWhy(
                key=key,
                held=held,
                reusable=reusable,
                tier=tier if reusable else None,
                reason=reason,
            )
        )
    return answers


def _held(index: BlockIndex, key: BlockKey, now_s: float) -> list[HeldIn]:
    node = index.nodes.get(key)
    if node is None:
        return []
    held: list[HeldIn] = []
    for book in index.books:
        if node.published & book.bit:
            held.append(_copy(book, "published", _note(book, key, now_s)))
        elif node.staged & book.bit:
            held.append(_copy(book, "being stored"))
        elif node.evicting & book.bit:
            held.append(_copy(book, "leaving"))
    return held


def _copy(
    book: TierBook, state: Literal["published", "being stored", "leaving"], note: str = ""
) -> HeldIn:
    return HeldIn(tier=book.number, name=book.spec.name, state=state, note=note)


def _note(book: TierBook, key: BlockKey, now_s: float) -> str:
    notes = [] if book.up else ["tier is down"]
    notes += ["moving down"] if key in book.moving_down else []
    if (kept := book.retention.reason_kept(key, now_s)) is not None:
        notes.append(kept)
    return ", ".join(notes)


def _missing(index: BlockIndex, key: BlockKey, held: Sequence[HeldIn]) -> str:
    if held:
        return ", ".join(
            f"{copy.name}: {copy.note if copy.state == 'published' else copy.state}"
            for copy in held
        )
    waiting = [book.spec.name for book in index.books if key in book.waiting]
    if waiting:
        return f"waiting for room in {waiting[0]}"
    return index.fates.of(key) or "never offered"
