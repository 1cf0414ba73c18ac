"""One stream of KV events: what a bus delivers, in order, with replays of what was missed."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Coroutine
from typing import Any, Protocol

from attrs import frozen

from commutator.contract.event_bus import EventBus
from commutator.contract.worker import EventSource
from commutator.errors import EngineUnavailableError
from commutator.kv_events.sequence import (
    Action,
    Apply,
    EventSequence,
    GoOn,
    Position,
    Replay,
    Reset,
)

log = logging.getLogger(__name__)


@frozen
class SourceTimes:
    """When to ask for missed events."""

    replay_timeout_s: float = 5.0
    """Give up a replay after this long without a message."""
    settle_s: float = 1.0
    """Ask again this long after connecting: a subscription takes effect with a delay."""
    check_interval_s: float = 30.0
    """Ask at this interval: the last messages before a pause can be lost unnoticed."""


class EventSink(Protocol):
    """Receives a stream's messages."""

    def message(self, body: bytes) -> None:
        """The next message. Must not raise."""

    def reset(self, reason: str) -> None:
        """Messages were lost for good: forget every block that earlier ones told of."""

    def undecodable(self, error: Exception) -> None:
        """Something came that is no message."""


class EventSubscriber:
    """Reads one stream from ``start`` to ``close``, each message once and in order."""

    def __init__(
        self,
        bus: EventBus,
        source: EventSource,
        sink: EventSink,
        times: SourceTimes,
        position: Position | None = None,
    ) -> None:
        self.source = source
        self._bus = bus
        self._sink = sink
        self._times = times
        self.sequence = EventSequence(source.replay_endpoint is not None, position=position)
        self._tasks: list[asyncio.Task[None]] = []
        self._replaying: asyncio.Task[None] | None = None
        self._settling: asyncio.TimerHandle | None = None
        self._going_on: asyncio.Handle | None = None

    def start(self) -> None:
        """Subscribe. Earlier messages are requested once the subscription is in force.

        Raises ValueError when the source is none of the bus.
        """
        self._channel = self._bus.subscribe(self.source, self._sink.undecodable)
        self.sequence.restarts = self._channel.numbers_start_again
        work = (self._read(), self._follow_interruptions(), self._check_regularly())
        self._tasks = [self._spawn(task) for task in work]

    async def close(self) -> None:
        tasks = [*self._tasks, *([self._replaying] if self._replaying else [])]
        for task in tasks:
            task.cancel()
        for handle in (self._settling, self._going_on):
            if handle is not None:
                handle.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._tasks:
            self._tasks = []
            await self._channel.close()

    async def _read(self) -> None:
        receive, on_live, do = self._channel.receive, self.sequence.on_live, self._do
        while True:
            for sequence, body in await receive():
                do(on_live(sequence, body))
            await asyncio.sleep(0)  # many bursts must not block the event loop

    async def _follow_interruptions(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._channel.missed()
            self._do(self.sequence.connected())
            if self._settling is not None:
                self._settling.cancel()
            self._settling = loop.call_later(self._times.settle_s, self._check)

    async def _check_regularly(self) -> None:
        while True:
            await asyncio.sleep(self._times.check_interval_s)
            self._check()

    def _check(self) -> None:
        self._do(self.sequence.check())

    async def _replay(self, request: Replay) -> None:
        bursts = self._channel.replay(request.first, self._times.replay_timeout_s)
        try:
            async with contextlib.aclosing(bursts):
                async for burst in bursts:
                    for sequence, body in burst:
                        self._do(self.sequence.on_replayed(request.number, sequence, body))
                    await asyncio.sleep(0)
        except EngineUnavailableError as error:
            log.warning("%s", error)
            self._do(self.sequence.on_replay_failed(request.number))
        else:
            self._do(self.sequence.on_replay_end(request.number))

    def _do(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Apply(body):
                    if body:
                        self._sink.message(body)
                    else:
                        self._sink.reset("its host lost track of the engine's events")
                case Reset(reason):
                    self._sink.reset(reason)
                case Replay():
                    if self._replaying is not None:
                        self._replaying.cancel()
                    self._replaying = self._spawn(self._replay(action))
                case GoOn():
                    self._going_on = asyncio.get_running_loop().call_soon(self._go_on)

    def _go_on(self) -> None:
        self._do(self.sequence.go_on())

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("events from %s are no longer read", self.source.endpoint, exc_info=error)
