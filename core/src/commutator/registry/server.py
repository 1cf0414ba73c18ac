"""Serves a registry over TCP, in ``commutator.frames``.

client -> server                              server -> client
["register", number, WorkerRecord, ttl_s]     ["answer", number, lease id]
["keep_alive", number, lease id]              ["answer", number, true | false]
["deregister", number, lease id, reason]      ["answer", number, nil]
["set_draining", number, worker id, bool]     ["answer", number, true | false]
["set_role", number, worker id, role]         ["answer", number, true | false]
["refused_connections", number]               ["answer", number, {service: count}]
["watch"]                                     ["snapshot", [WorkerRecord, ...]]
                                              ["changes", [["up", WorkerRecord] |
                                                           ["down", worker id, reason], ...]]
                                              ["age", seconds | nil]  each second

What the registry cannot answer is answered by ["failed", number, message], a worker id that belongs
to another worker by ["taken", number, worker id, who has it].

Front doors also exchange their loads here: the server forwards each message of one to all others
unchanged. It drops messages for a slow reader, as the next message replaces them.

["share", peer, number, {worker id:           ["shared", peer, number, {...}]
  [requests, prefill tokens, blocks]}]
["share", peer, number, nil]                  ["shared", peer, number, nil]    it has stopped
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from commutator.contract.registry import Change, Registry, WorkerUp
from commutator.contract.worker import Role, WorkerRecord
from commutator.errors import NameTakenError, RegistryError
from commutator.frames import FrameProtocol, kind_of
from commutator.trust import Gate, RunSecret, ServerGate, refused_connections

__all__ = [
    "SERVICE",
    "RegistryServer",
    "Service",
]

log = logging.getLogger(__name__)

SERVICE = "registry"
"""The service that both ends of a connection prove themselves for."""

_MAX_UNSENT_BYTES = 64 << 10
_AGE_EVERY_S = 1.0

Service = Callable[[Callable[[list[Any]], None]], Callable[[list[Any]], None]]
"""What else is served on the port: given how to answer one connection, it returns what takes that
connection's frames, which raises ValueError or TypeError for a wrong one."""


class _Connection:
    def __init__(self, server: RegistryServer) -> None:
        self._server = server
        self._tasks: set[asyncio.Task[None]] = set()
        self.frames = FrameProtocol(self._on_frame, self._on_lost, server.gate)
        self.shares = False
        """Whether this is a front door that shares its load."""
        self._services: dict[str, Callable[[list[Any]], None]] = {}
        """By the first word of their frames, from the first of these on."""
        server.connections.add(self)

    def end(self) -> None:
        self._server.connections.discard(self)
        for task in self._tasks:
            task.cancel()

    def _on_lost(self, reason: str) -> None:
        del reason
        self.end()

    def _on_frame(self, frame: list[Any]) -> None:
        match frame:
            case ["share", str(), int(), dict() | None]:
                self.shares = True
                self._server.pass_on(self, frame)
                return
        if isinstance(frame[0], str) and frame[0] in self._server.services:
            self._on_service_frame(frame)
            return
        task = asyncio.get_running_loop().create_task(self._handle(frame))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _on_service_frame(self, frame: list[Any]) -> None:
        name = frame[0]
        if name not in self._services:
            self._services[name] = self._server.services[name](self.frames.send)
        try:
            self._services[name](frame)
        except (ValueError, TypeError) as error:
            log.warning("a registry client sent a wrong %r frame: %s", name, error)
            self.frames.close()

    async def _handle(self, frame: list[Any]) -> None:
        registry = self._server.registry
        try:
            match frame:
                case ["register", int(number), record, float() | int() as ttl_s]:
                    worker = msgspec.convert(record, WorkerRecord)
                    self._answer(number, await registry.register(worker, float(ttl_s)))
                case ["keep_alive", int(number), int(lease_id)]:
                    self._answer(number, await registry.keep_alive(lease_id))
                case ["deregister", int(number), int(lease_id), str(reason)]:
                    await registry.deregister(lease_id, reason)
                    self._answer(number, None)
                case ["set_draining", int(number), str(worker_id), bool(draining)]:
                    self._answer(number, await registry.set_draining(worker_id, draining))
                case ["set_role", int(number), str(worker_id), str(role)]:
                    self._answer(number, await registry.set_role(worker_id, Role(role)))
                case ["refused_connections", int(number)]:
                    self._answer(number, refused_connections())
                case ["watch"]:
                    await self._watch()
                case _:
                    raise ValueError("unknown frame")  # noqa: TRY301 - handled with the others
        except RegistryError as error:
            self.frames.send(_refusal(frame[1], error))
        except (ValueError, TypeError) as error:
            log.warning("a registry client sent a wrong %s frame: %s", kind_of(frame), error)
            self.frames.close()

    async def _watch(self) -> None:
        telling = asyncio.create_task(self._tell_age())
        try:
            await self._send_changes()
        finally:
            telling.cancel()

    async def _tell_age(self) -> None:
        """Also by these frames the client knows that the connection lives."""
        while True:
            self.frames.send(["age", self._server.registry.view_age_s()])
            await asyncio.sleep(_AGE_EVERY_S)

    async def _send_changes(self) -> None:
        first = True
        async for changes in self._server.registry.watch():
            if first:
                self.frames.send(
                    ["snapshot", [c.record for c in changes if isinstance(c, WorkerUp)]]
                )
                first = False
            else:
                self.frames.send(["changes", [_packed(change) for change in changes]])

    def _answer(self, number: int, value: Any) -> None:
        self.frames.send(["answer", number, value])


class RegistryServer:
    """Lets other processes use ``registry``, and ``services`` by the first word of their frames.

    They are processes of the run of ``secret``, by default that of this process; all others are
    refused.
    """

    def __init__(
        self,
        registry: Registry,
        services: Mapping[str, Service] | None = None,
        *,
        secret: RunSecret | None = None,
    ) -> None:
        self.registry = registry
        self.services = dict(services or {})
        self.gate: Gate = ServerGate(SERVICE, secret)
        self.connections: set[_Connection] = set()
        self._server: asyncio.Server | None = None

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> str:
        """Listen; returns "host:port"."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _Connection(self).frames, host, port)
        return f"{host}:{self._server.sockets[0].getsockname()[1]}"

    def pass_on(self, sender: _Connection, frame: list[Any]) -> None:
        """Send what one front door shares to all others that share."""
        for connection in self.connections:
            unsent = connection.frames.unsent_bytes
            if connection.shares and connection is not sender and unsent < _MAX_UNSENT_BYTES:
                connection.frames.send(["shared", *frame[1:]])

    async def stop(self) -> None:
        """Stop listening and close every connection. Idempotent."""
        if self._server is not None:
            self._server.close()
        for connection in list(self.connections):
            connection.frames.close()
            connection.end()


def _refusal(number: int, error: RegistryError) -> list[Any]:
    if isinstance(error, NameTakenError):
        return ["taken", number, error.worker_id, error.holder]
    return ["failed", number, str(error)]


def _packed(change: Change) -> list[Any]:
    if isinstance(change, WorkerUp):
        return ["up", change.record]
    return ["down", change.worker_id, change.reason]
