"""The tier: asks the peers for a chain of blocks, and says where in whose memory they lie."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby

import zmq

from commutator.errors import TierError
from commutator.kv import (
    BlockKey,
    Breaker,
    ExportOptions,
    Peer,
    PeerAnswer,
    PeerAsk,
    Slot,
    SlotGeometry,
    StorageTier,
    Stored,
    TierStatistics,
)
from commutator.transfer import Memory, Region, Span
from commutator_peer.config import PeerTierConfig
from commutator_peer.lent import Lent, LentBlocks, longest_first
from commutator_peer.peer_link import PeerLink

__all__ = ["PeerTier"]

_SHUNNED_S = 60.0
"""A block that was evicted here is not asked for again for so long: it may be damaged there."""


class PeerTier(StorageTier):
    """Other workers' host memory, for reading only: ``reserve`` never gives a slot.

    Workers lend blocks for a while. ``probe`` asks all peers that are not left alone, waits for
    ``ask_timeout_s`` at most, and never raises; blocks that were found are known to ``lookup``
    until they were read once, or their lease is half over. A block must be pinned to be read: it
    is given back with the last ``unpin``. A peer that dies costs a few missed answers, and a reader
    some failed reads; nothing needs to be opened again.
    """

    medium = "REMOTE"
    memory = Memory.DRAM
    backend = "UCX"
    shared = True
    writable = False
    asks_peers = True

    def __init__(self, config: PeerTierConfig) -> None:
        self._config = config
        self._find: Callable[[], Sequence[str]] = tuple
        self._geometry: SlotGeometry | None = None
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._links: dict[str, PeerLink] = {}
        self._lent = LentBlocks()
        self._shunned: dict[BlockKey, float] = {}
        self._asked = 0

    def use_peers(self, find: Callable[[], Sequence[str]]) -> None:
        self._find = find

    @property
    def export_options(self) -> ExportOptions | None:
        config = self._config
        if config.listen is None:
            return None
        return ExportOptions(
            listen=config.listen,
            advertise=config.advertise,
            lease_s=config.lease_s,
            max_leased_blocks=config.max_lent_blocks,
        )

    @property
    def backend_parameters(self) -> Mapping[str, str]:
        return {}

    def open(self, geometry: SlotGeometry) -> Sequence[Stored]:
        if self._context is not None:
            raise TierError("peer: the tier is open already; close it first")
        self._geometry, self._context = geometry, zmq.Context()
        return ()

    def close(self) -> None:
        context, self._context = self._context, None
        if context is None:
            return
        self._give_back(self._lent.clear())
        for link in self._links.values():
            link.close()
        self._links.clear()
        self._shunned.clear()
        context.destroy()

    def regions(self) -> Sequence[Region]:
        return ()

    def reserve(self, keys: Sequence[BlockKey]) -> list[Slot | None]:
        return [None] * len(keys)

    def commit(self, blocks: Iterable[Stored]) -> None:
        for block in blocks:
            raise ValueError(f"slot {block.slot} is not reserved: peers are only read from")

    def release(self, slots: Iterable[Slot]) -> None:
        for slot in slots:
            raise ValueError(f"slot {slot} is not reserved: peers are only read from")

    def lookup(self, keys: Sequence[BlockKey]) -> list[Stored | None]:
        self._opened()
        now_s = time.monotonic()
        return [self._lent.lookup(key, now_s) for key in keys]

    def probe(self, keys: Sequence[BlockKey]) -> list[Stored | None]:
        geometry, _ = self._opened()
        now_s = time.monotonic()
        self._lent.expire(now_s)
        unknown = [key for key in keys if self._lent.lookup(key, now_s) is None]
        unknown = list(self._before_shunned(dict.fromkeys(unknown), now_s))
        if unknown:
            for address, answer in longest_first(self._ask(geometry, unknown, now_s)):
                self._take(unknown, address, answer, now_s + answer.lease_s / 2)
        return self.lookup(keys)

    def place(self, slot: Slot, size_bytes: int) -> tuple[Span, Region | None]:
        span = self._lent.lent(slot).span
        return Span(span.address, size_bytes, span.device), None

    def peer(self, slot: Slot) -> Peer | None:
        return self._lent.lent(slot).peer

    def pin(self, slot: Slot) -> None:
        self._lent.pin(slot)

    def unpin(self, slot: Slot) -> None:
        if (lent := self._lent.unpin(slot)) is not None:
            self._give_back([lent])

    def evict(self, keys: Iterable[BlockKey]) -> None:
        now_s = time.monotonic()
        keys = list(keys)
        for key in keys:
            if self._lent.lookup(key, now_s) is not None:
                self._shunned[key] = now_s + _SHUNNED_S
        self.make_room(keys)

    def make_room(self, keys: Iterable[BlockKey]) -> None:
        self._give_back([lent for key in keys if (lent := self._lent.forget(key)) is not None])

    def committed(self) -> Iterable[Stored]:
        return self._lent.all(time.monotonic())

    def statistics(self) -> TierStatistics:
        self._opened()
        return self._lent.statistics(time.monotonic())

    def _opened(self) -> tuple[SlotGeometry, zmq.Context[zmq.Socket[bytes]]]:
        if self._geometry is None or self._context is None:
            raise TierError("peer: the tier is not open; call open() first")
        return self._geometry, self._context

    def _before_shunned(self, keys: Iterable[BlockKey], now_s: float) -> Iterator[BlockKey]:
        """The chain up to a block that is not to be asked for."""
        self._shunned = {key: end_s for key, end_s in self._shunned.items() if end_s > now_s}
        for key in keys:
            if key in self._shunned:
                return
            yield key

    def _ask(
        self, geometry: SlotGeometry, keys: list[BlockKey], now_s: float
    ) -> list[tuple[str, PeerAnswer]]:
        """The answers of all peers that answer in time."""
        self._asked += 1
        question = PeerAsk(
            number=self._asked,
            identity=geometry.identity,
            slot_bytes=geometry.slot_bytes,
            keys=keys,
        )
        poller = zmq.Poller()
        waiting: dict[zmq.Socket[bytes], PeerLink] = {}
        for link in self._peers():
            link.receive()  # late answers of the last time
            if link.breaker.allows(now_s):
                link.ask(question)
                poller.register(link.socket, zmq.POLLIN)
                waiting[link.socket] = link
        answers: list[tuple[str, PeerAnswer]] = []
        deadline_s = now_s + self._config.ask_timeout_s
        while waiting and (left_s := deadline_s - time.monotonic()) > 0:
            for socket, _ in poller.poll(int(left_s * 1000) + 1):
                link = waiting[socket]
                if (answer := link.receive()) is not None:
                    answers.append((link.address, answer))
                    del waiting[socket]
                    poller.unregister(socket)
        for link in waiting.values():
            link.missed(time.monotonic())
        return answers

    def _peers(self) -> Iterable[PeerLink]:
        """A link for each address that is known now; others are closed."""
        _, context = self._opened()
        addresses = {*self._config.peers, *self._find()}
        for address in self._links.keys() - addresses:
            self._links.pop(address).close()
        for address in addresses - self._links.keys():
            breaker = Breaker(max_failures=self._config.max_silences)
            self._links[address] = PeerLink(context, address, breaker)
        return list(self._links.values())

    def _take(
        self, asked: Sequence[BlockKey], address: str, answer: PeerAnswer, ends_s: float
    ) -> None:
        """Keep what nobody lent us yet and what fits, and give the rest back at once."""
        geometry, _ = self._opened()
        now_s = time.monotonic()
        spare: list[int] = []
        for index, (key, block) in enumerate(zip(asked, answer.blocks, strict=False)):
            known = self._lent.lookup(key, now_s) is not None
            if known or not 0 < block.size_bytes <= geometry.slot_bytes:
                spare.append(block.slot)
            else:
                self._lent.add(key, answer, index, address, ends_s)
        self._links[address].release(answer.lease, spare)

    def _give_back(self, lent: Sequence[Lent]) -> None:
        def lender(one: Lent) -> tuple[str, int]:
            return one.address, one.lease

        for (address, lease), group in groupby(sorted(lent, key=lender), lender):
            if (link := self._links.get(address)) is not None:
                link.release(lease, [one.peer_slot for one in group])
