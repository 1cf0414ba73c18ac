"""Both sides of hand-overs at a served sim worker: between its model and the control protocol.

Everything happens in the server's event loop.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from attrs import define, frozen

from commutator.engine import TokenApiClient
from commutator.engine.handover import (
    BlockShapes,
    DecodeWords,
    ExportServer,
    HandoverStatistics,
    PrefillWords,
    Puller,
    PullOver,
    ReadyBlock,
    Target,
    handover_keys,
    read_words,
)
from commutator.errors import EngineHandoverError
from commutator.types import GenerateRequest
from commutator_sim.config import SimConfig
from commutator_sim.events import Pulling, Ready
from commutator_sim.model import SimModel
from commutator_sim.pulling import WaitingMover, handover_info, handover_source

__all__ = ["FailedHandover", "ServedHandover"]


@frozen
class FailedHandover:
    """A leg that cannot go on."""

    key: int
    error: str


@define
class _Pull:
    shapes: BlockShapes
    first_token: int = 0
    """Where in the prompt begins what is fetched."""


@define
class _Export:
    id: str
    keys: Sequence[bytes]
    told: int = 0


class ServedHandover:
    """One worker's exports and pulls. ``wake`` is called when ``update`` has something to do."""

    def __init__(
        self, config: SimConfig, model_name: str, model: SimModel, wake: Callable[[], None]
    ) -> None:
        self.info = handover_info(config, model_name)
        self._model = model
        source = handover_source(config, self.info, f"sim-{uuid.uuid4().hex}")
        self._server = ExportServer(lambda: source, wake)
        self._puller = Puller(WaitingMover(config), self.info, TokenApiClient, wake)
        self._exports: dict[int, _Export] = {}
        """Prefill legs of which not everything is told."""
        self._pulls: dict[int, _Pull] = {}
        """Decode legs whose KV is not there."""

    def start(self) -> None:
        """From the event loop."""
        self._server.start()
        self._puller.start()

    def stop(self) -> None:
        """From any thread but the event loop's."""
        self._server.stop()
        self._puller.stop()

    async def answer(self, what: str, arguments: Mapping[str, Any]) -> Any:
        """The value for a question of the token API's. Raises EngineError."""
        if what == "statistics":
            return HandoverStatistics(self._server.statistics(), self._puller.statistics())
        return await self._server.answer(what, arguments)

    def leg(self, request: GenerateRequest) -> PrefillWords | DecodeWords | None:
        """Which one the request is, if any. Raises RequestError for what cannot be done."""
        return read_words(request, self.info.block_size)

    def begin_export(self, key: int, request: GenerateRequest, words: PrefillWords) -> int:
        """A prefill leg is about to be submitted. Returns how many blocks are wanted of it.

        Raises EngineHandoverError when it is not wanted at all.
        """
        try:
            wanted = self._server.begin(words.pull, words.lease_s)
        except ValueError as error:
            raise EngineHandoverError(str(error)) from error
        if not wanted:
            raise EngineHandoverError("the decode side has given the hand-over up already")
        count = (len(request.token_ids) - 1) // self.info.block_size
        export = _Export(words.pull, handover_keys(self.info, request)[:count])
        self._exports[key] = export
        self._complete(key, export)
        return count

    def begin_pull(self, key: int, request: GenerateRequest, words: DecodeWords) -> int:
        """A decode leg is about to be submitted. Returns how many blocks may come from there."""
        shapes = BlockShapes(words.block_size, self.info.block_size, self.info.token_bytes)
        self._pulls[key] = _Pull(shapes)
        self._puller.begin(key, words, request)
        return shapes.aligned(len(request.token_ids) - 1) // self.info.block_size

    def ready(self, event: Ready) -> None:
        """Blocks of a prefill leg are computed, and held."""
        if (export := self._exports.get(event.key)) is None:
            return
        keys = export.keys[export.told : event.blocks]
        # A freed block is known by the request that it was held for; see ``update``.
        if not self._server.hold(export.id, [event.key] * len(keys)):
            del self._exports[event.key]
            self._model.release(event.key)
            return
        blocks = [ReadyBlock(export.told + place, key, 0) for place, key in enumerate(keys)]
        self._server.publish(export.id, blocks)
        export.told += len(keys)
        self._complete(event.key, export)

    def pulling(self, event: Pulling) -> None:
        """A decode leg has its blocks, and waits for what is to come into them."""
        pull, size = self._pulls[event.key], self.info.block_size
        pull.first_token = first = pull.shapes.aligned(event.first_block * size)
        blocks = range(first // size, event.end_block)
        self._puller.aim(event.key, Target(first, event.end_block * size, blocks))

    def pulled(self, key: int) -> None:
        """A decode leg needs nothing more; maybe it never did."""
        if self._pulls.pop(key, None) is not None:
            self._puller.drop(key)

    def drop(self, key: int) -> None:
        """A request is gone, whichever leg it was."""
        self.pulled(key)
        if (export := self._exports.pop(key, None)) is not None:
            self._server.fail(export.id, "the prefill was aborted or has failed")

    def update(self) -> list[FailedHandover]:
        """Tell the model what has arrived and what is released; returns whom the KV did not reach.

        What arrived of a failed pull stays in the cache.
        """
        for key in set(self._server.take_freed()):
            self._model.release(key)
        failed: list[FailedHandover] = []
        for over in self._puller.poll()[0]:
            if over.key in self._pulls:
                self._over(over, failed)
        return failed

    def _over(self, over: PullOver, failed: list[FailedHandover]) -> None:
        pull = self._pulls.pop(over.key)
        arrived = (pull.first_token + over.good_tokens) // self.info.block_size
        if over.error is None:
            self._model.offer(over.key, arrived)
        else:
            self._model.keep(over.key, arrived)
            failed.append(FailedHandover(over.key, over.error))

    def _complete(self, key: int, export: _Export) -> None:
        if export.told == len(export.keys):
            self._server.complete(export.id)
            del self._exports[key]
