"""KV events in a folder that all hosts mount: a folder for each stream, a file for each message."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from pathlib import Path
from urllib.parse import quote

from attrs import astuple, frozen

from commutator import EventSource, hookimpl, setting
from commutator.contract.event_bus import (
    EventBus,
    EventBusConfig,
    EventChannel,
    EventOutlet,
    EventStream,
    KeptMessages,
    Message,
)
from commutator.contract.registration import EventBusRegister

_KEPT = 10_000
_LOOK_EVERY_S = 0.05


@frozen(kw_only=True)
class FolderConfig(EventBusConfig):
    path: str = setting("A folder that the hosts of workers and front doors all mount.")


class FolderBus(EventBus):
    def __init__(self, config: FolderConfig) -> None:
        self._folder = Path(config.path)

    async def publish(self, stream: EventStream, kept: KeptMessages) -> EventOutlet:
        return Outlet(self._folder / ",".join(quote(str(part), "") for part in astuple(stream)))

    def subscribe(self, source: EventSource, on_malformed: Callable[..., None]) -> EventChannel:
        if not source.endpoint.startswith("folder:"):
            raise ValueError(f"{source.endpoint}: give all hosts the same cluster.events")
        return Channel(Path(source.endpoint.removeprefix("folder:")))

    async def close(self) -> None: ...


class Outlet(EventOutlet):
    def __init__(self, folder: Path) -> None:
        self._folder, name = folder, f"folder:{folder}"
        folder.mkdir(parents=True, exist_ok=True)
        self.source = EventSource(endpoint=name, replay_endpoint=name)

    def send(self, sequence: int, body: bytes) -> None:
        draft = self._folder / "draft"
        draft.write_bytes(body)
        draft.rename(self._folder / str(sequence))  # atomically, so that nobody reads half of it
        (self._folder / str(sequence - _KEPT)).unlink(missing_ok=True)

    async def close(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)


class Channel(EventChannel):
    def __init__(self, folder: Path) -> None:
        self._folder, self._next, self._subscribed = folder, 0, asyncio.Semaphore(1)

    async def receive(self) -> list[Message]:
        while not (came := self._since(self._next)):  # noqa: ASYNC110 - nothing tells
            await asyncio.sleep(_LOOK_EVERY_S)
        self._next = came[-1][0] + 1
        return came

    async def missed(self) -> None:
        await self._subscribed.acquire()  # once: a folder drops nothing, and is always there

    async def replay(self, first: int, timeout_s: float) -> AsyncGenerator[list[Message], None]:
        yield self._since(first)

    def _since(self, first: int) -> list[Message]:
        found = []
        for number in sorted(int(file.name) for file in self._folder.glob("[0-9]*")):
            with suppress(FileNotFoundError):  # its worker keeps it no longer
                if number >= first:
                    found.append((number, (self._folder / str(number)).read_bytes()))
        return found

    async def close(self) -> None: ...


@hookimpl
def event_bus_register(register: EventBusRegister) -> None:
    register("folder", FolderConfig, FolderBus)
