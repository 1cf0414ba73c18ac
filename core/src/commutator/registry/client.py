"""The client of a registry server. It reconnects, then reports the changes that it missed."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any

import msgspec

from commutator.backoff import Backoff
from commutator.contract.registry import LAPSED, Change, Registry, WorkerDown, WorkerUp
from commutator.contract.worker import Role, WorkerRecord
from commutator.errors import RegistryError
from commutator.frames import FrameProtocol, kind_of
from commutator.registry.server import SERVICE
from commutator.trust import ClientGate, RunSecret

__all__ = [
    "RegistryClient",
    "connect",
    "difference",
]

log = logging.getLogger(__name__)

_ANSWER_TIMEOUT_S = 5.0
_RECONNECT = Backoff(first_s=0.05, longest_s=2.0)


def difference(known: Mapping[str, WorkerRecord], present: Sequence[WorkerRecord]) -> list[Change]:
    """The changes that turn the view ``known`` into ``present``."""
    ids = {record.worker_id for record in present}
    gone: list[Change] = [
        WorkerDown(worker_id=worker_id, reason=LAPSED)
        for worker_id in known
        if worker_id not in ids
    ]
    return gone + [
        WorkerUp(record=record) for record in present if known.get(record.worker_id) != record
    ]


async def connect(
    address: str,
    on_frame: Callable[[list[Any]], None],
    on_lost: Callable[[], None],
    secret: RunSecret | None = None,
) -> FrameProtocol:
    """A connection to the server at "host:port", of the run of ``secret``; by default our own.

    Raises RegistryError, also when the server does not belong to that run.
    """
    loop = asyncio.get_running_loop()
    host, _, port = address.rpartition(":")
    protocol = FrameProtocol(on_frame, lambda _: on_lost(), ClientGate(SERVICE, secret))
    try:
        async with asyncio.timeout(_ANSWER_TIMEOUT_S):
            await loop.create_connection(lambda: protocol, host, int(port))
            await protocol.proven()
    except OSError as error:  # TimeoutError is one
        protocol.close()
        what = error.strerror or str(error) or "no answer"
        raise RegistryError(f"registry at {address}: {what}") from error
    return protocol


class RegistryClient(Registry):
    """Talks to a ``RegistryServer`` at "host:port"."""

    def __init__(self, address: str, *, secret: RunSecret | None = None) -> None:
        """``secret`` is that of the registry's run; by default that of this process."""
        self.address = address
        self._secret = secret
        self._numbers = itertools.count(1)
        self._questions: dict[int, asyncio.Future[Any]] = {}
        self._asking: FrameProtocol | None = None

    async def register(self, record: WorkerRecord, ttl_s: float) -> int:
        return int(await self._ask("register", record, ttl_s))

    async def keep_alive(self, lease_id: int) -> bool:
        return bool(await self._ask("keep_alive", lease_id))

    async def deregister(self, lease_id: int, reason: str) -> None:
        await self._ask("deregister", lease_id, reason)

    async def set_draining(self, worker_id: str, draining: bool) -> bool:
        return bool(await self._ask("set_draining", worker_id, draining))

    async def set_role(self, worker_id: str, role: Role) -> bool:
        return bool(await self._ask("set_role", worker_id, role.value))

    async def watch(self) -> AsyncIterator[Sequence[Change]]:
        known: dict[str, WorkerRecord] = {}
        backoff, first = _RECONNECT, True
        while True:
            try:
                async with aclosing(self._watched_frames()) as frames:
                    async for frame in frames:
                        backoff = _RECONNECT
                        changes = _changes(frame, known)
                        if changes or first:
                            yield changes
                        first = False
            except RegistryError as error:
                # Watchers keep their last view until the connection is back.
                log.log(logging.DEBUG if backoff.failures else logging.WARNING, "%s", error)
            backoff, wait_s = backoff.after_failure(0.0)
            await asyncio.sleep(wait_s)

    async def refused_connections(self) -> Mapping[str, int]:
        """Connections that the registry's process refused, by service. Raises RegistryError."""
        answer = await self._ask("refused_connections")
        try:
            return msgspec.convert(answer, dict[str, int])
        except msgspec.ValidationError as error:
            raise RegistryError(f"registry at {self.address}: {error}") from error

    async def close(self) -> None:
        if self._asking is not None:
            self._asking.close()
            self._asking = None

    async def _watched_frames(self) -> AsyncGenerator[list[Any], None]:
        """The frames of one connection. Raises RegistryError when it ends."""
        frames: asyncio.Queue[list[Any] | None] = asyncio.Queue()
        lost = partial(frames.put_nowait, None)
        connection = await connect(self.address, frames.put_nowait, lost, self._secret)
        try:
            connection.send(["watch"])
            while (frame := await frames.get()) is not None:
                yield frame
            raise self._lost()
        finally:
            connection.close()

    async def _ask(self, *question: Any) -> Any:
        if self._asking is None:
            self._asking = await connect(self.address, self._on_answer, self._on_lost, self._secret)
        number = next(self._numbers)
        answer = asyncio.get_running_loop().create_future()
        self._questions[number] = answer
        self._asking.send([question[0], number, *question[1:]])
        try:
            async with asyncio.timeout(_ANSWER_TIMEOUT_S):
                return await answer
        except TimeoutError as error:
            raise RegistryError(f"registry at {self.address}: no answer") from error
        finally:
            self._questions.pop(number, None)

    def _on_answer(self, frame: list[Any]) -> None:
        match frame:
            case ["answer", int(number), value]:
                if (answer := self._questions.get(number)) is not None and not answer.done():
                    answer.set_result(value)
            case _:
                log.warning("registry at %s sent an unknown frame %s", self.address, kind_of(frame))

    def _on_lost(self) -> None:
        self._asking = None
        for question in self._questions.values():
            if not question.done():
                question.set_exception(self._lost())

    def _lost(self) -> RegistryError:
        return RegistryError(f"registry at {self.address}: connection lost")


def _changes(frame: list[Any], known: dict[str, WorkerRecord]) -> list[Change]:
    """The frame's changes, applied to ``known``."""
    match frame:
        case ["snapshot", records]:
            changes = difference(known, msgspec.convert(records, list[WorkerRecord]))
        case ["changes", packed]:
            changes = [_unpacked(change) for change in packed]
        case _:
            raise RegistryError(f"the registry sent an unknown frame {frame[0]!r}")
    for change in changes:
        if isinstance(change, WorkerUp):
            known[change.record.worker_id] = change.record
        else:
            known.pop(change.worker_id, None)
    return changes


def _unpacked(change: list[Any]) -> Change:
    if change[0] == "up":
        return WorkerUp(record=msgspec.convert(change[1], WorkerRecord))
    return WorkerDown(worker_id=str(change[1]), reason=str(change[2]))
