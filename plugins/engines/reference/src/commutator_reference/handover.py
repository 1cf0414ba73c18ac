"""KV hand-over: exports blocks to decode workers, and pulls blocks from prefill workers.

``Exports`` and ``Pulls`` run on the engine's thread; the protocol and NIXL have their own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Many
from concurrent.futures import ThreadPoolExecutor

from attrs import define, evolve, field

from commutator import KvTransferInfo, Span
from commutator.contract.block import CacheIdentity
from commutator.contract.worker import TransferStatistics
from commutator_engine_kit.kv import BlockArena, KvGroup, checksum
from commutator_engine_kit.kv.transfer import (
    GROUPS_PROTOCOL,
    PROTOCOL,
    BlockExporter,
    BlockReader,
    BlockShapes,
    DecodeTransferParams,
    ExportedMemory,
    PrefillTransferParams,
    Puller,
    PullResult,
    PullTimes,
    ReadTarget,
    ReadyBlock,
    handover_keys,
    handover_places,
)
from commutator_reference.arena import KVArena
from commutator_reference.block_pool import NOTHING, BlockPool
from commutator_reference.pages import PageArena
from commutator_reference.scheduler import Hits, Sequence

TransferParams = PrefillTransferParams | DecodeTransferParams
"""A request's part in a hand-over."""

_FIRST_PIECE_BYTES = 2 << 20
"""Blocks are published in pieces; the first is small, so that reading begins early."""
_ABORTED = "the prefill was aborted or has failed"


def _transfer_info(identity: CacheIdentity, arena: KVArena | PageArena) -> KvTransferInfo:
    """What another worker must match; blocks of other sizes can be converted, but not pages."""
    if isinstance(arena, PageArena):
        kinds = arena.handover_layout
        digest = evolve(identity, layout=f"reference-2: {kinds}", block_size=0).digest.hex()
        return KvTransferInfo(
            protocol=GROUPS_PROTOCOL,
            identity=f"{identity.model}, {identity.dtype}, layers: {kinds} ({digest})",
            block_size=arena.block_size,
            token_bytes=arena.token_bytes,
        )
    layout = (
        f"reference-1: {arena.num_layers} layers, key and value, {arena.num_kv_heads} heads, "
        f"tokens, {arena.head_size}"
    )
    return KvTransferInfo(
        protocol=PROTOCOL,
        identity=evolve(identity, layout=layout, block_size=0).digest.hex(),
        block_size=arena.block_size,
        token_bytes=arena.tensor[0].nbytes // arena.block_size,
    )


class Handover:
    """A worker's exports, its pulls, and the NIXL agent that they share."""

    def __init__(
        self,
        identity: CacheIdentity,
        arena: KVArena | PageArena,
        pool: BlockPool,
        *,
        agent_name: str,
        wake: Callable[[], None],
        host: str = "127.0.0.1",
        parameters: Mapping[str, str] | None = None,
        times: PullTimes | None = None,
    ) -> None:
        """``host`` is where the exporter listens; ``parameters`` are those of NIXL's backend UCX.

        ``wake`` is called from any thread.
        """
        self.info = info = _transfer_info(identity, arena)
        """Has the exporter's address once it is started."""
        self._host = host
        self._runs = 1 if isinstance(arena, PageArena) else arena.runs
        groups = arena.groups if isinstance(arena, PageArena) else ()
        self._blocks = arena.block_arena
        self._agent_name = agent_name
        self._reader = BlockReader(
            self._blocks,
            block_tokens=info.block_size,
            runs=self._runs,
            agent_name=agent_name,
            parameters=parameters,
            host_bytes=arena.host_bytes,
        )
        self._exporter = BlockExporter(wake, memory=self._memory)
        self._puller = Puller(self._reader, info, wake, times, groups)
        self.exports = Exports(self._exporter, info, arena, pool)
        self.pulls = Pulls(self._puller, info, pool, groups)

    def start(self) -> None:
        """From the event loop that serves the worker. Raises OSError."""
        self.info = evolve(self.info, address=self._exporter.start(self._host))
        self._puller.start()

    def stop(self) -> None:
        """From any thread but the event loop's, once the engine has stopped."""
        self._exporter.stop()
        self._puller.stop()
        self.exports.stop()
        self._reader.close()

    def begin(self, sequence: Sequence, params: TransferParams) -> str | None:
        """Begin the request's part. Returns None, or why the request cannot be served."""
        if isinstance(params, PrefillTransferParams):
            sequence.loads.append(self.exports)
            return self.exports.begin(sequence, params)
        sequence.loads.append(self.pulls)
        self.pulls.begin(sequence, params)
        return None

    def skip(self, params: TransferParams) -> None:
        """The request was aborted before it began; a decode worker need not wait for a prefill."""
        if isinstance(params, PrefillTransferParams):
            self._exporter.fail(params.pull, _ABORTED)

    def statistics(self) -> TransferStatistics:
        return TransferStatistics(
            exports=self._exporter.statistics(), pulls=self._puller.statistics()
        )

    def _memory(self) -> ExportedMemory:
        blocks = self._blocks
        return ExportedMemory(
            info=self.info,
            agent=self._agent_name,
            metadata=self._reader.metadata(),
            memory=str(blocks.memory),
            address=blocks.address,
            block_bytes=blocks.block_bytes,
            blocks=blocks.count,
            device=blocks.device,
            runs=self._runs,
        )


