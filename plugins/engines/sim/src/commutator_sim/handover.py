"""KV hand-over between served sim workers, by the protocol of the engines that move bytes.

``Handover`` connects the model with the protocol, in the server's event loop. A transfer is a wait.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Sequence

from attrs import define, evolve

from commutator import GenerateRequest, KvTransferInfo
from commutator.contract.worker import TransferStatistics
from commutator.errors import EngineHandoverError
from commutator_engine_kit.kv.transfer import (
    PROTOCOL,
    BlockExporter,
    BlockShapes,
    DecodeTransferParams,
    ExportedMemory,
    PrefillTransferParams,
    PromptBlock,
    Puller,
    ReadTarget,
    ReadyBlock,
    handover_keys,
)
from commutator_sim.config import SimConfig
from commutator_sim.events import Pulled, Pulling, Ready
from commutator_sim.model import SimModel


def handover_info(config: SimConfig, model: str) -> KvTransferInfo:
    """What another worker must match: only sim workers exchange modelled blocks."""
    return KvTransferInfo(
        protocol=f"{PROTOCOL}, modelled",
        identity=f"sim: {model}",
        block_size=config.block_size,
        token_bytes=config.kv_bytes_per_token,
    )


def handover_source(config: SimConfig, info: KvTransferInfo, agent: str) -> ExportedMemory:
    """A worker's modelled memory, which is never read."""
    return ExportedMemory(
        info=info,
        agent=agent,
        metadata=b"",
        memory="DRAM",
        address=0,
        block_bytes=config.block_size * config.kv_bytes_per_token,
        blocks=config.kv_capacity_blocks,
    )


class WaitingMover:
    """A link that carries one transfer after the other. Used from one event loop."""

    def __init__(self, config: SimConfig) -> None:
        self._bytes_per_s = config.handover_bandwidth_bytes_per_s
        self._latency_s = config.handover_latency_s
        self._factor = config.time_factor
        self._free_s = 0.0

    async def fetch(
        self,
        source: ExportedMemory,
        blocks: Sequence[PromptBlock],
        target: ReadTarget,
        timeout_s: float,
    ) -> list[str | None]:
        """Wait for as long as the bytes would take."""
        target.begin()
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.sleep(self._transfer_s(len(blocks) * source.block_bytes))
        except TimeoutError:
            return [f"not there after {timeout_s:g} s"] * len(blocks)
        finally:
            target.end()
        return [None] * len(blocks)

    @property
    def nixl_bytes(self) -> int:
        return 0

    def forget(self, source: ExportedMemory) -> None:
        """There is nothing to forget."""

    def _transfer_s(self, size_bytes: int) -> float:
        """Real seconds from now until the bytes have arrived; 0 at unlimited speed."""
        if not self._factor:
            return 0.0
        now_s = asyncio.get_running_loop().time()
        moving_s = size_bytes / self._bytes_per_s / self._factor
        self._free_s = max(self._free_s, now_s) + moving_s
        return self._free_s + self._latency_s / self._factor - now_s


@define
class _Pull:
    shapes: BlockShapes
    first_token: int = 0
    """Position in the prompt where the pulled blocks begin."""


@define
class _Export:
    id: str
    keys: Sequence[bytes]
    published: int = 0


