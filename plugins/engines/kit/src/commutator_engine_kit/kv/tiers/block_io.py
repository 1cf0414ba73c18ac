"""The I/O of one tier: its interface, which guards implement by wrapping, and what moves the bytes.

Blocks move directly, or through staging memory to frame, encode or reach a GPU. All implementations
run on the tier's own thread.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TypeVar

from attrs import frozen

from commutator.contract.block import BlockDescriptor, BlockKey
from commutator.contract.tier import Direction, Memory, Slot, Span, StoredBlock
from commutator_engine_kit.kv.arena import BlockArena, bytes_at, checksum
from commutator_engine_kit.kv.block_manager.actions import LoadResult
from commutator_engine_kit.kv.tiers.codecs import (
    HEADER_BYTES,
    Codec,
    FrameError,
    FrameHeader,
    chain_name,
    decode,
    encode,
    frame_tags,
)
from commutator_engine_kit.kv.tiers.keys import CodecError
from commutator_engine_kit.kv.tiers.mover import IoContext, LocalMover, TierMover


@frozen(kw_only=True)
class StoreBlock:
    """A block to write into a reserved slot."""

    offer: BlockDescriptor
    slot: Slot
    local: Span
    """Where its bytes are. They do not change during the store."""

    @property
    def key(self) -> BlockKey:
        return self.offer.key

    def stored(self, size_bytes: int, checksum: int) -> StoredBlock:
        """The record to commit once the slot has ``size_bytes`` bytes."""
        offer = self.offer
        return StoredBlock(
            key=offer.key,
            slot=self.slot,
            size_bytes=size_bytes,
            checksum=checksum,
            parent=offer.parent,
            token_ids=offer.token_ids,
            adapter=offer.adapter,
            tenant=offer.facts.tenant,
        )


@frozen(kw_only=True)
class LoadBlock:
    """A committed, pinned block to read."""

    stored: StoredBlock
    local: Span
    """Where its bytes go. They are not read before the block is ``LOADED``."""

    @property
    def slot(self) -> Slot:
        return self.stored.slot


@frozen
class Unstored:
    """A block that was not written, with the reason."""

    reason: str


StoreResult = StoredBlock | Unstored
"""A ``StoredBlock`` is ready to be committed."""

BlockT = TypeVar("BlockT", StoreBlock, LoadBlock)
ResultT = TypeVar("ResultT")


class BlockIo(ABC):
    """Stores and loads blocks. Each block has its own result, independent of the others."""

    @abstractmethod
    def store(self, blocks: Sequence[StoreBlock], context: IoContext) -> list[StoreResult]:
        """Write each block."""

    @abstractmethod
    def load(self, blocks: Sequence[LoadBlock], context: IoContext) -> list[LoadResult]:
        """Read each block and verify it."""


PAGE_BYTES = 4096
STAGING_BLOCKS = 32
"""Blocks in the staging memory of a tier, and of all tiers together for moves between them."""
_NO_SCRATCH = "all staging memory is held by transfers that do not end"


class Staging:
    """A fixed number of slots of DRAM for blocks in transit.

    Thread-safe. Methods never wait: a thread that waited for a slot might hold the last one. A slot
    that NIXL may still write to must not be given back.
    """

    def __init__(self, slot_bytes: int, count: int) -> None:
        self._memory = mmap.mmap(-1, slot_bytes * count)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self.arena = BlockArena(
            memory=Memory.DRAM, address=address, block_bytes=slot_bytes, count=count
        )
        self._free = list(range(count))
        self._waiting: list[Callable[[], None]] = []
        self._lock = threading.Lock()

    def take(self, wanted: int) -> list[int]:
        """Up to ``wanted`` slots, as many as are free, to be given back."""
        with self._lock:
            taken = self._free[:wanted]
            del self._free[:wanted]
        return taken

    def take_later(self, call: Callable[[], None]) -> None:
        """Call once as soon as a slot is free: now, or on the thread that gives one back."""
        with self._lock:
            if not self._free:
                self._waiting.append(call)
                return
        call()

    def give_back(self, slots: Iterable[int]) -> None:
        """Free slots that no transfer touches."""
        with self._lock:
            self._free.extend(slots)
            waiting, self._waiting = (self._waiting, []) if self._free else ([], self._waiting)
        for call in waiting:
            call()


class StagedIo(BlockIo):
    """Moves blocks through ``staging``, in batches of as many blocks as it has free slots.

    ``framed``: stored bytes begin with a header that identifies them. Needed where the tier does
    not remember their checksums, and with codecs.
    """

    def __init__(
        self,
        mover: TierMover,
        local: LocalMover,
        staging: Staging,
        *,
        framed: bool,
        codecs: Sequence[Codec] = (),
    ) -> None:
        if codecs and not framed:
            raise ValueError("encoded blocks need a header")
        self._mover = mover
        self._local = local
        self._staging = staging
        self._codecs = codecs
        self._codec_name = chain_name(codecs)
        self._header_bytes = HEADER_BYTES if framed else 0

    def store(self, blocks: Sequence[StoreBlock], context: IoContext) -> list[StoreResult]:
        return self._in_batches(self._store, blocks, context, Unstored(_NO_SCRATCH))

    def load(self, blocks: Sequence[LoadBlock], context: IoContext) -> list[LoadResult]:
        return self._in_batches(self._load, blocks, context, LoadResult.FAILED)

    def _in_batches(
        self,
        move: Callable[[Sequence[BlockT], list[int], IoContext], list[ResultT]],
        blocks: Sequence[BlockT],
        context: IoContext,
        without_slot: ResultT,
    ) -> list[ResultT]:
        results: list[ResultT] = []
        while len(results) < len(blocks):
            slots = self._staging.take(len(blocks) - len(results))
            if not slots:
                return results + [without_slot] * (len(blocks) - len(results))
            batch = blocks[len(results) : len(results) + len(slots)]
            try:
                results += move(batch, slots, context)
            finally:
                self._give_back(slots, [block.slot for block in batch])
        return results

    def _store(
        self, blocks: Sequence[StoreBlock], slots: list[int], context: IoContext
    ) -> list[StoreResult]:
        spans = [self._scratch(slot) for slot in slots]
        pulls = [
            (block.local, _part(span, self._header_bytes, block.local.size_bytes))
            for block, span in zip(blocks, spans, strict=True)
        ]
        problems = self._local.pull(pulls)
        results: list[StoreResult] = [Unstored("")] * len(blocks)
        ready: list[int] = []
        for index, (block, problem) in enumerate(zip(blocks, problems, strict=True)):
            made = Unstored(str(problem)) if problem else self._encode(block, spans[index])
            results[index] = made
            if isinstance(made, StoredBlock):
                ready.append(index)
        writes = [
            (spans[i], blocks[i].slot, stored.size_bytes)
            for i in ready
            if isinstance(stored := results[i], StoredBlock)
        ]
        errors = self._mover.move(Direction.WRITE, writes, context)
        for index, error in zip(ready, errors, strict=True):
            if error is not None:
                results[index] = Unstored(str(error))
        return results

    def _load(
        self, blocks: Sequence[LoadBlock], slots: list[int], context: IoContext
    ) -> list[LoadResult]:
        spans = [self._scratch(slot) for slot in slots]
        results = [LoadResult.FAILED] * len(blocks)
        fitting = []
        for index, (block, span) in enumerate(zip(blocks, spans, strict=True)):
            if block.stored.size_bytes <= span.size_bytes:
                fitting.append(index)
            else:
                results[index] = LoadResult.CORRUPT
        reads = [(spans[i], blocks[i].stored.slot, blocks[i].stored.size_bytes) for i in fitting]
        errors = self._mover.move(Direction.READ, reads, context)
        sound: list[int] = []
        for index, error in zip(fitting, errors, strict=True):
            if error is None:
                results[index] = self._decode(blocks[index], spans[index])
                if results[index] is LoadResult.LOADED:
                    sound.append(index)
        pushes = [
            (blocks[i].local, _part(spans[i], self._header_bytes, blocks[i].local.size_bytes))
            for i in sound
        ]
        for index, problem in zip(sound, self._local.push(pushes), strict=True):
            results[index] = LoadResult.FAILED if problem else LoadResult.LOADED
        return results

    def _encode(self, block: StoreBlock, span: Span) -> StoredBlock | Unstored:
        """Write the bytes to store to the start of ``span``, which contains the block."""
        whole = bytes_at(span)
        plain = whole[self._header_bytes : self._header_bytes + block.local.size_bytes]
        payload = encode(self._codecs, plain, block.key) if self._codecs else plain
        size_bytes = self._header_bytes + len(payload)
        if size_bytes > len(whole):
            return Unstored(f"its {size_bytes} encoded bytes do not fit into {len(whole)}")
        if self._codecs:
            whole[self._header_bytes : size_bytes] = payload
        total = checksum(payload)
        if self._header_bytes:
            header = FrameHeader(
                tag=frame_tags(self._codecs, block.key)[0],
                block_bytes=block.local.size_bytes,
                payload_bytes=len(payload),
                checksum=total,
                codec=self._codec_name,
            )
            whole[:HEADER_BYTES] = header.pack()
            total = 0  # it is in the header
        # Transfers of whole pages must not include bytes of earlier blocks.
        padding = min(-size_bytes % PAGE_BYTES, len(whole) - size_bytes)
        whole[size_bytes : size_bytes + padding] = bytes(padding)
        return block.stored(size_bytes, total)

    def _decode(self, block: LoadBlock, span: Span) -> LoadResult:
        """Verify and decode the block in ``span``, behind the header. LOADED if it is intact."""
        whole = bytes_at(span)
        size_bytes = block.local.size_bytes
        if not self._header_bytes:
            intact = checksum(whole[:size_bytes]) == block.stored.checksum
            return LoadResult.LOADED if intact else LoadResult.CORRUPT
        try:
            key = block.stored.key
            tags = frame_tags(self._codecs, key)
            header = FrameHeader.parse(whole[: block.stored.size_bytes], *tags)
            payload = header.payload(whole)
            if header.codec != self._codec_name:
                return LoadResult.MISSING  # intact, but only workers with its codecs can read it
            if header.block_bytes != size_bytes:
                return LoadResult.CORRUPT
            if self._codecs:
                plain = decode(self._codecs, payload, key, size_bytes)
                whole[HEADER_BYTES : HEADER_BYTES + size_bytes] = plain
            elif len(payload) != size_bytes:
                return LoadResult.CORRUPT
        except (FrameError, CodecError):
            return LoadResult.CORRUPT
        return LoadResult.LOADED

    def _scratch(self, slot: int) -> Span:
        return self._staging.arena.span(slot)

    def _give_back(self, slots: Sequence[int], tier_slots: Iterable[Slot]) -> None:
        """Give slots back once NIXL can no longer touch them, which is mostly now."""
        for slot, tier_slot in zip(slots, tier_slots, strict=True):
            self._mover.on_released(tier_slot, partial(self._staging.give_back, [slot]))


def _part(span: Span, offset: int, size_bytes: int) -> Span:
    return Span(span.address + offset, size_bytes, span.device)


class DirectIo(BlockIo):
    """Moves blocks without staging, to and from a tier that stores them unchanged.

    A block's checksum is computed soon after its transfer, while other blocks are in flight, where
    it is in host memory (see ``TierMover.host_span``).
    """

    def __init__(self, mover: TierMover) -> None:
        self._mover = mover

    def store(self, blocks: Sequence[StoreBlock], context: IoContext) -> list[StoreResult]:
        results: list[StoreResult] = [Unstored("")] * len(blocks)
        there = [self._mover.host_span(block.local, block.slot) for block in blocks]

        def add_up(moved: Sequence[int]) -> None:
            for index in moved:
                block = blocks[index]
                total = checksum(bytes_at(there[index]))
                results[index] = block.stored(block.local.size_bytes, total)

        errors = self._mover.move(
            Direction.WRITE,
            [(block.local, block.slot, block.local.size_bytes) for block in blocks],
            context,
            on_moved=add_up,
        )
        for index, error in enumerate(errors):
            if error is not None:
                results[index] = Unstored(str(error))
        return results

    def load(self, blocks: Sequence[LoadBlock], context: IoContext) -> list[LoadResult]:
        results = [LoadResult.FAILED] * len(blocks)
        wanted: list[int] = []
        for index, block in enumerate(blocks):
            if block.stored.size_bytes == block.local.size_bytes:
                wanted.append(index)
            else:
                results[index] = LoadResult.CORRUPT

        there = [
            self._mover.host_span(blocks[index].local, blocks[index].stored.slot)
            for index in wanted
        ]

        def verify(moved: Sequence[int]) -> None:
            for position in moved:
                block = blocks[wanted[position]]
                intact = checksum(bytes_at(there[position])) == block.stored.checksum
                results[wanted[position]] = LoadResult.LOADED if intact else LoadResult.CORRUPT

        self._mover.move(
            Direction.READ,
            [
                (blocks[index].local, blocks[index].stored.slot, blocks[index].local.size_bytes)
                for index in wanted
            ],
            context,
            on_moved=verify,
        )
        return results
