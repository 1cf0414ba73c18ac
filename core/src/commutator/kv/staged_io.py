"""Blocks pass through scratch memory: framed, encoded, or on their way from and to a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from commutator.kv.arena import bytes_at
from commutator.kv.block_io import BlockIo, IoContext, LoadBlock, StoreBlock, Unstored
from commutator.kv.checksum import checksum
from commutator.kv.codec import Codec, CodecError, chain_name, decode, encode
from commutator.kv.frame import HEADER_BYTES, FrameError, FrameHeader
from commutator.kv.load_result import LoadResult
from commutator.kv.staging import PAGE_BYTES, Staging
from commutator.kv.tier import Stored
from commutator.kv.tier_mover import LocalMover, TierMover
from commutator.transfer import Direction
from commutator.transfer.spans import Span

__all__ = ["StagedIo"]

_NO_SCRATCH = "all scratch memory is under transfers that do not end"


class StagedIo(BlockIo):
    """Works in batches of as many blocks as there are free scratch slots, which are its own.

    ``framed``: a header tells what the stored bytes are; needed where the tier does not keep that,
    and where codecs change the bytes.
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

    def store(self, blocks: Sequence[StoreBlock], context: IoContext) -> list[Stored | Unstored]:
        results: list[Stored | Unstored] = []
        while len(results) < len(blocks):
            with self._staging.lend(len(blocks) - len(results)) as slots:
                if not slots:
                    results += [Unstored(_NO_SCRATCH)] * (len(blocks) - len(results))
                    break
                batch = blocks[len(results) : len(results) + len(slots)]
                try:
                    results += self._store(batch, slots, context)
                finally:
                    self._keep_held(slots, [block.slot for block in batch])
        return results

    def load(self, blocks: Sequence[LoadBlock], context: IoContext) -> list[LoadResult]:
        results: list[LoadResult] = []
        while len(results) < len(blocks):
            with self._staging.lend(len(blocks) - len(results)) as slots:
                if not slots:
                    results += [LoadResult.FAILED] * (len(blocks) - len(results))
                    break
                batch = blocks[len(results) : len(results) + len(slots)]
                try:
                    results += self._load(batch, slots, context)
                finally:
                    self._keep_held(slots, [block.stored.slot for block in batch])
        return results

    def _store(
        self, blocks: Sequence[StoreBlock], slots: list[int], context: IoContext
    ) -> list[Stored | Unstored]:
        spans = [self._scratch(slot) for slot in slots]
        pulls = [
            (block.local, _part(span, self._header_bytes, block.local.size_bytes))
            for block, span in zip(blocks, spans, strict=True)
        ]
        problems = self._local.pull(pulls)
        results: list[Stored | Unstored] = [Unstored("")] * len(blocks)
        ready: list[int] = []
        for index, (block, problem) in enumerate(zip(blocks, problems, strict=True)):
            made = Unstored(str(problem)) if problem else self._encode(block, spans[index])
            results[index] = made
            if isinstance(made, Stored):
                ready.append(index)
        writes = [
            (spans[i], blocks[i].slot, stored.size_bytes)
            for i in ready
            if isinstance(stored := results[i], Stored)
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

    def _encode(self, block: StoreBlock, span: Span) -> Stored | Unstored:
        """Make the bytes to be stored at the beginning of ``span``, which has the block in it."""
        whole = bytes_at(span)
        plain = whole[self._header_bytes : self._header_bytes + block.local.size_bytes]
        payload = encode(self._codecs, plain, block.key) if self._codecs else plain
        size_bytes = self._header_bytes + len(payload)
        if size_bytes > len(whole):
            return Unstored(f"encoded it has {size_bytes} bytes, too many for {len(whole)}")
        if self._codecs:
            whole[self._header_bytes : size_bytes] = payload
        total = checksum(payload)
        if self._header_bytes:
            header = FrameHeader(
                key=block.key,
                block_bytes=block.local.size_bytes,
                payload_bytes=len(payload),
                checksum=total,
                codec=self._codec_name,
            )
            whole[:HEADER_BYTES] = header.pack()
            total = 0  # the header has it
        # What is moved in whole pages must not carry along what was here before.
        padding = min(-size_bytes % PAGE_BYTES, len(whole) - size_bytes)
        whole[size_bytes : size_bytes + padding] = bytes(padding)
        return block.stored(size_bytes, total)

    def _decode(self, block: LoadBlock, span: Span) -> LoadResult:
        """Put the verified block behind where the header is; then it is LOADED, so far."""
        whole = bytes_at(span)
        size_bytes = block.local.size_bytes
        if not self._header_bytes:
            intact = checksum(whole[:size_bytes]) == block.stored.checksum
            return LoadResult.LOADED if intact else LoadResult.CORRUPT
        try:
            header = FrameHeader.parse(whole[: block.stored.size_bytes], block.stored.key)
            payload = header.payload(whole)
            if header.codec != self._codec_name:
                return LoadResult.MISSING  # intact: whoever stored it can read it
            if header.block_bytes != size_bytes:
                return LoadResult.CORRUPT
            if self._codecs:
                plain = decode(self._codecs, payload, block.stored.key, size_bytes)
                whole[HEADER_BYTES : HEADER_BYTES + size_bytes] = plain
            elif len(payload) != size_bytes:
                return LoadResult.CORRUPT
        except (FrameError, CodecError):
            return LoadResult.CORRUPT
        return LoadResult.LOADED

    def _scratch(self, slot: int) -> Span:
        return self._staging.arena.span(slot)

    def _keep_held(self, slots: list[int], tier_slots: Sequence[int]) -> None:
        """Scratch that NIXL may still touch goes back once it lets go of it."""
        held = [
            (scratch, tier_slot)
            for scratch, tier_slot in zip(slots, tier_slots, strict=True)
            if self._mover.is_held(tier_slot)
        ]
        for scratch, tier_slot in held:
            slots.remove(scratch)
            self._mover.when_let_go(tier_slot, partial(self._staging.give_back, [scratch]))


def _part(span: Span, offset: int, size_bytes: int) -> Span:
    return Span(span.address + offset, size_bytes, span.device)