@define
class _Export:
    id: str
    sequence: Sequence
    places: list[tuple[int, int]]
    """Group and number of each block that is handed over, in the order of publication."""
    keys: list[bytes]
    """Their identities."""
    last: int
    """The largest of the numbers."""
    published: int = 0

    @property
    def ready(self) -> slice:
        """Of ``places``: those that are computed and not published yet."""
        sequence = self.sequence
        end = self.published
        while end < len(self.places):
            group, number = self.places[end]
            # What a window or a state needs at the boundary stays only when all before is computed.
            needs = number if sequence.groups[group].keeps_prefix else self.last
            if needs >= sequence.registered:
                break
            end += 1
        return slice(self.published, end)


class Exports:
    """The prefill side: holds a prompt's blocks until the decode worker has read them."""

    def __init__(
        self,
        exporter: BlockExporter,
        info: KvTransferInfo,
        arena: KVArena | PageArena,
        pool: BlockPool,
    ) -> None:
        self._host_bytes: Callable[[Span], memoryview] = arena.host_bytes
        self._exporter = exporter
        self._info = info
        self._groups: Many[KvGroup] = arena.groups
        self._blocks: BlockArena = arena.block_arena
        self._pool = pool
        self._exports: dict[int, _Export] = {}
        self._checksums: dict[int, tuple[int, int]] = {}
        """Generation and checksum of each block that was handed over."""
        self._summing = ThreadPoolExecutor(1, thread_name_prefix="handover-sum")

    def stop(self) -> None:
        """End the thread that computes checksums."""
        self._summing.shutdown()

    def begin(self, sequence: Sequence, params: PrefillTransferParams) -> str | None:
        """Begin a hand-over. Returns None, or why the request cannot be served."""
        try:
            wanted = self._exporter.begin(params.pull, params.lease_s)
        except ValueError as error:
            return str(error)
        if not wanted:
            return "the decode side has given the hand-over up already"
        # The decode worker always computes the last token: it needs the logits.
        places = handover_places(self._groups, len(sequence.tokens))
        keys = handover_keys(self._info, sequence.request, self._groups)
        last = max((number for _, number in places), default=-1)
        self._exports[sequence.key] = _Export(params.pull, sequence, places, keys, last)
        return None

    def advance(self) -> list[int]:
        """Hold and publish the blocks computed since the last call; free released ones.

        Returns the requests that are done: all is published, or the decode worker has released it.
        """
        done: list[int] = []
        for key, export in self._exports.items():
            new = export.ready
            tables = export.sequence.tables
            blocks = [tables[group][number] for group, number in export.places[new]]
            assert NOTHING not in blocks, "a block that is handed over was released"
            wanted = self._exporter.hold(export.id, blocks)
            if wanted and blocks:
                for block in blocks:
                    self._pool.acquire(block)
                self._publish(export.id, blocks, export.keys[new])
                export.published = new.stop
            if not wanted or export.published == len(export.keys):
                done.append(key)
        for key in done:
            # After the blocks whose checksum is still being computed.
            self._summing.submit(self._exporter.complete, self._exports.pop(key).id)
        # Each hand-over's blocks are in the order of its tokens.
        self._pool.release(self._exporter.take_freed())
        return done

    def ready(self, sequence: Sequence, hits: Hits) -> bool:
        """A prefill waits for nothing."""
        del sequence, hits
        return True

    def drop(self, key: int) -> None:
        """The request ended, perhaps before all of it was published."""
        if (export := self._exports.pop(key, None)) is not None:
            self._exporter.fail(export.id, _ABORTED)

    def _publish(self, export_id: str, blocks: Many[int], keys: Many[bytes]) -> None:
        """Compute checksums of held blocks on another thread, and publish piece by piece."""
        new = [
            (block, key, self._pool.generation(block))
            for block, key in zip(blocks, keys, strict=True)
        ]
        start, count = 0, max(1, _FIRST_PIECE_BYTES // self._blocks.block_bytes)
        while start < len(new):
            self._summing.submit(self._publish_piece, export_id, new[start : start + count])
            start, count = start + count, 2 * count

    def _publish_piece(self, export_id: str, piece: Many[tuple[int, bytes, int]]) -> None:
        ready = [
            ReadyBlock(block, key, self._checksum(block, generation))
            for block, key, generation in piece
        ]
        self._exporter.publish(export_id, ready)

    def _checksum(self, block: int, generation: int) -> int:
        """Computed once for each content, which is cheaper and reveals later damage."""
        known, found = self._checksums.get(block, (None, 0))
        if known != generation:
            found = checksum(self._host_bytes(self._blocks.span(block)))
            self._checksums[block] = generation, found
        return found


@define
class _Pull:
    sequence: Sequence
    shapes: BlockShapes
    first: int = 0
    """Index of the first block that is read."""
    chain: list[int] = field(factory=list)
    """Registered blocks of the prompt, from its first, held during the pull, in order."""
    places: list[tuple[int, int]] = field(factory=list)
    """Group and number of each of ``blocks``, where there are groups."""
    blocks: list[int] = field(factory=list)
    """Destination of the other blocks; includes those that were added to ``chain`` since."""
    over: PullResult | None = None


class Pulls:
    """The decode side: a request waits until its prompt's blocks are read."""

    def __init__(
        self,
        puller: Puller,
        info: KvTransferInfo,
        pool: BlockPool,
        groups: Many[KvGroup] = (),
    ) -> None:
        """``groups`` are those of a model whose blocks are handed over by groups."""
        self._puller = puller
        self._groups = groups
        self._info = info
        self._pool = pool
        self._pulls: dict[int, _Pull] = {}
        """Pulls of waiting requests, and of those whose blocks are not released yet."""
        self._gone: set[int] = set()
        """Requests that ended while something may still write to their blocks."""

    def begin(self, sequence: Sequence, params: DecodeTransferParams) -> None:
        """Send the request to the prefill worker, before there is room for the blocks."""
        shapes = BlockShapes(params.block_size, self._info.block_size, self._info.token_bytes)
        self._pulls[sequence.key] = _Pull(sequence, shapes)
        self._puller.begin(sequence.key, params, sequence.request)

    def ready(self, sequence: Sequence, hits: Hits) -> bool:
        """Whether the request can be admitted; sets the destination of its blocks."""
        pull = self._pulls.get(sequence.key)
        if pull is None:
            return True
        if pull.over is not None or pull.blocks:
            return pull.over is not None and pull.over.error is None
        size = self._pool.block_size
        first = pull.shapes.aligned(hits.tokens)
        end = pull.shapes.aligned(len(sequence.tokens) - 1)
        if sequence.cached_tokens is None:
            sequence.cached_tokens = hits.tokens
        if first >= end:
            self._puller.drop(sequence.key)
            del self._pulls[sequence.key]
            return True
        chain, positions = hits.blocks[: first // size], None
        count = (end - first) // size
        if self._groups:
            chain, missing = self._missing(sequence)
            positions, pull.places = list(missing), list(missing.values())
            count = len(positions)
        for block in chain:
            self._pool.acquire(block)
        blocks = self._pool.allocate(count)
        if blocks is None:
            self._pool.release(chain)
            return False
        pull.chain, pull.first, pull.blocks = chain, first // size, blocks
        target = ReadTarget(first, end, tuple(blocks), positions)
        self._puller.set_destination(sequence.key, target)
        return False

    def _missing(self, sequence: Sequence) -> tuple[list[int], dict[int, tuple[int, int]]]:
        """The pool's blocks among those that are handed over.

        And of the others, by their position in the order of publication, group and number.
        """
        found: list[int] = []
        missing: dict[int, tuple[int, int]] = {}
        places = handover_places(self._groups, len(sequence.tokens))
        for position, (group, number) in enumerate(places):
            wanted = sequence.descriptor(number, self._pool.block_size, group)
            if (block := self._pool.find(wanted)) is None:
                missing[position] = group, number
            else:
                found.append(block)
        return found, missing

    def drop(self, key: int) -> None:
        """The request ended; its blocks are released once nothing writes to them."""
        pull = self._pulls.get(key)
        if pull is None:
            return
        self._puller.drop(key)
        if pull.blocks:
            self._gone.add(key)
        else:
            del self._pulls[key]

    def update(self) -> list[tuple[int, str]]:
        """Take blocks that arrived; once a step. Returns failed requests with the reason."""
        over, released = self._puller.poll()
        failed: list[tuple[int, str]] = []
        for each in over:
            pull = self._pulls.get(each.key)
            if pull is None or each.key in self._gone:
                continue
            pull.over = each
            self._adopt(pull, each.good_tokens // self._pool.block_size)
            if each.error is not None:
                failed.append((each.key, each.error))
            elif not pull.blocks:
                del self._pulls[each.key]
        for key in released:
            if (pull := self._pulls.pop(key, None)) is not None:
                self._gone.discard(key)
                spare = set(pull.blocks).difference(pull.chain)
                # In the order of the tokens, so that no block is reallocated before its child.
                self._pool.release([*pull.chain, *spare])
        return failed

    def _adopt(self, pull: _Pull, count: int) -> None:
        size = self._pool.block_size
        places = [(0, pull.first + number) for number in range(count)]
        if self._groups:
            places = pull.places if count else []
        for (group, number), block in zip(places, pull.blocks, strict=False):
            content = pull.sequence.descriptor(number, size, group)
            pull.chain.append(self._pool.adopt(block, content))
