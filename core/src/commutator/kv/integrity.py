"""Whether the manager's books balance: for tests, and for whoever suspects them."""

from __future__ import annotations

from collections import Counter

from commutator.kv.actions import DEVICE
from commutator.kv.index import BlockIndex
from commutator.kv.keys import BlockKey
from commutator.kv.loads import LoadSide
from commutator.kv.stores import StoreSide
from commutator.kv.tier_book import TierBook

__all__ = ["check_integrity"]


def check_integrity(index: BlockIndex, stores: StoreSide, loads: LoadSide) -> None:
    """Raise AssertionError when something does not add up. Linear in the number of blocks."""
    for key, node in index.nodes.items():
        assert node.offer.key == key, "a node stands under another key"
        assert node.published | node.staged | node.evicting, "a node lies nowhere"
        overlap = node.published & node.staged | node.staged & node.evicting
        assert not overlap | node.published & node.evicting, "a block is in two states in one tier"
    for book in index.books:
        _check_tier(book, index, stores, loads)
    reads = Counter(
        offer.key
        for move in stores.moves.values()
        if move.source == DEVICE
        for offer in move.offers
    )
    for book in index.books:
        reads.update(key for key, waiting in book.waiting.items() if waiting.source == DEVICE)
    assert stores.holds.reads() == reads, "a device block is held for a store that is not there"


def _check_tier(book: TierBook, index: BlockIndex, stores: StoreSide, loads: LoadSide) -> None:
    name = book.spec.name
    nodes = index.nodes.values()
    published = sum(bool(node.published & book.bit) for node in nodes)
    staged = {node.offer.key for node in nodes if node.staged & book.bit}
    evicting = {node.offer.key for node in nodes if node.evicting & book.bit}
    assert published == book.published, f"{name}: published blocks are miscounted"
    assert len(staged) == book.staged, f"{name}: staged blocks are miscounted"
    assert evicting == book.leaving.keys(), f"{name}: leaving blocks are miscounted"
    assert book.used <= book.capacity, f"{name}: more blocks than there is room for"
    moving = {
        offer.key
        for move in stores.moves.values()
        if move.target == book.number
        for offer in move.offers
    }
    assert staged == moving, f"{name}: a block is staged that nobody stores"
    assert book.doomed <= staged, f"{name}: a block is doomed that is not staged"
    assert book.coming.keys() == staged, f"{name}: what is asked for a staged block is not known"
    for key in book.waiting:
        assert key not in staged, f"{name}: a block waits that is being stored"
    assert book.up or not book.waiting, f"{name}: a block waits for a tier that is down"
    down = _read_by_moves(book, index, stores)
    assert book.moving_down <= set(down), f"{name}: a block moves down that nobody stores"
    assert book.prefetched <= {
        key for key, node in index.nodes.items() if node.published & book.bit
    }, f"{name}: a block was prefetched that is not there"
    pins = Counter(down)
    for load in loads.running.values():
        pins.update(key for key, tier in load.blocks if tier == book.number)
    assert dict(pins) == book.pins, f"{name}: pins do not match loads and moves"
    assert evicting <= set(book.pins), f"{name}: a block leaves that nobody reads"


def _read_by_moves(book: TierBook, index: BlockIndex, stores: StoreSide) -> list[BlockKey]:
    keys = [
        offer.key
        for move in stores.moves.values()
        if move.source == book.number
        for offer in move.offers
    ]
    for lower in index.books:
        keys += [key for key, wait in lower.waiting.items() if wait.source == book.number]
    return keys
