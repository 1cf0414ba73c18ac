"""What a worker needs to hand KV over, whichever side of it: made once, used by every pool."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from typing import Any

from attrs import evolve

from commutator.engine import TokenApiClient
from commutator.engine.handover import (
    PROTOCOL,
    DecodeWords,
    ExportServer,
    HandoverStatistics,
    NixlMover,
    PrefillWords,
    Puller,
    PullTimes,
    ReadyBlock,
    Source,
    read_words,
)
from commutator.kv import BlockArena, CacheIdentity, bytes_at, checksum
from commutator.types import GenerateRequest, HandoverInfo
from commutator_reference.arena import KVArena

__all__ = ["Handover", "handover_info", "missing_for_handover"]

_FIRST_PIECE_BYTES = 2 << 20
"""Blocks are told of in pieces, the first a small one, so that reading begins soon."""


def missing_for_handover(*, on_cpu: bool, prefix_caching: bool) -> str | None:
    """Why this worker cannot hand KV over, and what to do; None if it can."""
    if not prefix_caching:
        return "prefix_caching is off, and handed-over blocks arrive in the prefix cache: set it"
    if not on_cpu:
        return "its KV is in a GPU's memory, and this engine hands over host memory only: use cpu"
    if find_spec("nixl") is None and find_spec("nixl_cu12") is None:
        return "NIXL, which moves all KV, is not installed: pip install 'nixl[cu12]'"
    return None


def handover_info(identity: CacheIdentity, arena: KVArena) -> HandoverInfo:
    """What another worker must have in common; blocks of other sizes can be converted."""
    layout = (
        f"reference-1: {arena.num_layers} layers, key and value, {arena.num_kv_heads} heads, "
        f"tokens, {arena.head_size}"
    )
    return HandoverInfo(
        protocol=PROTOCOL,
        identity=evolve(identity, layout=layout, block_size=0).digest.hex(),
        block_size=arena.block_size,
        token_bytes=arena.tensor[0].nbytes // arena.block_size,
    )


class Handover:
    """Both sides of one worker: its exports, its pulls, and the NIXL agent that they share."""

    def __init__(
        self,
        info: HandoverInfo,
        arena: KVArena,
        *,
        agent_name: str,
        wake: Callable[[], None],
        parameters: Mapping[str, str] | None = None,
        times: PullTimes | None = None,
    ) -> None:
        """``parameters`` are those of NIXL's backend UCX; ``wake`` is called from any thread."""
        self.info = info
        self._arena = arena
        self._blocks: BlockArena = arena.block_arena
        self._agent_name = agent_name
        self.mover = NixlMover(
            self._blocks,
            block_tokens=info.block_size,
            runs=arena.runs,
            agent_name=agent_name,
            parameters=parameters,
        )
        self.exports = ExportServer(self._source, wake)
        self.pulls = Puller(self.mover, info, TokenApiClient, wake, times)
        self._sums: dict[int, tuple[object, int]] = {}
        """Of each block that was handed over: of which content, and its checksum."""
        self._summing = ThreadPoolExecutor(1, thread_name_prefix="handover-sum")

    def start(self) -> None:
        """From the event loop that serves the worker."""
        self.exports.start()
        self.pulls.start()

    def stop(self) -> None:
        """From any thread but the event loop's, once the engine has stopped."""
        self.exports.stop()
        self.pulls.stop()
        self._summing.shutdown()
        self.mover.close()

    def read(self, request: GenerateRequest) -> PrefillWords | DecodeWords | None:
        """Which leg a request is, if any. Raises RequestError for what cannot be done."""
        return read_words(request, self.info.block_size)

    def publish(
        self,
        export_id: str,
        blocks: Sequence[int],
        keys: Sequence[bytes],
        contents: Sequence[object],
    ) -> None:
        """Sum held blocks on another thread, and tell of each piece that is summed.

        ``contents`` stand for what is in the blocks; of the same content a block is summed only
        once, which costs less and shows damage that was done since.
        """
        start, count = 0, max(1, _FIRST_PIECE_BYTES // self._blocks.block_bytes)
        while start < len(blocks):
            piece = slice(start, start + count)
            self._summing.submit(
                self._publish, export_id, blocks[piece], keys[piece], contents[piece]
            )
            start, count = start + count, 2 * count

    def complete(self, export_id: str) -> None:
        """No more blocks are held for it. Told behind those that are still to be summed."""
        self._summing.submit(self.exports.complete, export_id)

    async def answer(self, what: str, arguments: Mapping[str, Any]) -> Any:
        """The value for a question of the token API's. Raises EngineError."""
        if what == "statistics":
            return HandoverStatistics(self.exports.statistics(), self.pulls.statistics())
        return await self.exports.answer(what, arguments)

    def _publish(
        self,
        export_id: str,
        blocks: Sequence[int],
        keys: Sequence[bytes],
        contents: Sequence[object],
    ) -> None:
        ready = [
            ReadyBlock(block, key, self._sum(block, content))
            for block, key, content in zip(blocks, keys, contents, strict=True)
        ]
        self.exports.publish(export_id, ready)

    def _sum(self, block: int, content: object) -> int:
        known, found = self._sums.get(block, (None, 0))
        if known != content:
            found = checksum(bytes_at(self._blocks.span(block)))
            self._sums[block] = content, found
        return found

    def _source(self) -> Source:
        blocks = self._blocks
        return Source(
            info=self.info,
            agent=self._agent_name,
            metadata=self.mover.metadata(),
            memory=str(blocks.memory),
            address=blocks.address,
            block_bytes=blocks.block_bytes,
            blocks=blocks.count,
            device=blocks.device,
            runs=self._arena.runs,
        )
