"""Serves a registry over TCP, in ``commutator.frames``.

client -> server                              server -> client
["register", number, WorkerRecord, ttl_s]     ["answer", number, lease id]
["keep_alive", number, lease id]              ["answer", number, true | false]
["deregister", number, lease id, reason]      ["answer", number, nil]
["set_draining", number, worker id, bool]     ["answer", number, true | false]
["set_role", number, worker id, role]         ["answer", number, true | false]
["read_document", number, name]               ["answer", number, [version, bytes] | nil]
["write_document", number, name, bytes,       ["answer", number, version | nil]
  expected version]
["delete_document", number, name, version]    ["answer", number, true | false]
["watch_document", name]                      ["document", [version, bytes] | nil]  each state
["run", number]                               ["answer", number, RunState]
["watch"]                                     ["snapshot", [WorkerRecord, ...]]
                                              ["changes", [["up", WorkerRecord] |
                                                           ["down", worker id, reason], ...]]
                                              ["age", seconds | nil]  each second

Between hosts, a client may do what its certificate allows: announce the workers of its own host, or
watch, or drain, or share. Everything else, and what the registry cannot answer, is answered by
["failed", number, message], a worker id that belongs to another worker by
["taken", number, worker id, who has it].

Front doors also exchange their loads here: the server forwards each message of one to all others
unchanged. It drops messages for a slow reader, as the next message replaces them.

["share", peer, number, {worker id:           ["shared", peer, number, {...}]
  [requests, prefill tokens, blocks]}]
["share", peer, number, nil]                  ["shared", peer, number, nil]    it has stopped
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Container, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from commutator.contract.registry import Change, Document, Registry, WorkerUp
from commutator.contract.service import Receiver, Service
from commutator.contract.worker import Role, WorkerRecord
from commutator.errors import NameTakenError, RegistryError
from commutator.frames import FrameProtocol, kind_of
from commutator.registry.unready import RunState, UnreadyWorker
from commutator.trust import (
    Identity,
    Listener,
    Right,
    RunSecret,
    ServerGate,
    listen,
    refused_connections,
)

log = logging.getLogger(__name__)

SERVICE = "registry"
"""The service that both ends of a connection prove themselves for."""

_MAX_UNSENT_BYTES = 64 << 10
_AGE_EVERY_S = 1.0


class _Connection:
    def __init__(self, server: RegistryServer) -> None:
        self._server = server
        self._tasks: set[asyncio.Task[None]] = set()
        self.frames = FrameProtocol(self._on_frame, self._on_lost, server.gate)
        self.shares = False
        """Whether this is a front door that shares its load."""
        self._receivers: dict[str, Receiver] = {}
        """By the name of their service, from its first frame on."""
        server.connections.add(self)

    def end(self) -> None:
        self._server.connections.discard(self)
        for task in self._tasks:
            task.cancel()
        receivers, self._receivers = self._receivers, {}
        for receiver in receivers.values():
            receiver.on_lost()

    def _on_lost(self, reason: str) -> None:
        del reason
        self.end()

    def _on_frame(self, frame: list[Any]) -> None:
        peer = self.frames.identity
        if peer is not None and (problem := self._server.objection(peer, frame)) is not None:
            self._refuse(frame, problem)
            return
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

    def _refuse(self, frame: list[Any], problem: str) -> None:
        """Log and count what a certificate does not allow, and answer it."""
        assert self.frames.transport is not None
        self._server.gate.refuse(self.frames.transport, problem)
        match frame:
            case [str(), int(number), *_] if frame[0] != "share":
                self.frames.send(["failed", number, problem])
            case _:
                self.frames.close()

    def _on_service_frame(self, frame: list[Any]) -> None:
        name = frame[0]
        if name not in self._receivers:
            self._receivers[name] = self._server.services[name].connected(self.frames)
        try:
            if len(frame) == 1:
                raise ValueError("it says nothing")  # noqa: TRY301 - handled with the others
            self._receivers[name].on_frame(frame)
        except (ValueError, TypeError) as error:
            log.warning("a registry client sent a wrong %r frame: %s", name, error)
            self.frames.close()

    async def _handle(self, frame: list[Any]) -> None:
        try:
            match frame:
                case ["watch"]:
                    await self._watch()
                case ["watch_document", str(name)]:
                    await self._watch_document(name)
                case [str(question), int(number), *arguments] if question in _QUESTIONS:
                    kinds, ask = _QUESTIONS[question]
                    value = await ask(self._server, *msgspec.convert(arguments, kinds))
                    self.frames.send(["answer", number, value])
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

    async def _watch_document(self, name: str) -> None:
        """A registry that cannot is told by the end of the connection."""
        try:
            async for document in self._server.registry.watch_document(name):
                self.frames.send(["document", _packed_document(document)])
        except RegistryError as error:
            self.frames.send(["failed", 0, str(error)])


class RegistryServer:
    """Lets other processes use ``registry``, and ``services`` by their names.

    They are processes of the run of ``secret``, by default that of this process; all others are
    refused.
    """

    def __init__(
        self,
        registry: Registry,
        services: Iterable[Service] = (),
        *,
        secret: RunSecret | None = None,
    ) -> None:
        self.registry = registry
        self.services: dict[str, Service] = {}
        """By name: the first word of their frames."""
        self.serve(services)
        self.unready: Callable[[], Sequence[UnreadyWorker]] = tuple
        """The workers that the server's deployment starts, or cannot start."""
        self.gate = ServerGate(SERVICE, secret)
        self.connections: set[_Connection] = set()
        self._lease_hosts: dict[int, str] = {}
        """The host of each worker that was registered here, by lease."""
        self._listener: Listener | None = None

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> str:
        """Listen; returns "host:port"."""
        self._listener = await listen(lambda: _Connection(self).frames, SERVICE, host, port)
        return f"{host}:{self._listener.port}"

    def serve(self, services: Iterable[Service]) -> None:
        """Let front doors use these as well; a service replaces another one of its name."""
        self.services |= {service.name: service for service in services}

    def objection(self, peer: Identity, frame: list[Any]) -> str | None:
        """Why a peer's certificate does not allow what it asks; None if it does."""
        right = _needed_right(frame, self.services)
        if not peer.may(right):
            return f"{peer} must not {right}"
        match frame:
            case ["register", _, {"host": host, "worker_id": str(worker_id)}, *_]:
                if host == peer.name and worker_id.startswith(f"{peer.name}-"):
                    return None
                return f"{peer} must not register worker {worker_id[:100]!r} of another host"
            case ["register", *_]:
                return f"{peer} must name its host in what it registers"
            case ["keep_alive" | "deregister", _, int(lease_id), *_]:
                host = self._lease_hosts.get(lease_id, peer.name)  # unknown leases have lapsed
                return None if host == peer.name else f"{peer} does not hold the lease {lease_id}"
            case _:
                return None

    async def register(self, worker: WorkerRecord, ttl_s: float) -> int:
        """As ``Registry.register``; remembers whose lease it is."""
        lease_id = await self.registry.register(worker, ttl_s)
        self._lease_hosts[lease_id] = worker.host
        return lease_id

    async def keep_alive(self, lease_id: int) -> bool:
        """As ``Registry.keep_alive``."""
        alive = await self.registry.keep_alive(lease_id)
        if not alive:
            self._lease_hosts.pop(lease_id, None)
        return alive

    async def deregister(self, lease_id: int, reason: str) -> None:
        """As ``Registry.deregister``."""
        await self.registry.deregister(lease_id, reason)
        self._lease_hosts.pop(lease_id, None)

    async def run_state(self) -> Any:
        """What only this process knows of the run, as plain data."""
        state = RunState(refused=dict(refused_connections()), unready=list(self.unready()))
        return msgspec.to_builtins(state)

    async def read_document(self, name: str) -> list[Any] | None:
        """As ``Registry.read_document``, as plain data."""
        return _packed_document(await self.registry.read_document(name))

    def pass_on(self, sender: _Connection, frame: list[Any]) -> None:
        """Send what one front door shares to all others that share."""
        for connection in self.connections:
            unsent = connection.frames.unsent_bytes
            if connection.shares and connection is not sender and unsent < _MAX_UNSENT_BYTES:
                connection.frames.send(["shared", *frame[1:]])

    async def stop(self) -> None:
        """Stop listening and close every connection. Idempotent."""
        if self._listener is not None:
            self._listener.close()
        for connection in list(self.connections):
            connection.frames.close()
            connection.end()