class Handover:
    """One worker's exports and pulls. ``wake`` is called when ``update`` has something to do."""

    def __init__(
        self,
        config: SimConfig,
        model_name: str,
        model: SimModel,
        wake: Callable[[], None],
        host: str = "127.0.0.1",
    ) -> None:
        self.info = handover_info(config, model_name)
        self._host = host
        self._model = model
        source = handover_source(config, self.info, f"sim-{uuid.uuid4().hex}")
        self._exporter = BlockExporter(wake, memory=lambda: source)
        self._puller = Puller(WaitingMover(config), self.info, wake)
        self._exports: dict[int, _Export] = {}
        """Prefills that are not published completely yet."""
        self._pulls: dict[int, _Pull] = {}
        """Decodes that wait for their KV."""

    def start(self) -> None:
        """From the event loop. Raises OSError."""
        self.info = evolve(self.info, address=self._exporter.start(self._host))
        self._puller.start()

    def stop(self) -> None:
        """From any thread but the event loop's."""
        self._exporter.stop()
        self._puller.stop()

    def statistics(self) -> TransferStatistics:
        return TransferStatistics(
            exports=self._exporter.statistics(), pulls=self._puller.statistics()
        )

    def begin_export(
        self, key: int, request: GenerateRequest, params: PrefillTransferParams
    ) -> int:
        """A prefill is about to be submitted. Returns the number of blocks to hand over.

        Raises EngineHandoverError when the decode worker has released it already.
        """
        try:
            wanted = self._exporter.begin(params.pull, params.lease_s)
        except ValueError as error:
            raise EngineHandoverError(str(error)) from error
        if not wanted:
            raise EngineHandoverError("the decode side has given the hand-over up already")
        count = (len(request.token_ids) - 1) // self.info.block_size
        export = _Export(params.pull, handover_keys(self.info, request)[:count])
        self._exports[key] = export
        self._complete(key, export)
        return count

    def begin_pull(self, key: int, request: GenerateRequest, params: DecodeTransferParams) -> int:
        """A decode is about to be submitted. Returns the largest number of blocks to pull."""
        shapes = BlockShapes(params.block_size, self.info.block_size, self.info.token_bytes)
        self._pulls[key] = _Pull(shapes)
        self._puller.begin(key, params, request)
        return shapes.aligned(len(request.token_ids) - 1) // self.info.block_size

    def take(self, event: Ready | Pulling | Pulled) -> None:
        """The model tells how far a request's part is."""
        match event:
            case Ready():
                self._ready(event)
            case Pulling():
                self._pulling(event)
            case Pulled():
                self._pulled(event.key)

    def _ready(self, event: Ready) -> None:
        """Blocks of a prefill are computed, and held."""
        if (export := self._exports.get(event.key)) is None:
            return
        keys = export.keys[export.published : event.blocks]
        # ``update`` finds the request of a freed block by this key.
        if not self._exporter.hold(export.id, [event.key] * len(keys)):
            del self._exports[event.key]
            self._model.release(event.key)
            return
        blocks = [ReadyBlock(export.published + place, key, 0) for place, key in enumerate(keys)]
        self._exporter.publish(export.id, blocks)
        export.published += len(keys)
        self._complete(event.key, export)

    def _pulling(self, event: Pulling) -> None:
        """A decode has its blocks, and waits for their content."""
        pull, size = self._pulls[event.key], self.info.block_size
        pull.first_token = first = pull.shapes.aligned(event.first_block * size)
        blocks = range(first // size, event.end_block)
        self._puller.set_destination(event.key, ReadTarget(first, event.end_block * size, blocks))

    def _pulled(self, key: int) -> None:
        """A decode needs no more blocks, or never needed any."""
        if self._pulls.pop(key, None) is not None:
            self._puller.drop(key)

    def drop(self, key: int) -> None:
        """A request was aborted, whatever its part in a hand-over."""
        self._pulled(key)
        if (export := self._exports.pop(key, None)) is not None:
            self._exporter.fail(export.id, "the prefill was aborted or has failed")

    def update(self) -> list[tuple[int, str]]:
        """Give the model what has arrived and what is released. Returns failed requests and why.

        What arrived of a failed pull stays in the cache.
        """
        for key in set(self._exporter.take_freed()):
            self._model.release(key)
        failed: list[tuple[int, str]] = []
        for over in self._puller.poll()[0]:
            if (pull := self._pulls.pop(over.key, None)) is None:
                continue
            arrived = (pull.first_token + over.good_tokens) // self.info.block_size
            if over.error is None:
                self._model.offer(over.key, arrived)
            else:
                self._model.keep(over.key, arrived)
                failed.append((over.key, over.error))
        return failed

    def _complete(self, key: int, export: _Export) -> None:
        if export.published == len(export.keys):
            self._exporter.complete(export.id)
            del self._exports[key]