_QUESTIONS: Mapping[str, tuple[Any, Callable[..., Awaitable[Any]]]] = {
    "register": (tuple[WorkerRecord, float], RegistryServer.register),
    "keep_alive": (tuple[int], RegistryServer.keep_alive),
    "deregister": (tuple[int, str], RegistryServer.deregister),
    "set_draining": (tuple[str, bool], lambda server, *a: server.registry.set_draining(*a)),
    "set_role": (tuple[str, Role], lambda server, *a: server.registry.set_role(*a)),
    "run": (tuple[()], RegistryServer.run_state),
    "read_document": (tuple[str], RegistryServer.read_document),
    "write_document": (
        tuple[str, bytes, int],
        lambda server, name, value, at: server.registry.write_document(name, value, expected=at),
    ),
    "delete_document": (
        tuple[str, int],
        lambda server, name, at: server.registry.delete_document(name, expected=at),
    ),
}
"""By its name, the kinds of a question's arguments, and who answers it."""


def _needed_right(frame: list[Any], services: Container[str]) -> Right:
    match frame[0]:
        case "register" | "keep_alive" | "deregister":
            return Right.ANNOUNCE
        case "set_draining" | "set_role" | "write_document" | "delete_document":
            return Right.OPERATE
        case "share":
            return Right.SHARE
        case str(name) if name in services:
            return Right.SHARE
        case _:
            return Right.WATCH


def _refusal(number: int, error: RegistryError) -> list[Any]:
    if isinstance(error, NameTakenError):
        return ["taken", number, error.worker_id, error.holder]
    return ["failed", number, str(error)]


def _packed_document(document: Document | None) -> list[Any] | None:
    return None if document is None else [document.version, document.value]


def _packed(change: Change) -> list[Any]:
    if isinstance(change, WorkerUp):
        return ["up", change.record]
    return ["down", change.worker_id, change.reason]
