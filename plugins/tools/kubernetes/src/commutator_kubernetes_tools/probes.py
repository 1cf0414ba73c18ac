"""Serves /live and /ready beside a supervisor."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from commutator.contract.operations import Operations, OperationsDoor, OperationsRoute
from commutator.contract.service import Connection, Receiver, Service

_MOST_CONNECTIONS = 64
_MOST_BYTES = 4096
"""Of a request's head."""
_TIMEOUT_S = 5.0
"""For a whole request and its answer."""


class NothingAtDoors(Operations):
    """Doors have /live and /ready of their own."""

    def routes(self, door: OperationsDoor) -> Iterable[OperationsRoute]:
        del door
        return ()


class _Silent(Receiver):
    def on_frame(self, frame: list[Any]) -> None:
        raise ValueError(f"the service of probes takes no frame, got {frame[:1]!r}")


class Probes(Service):
    """Answers until the supervisor has drained; one request a connection.

    /live: 200 while the supervisor's event loop runs; it starts failed engines again itself, so a
    kubelet has to end the pod only when the supervisor hangs. /ready: 200 while every worker of
    this host is ready, else 503, naming those that are not.
    """

    name = "probes"

    def __init__(self, port: int, supervisor: Any) -> None:
        """Of a ``commutator.supervisor.supervisor.Supervisor``, on a TCP ``port``."""
        self.port = port
        self._supervisor = supervisor
        self._leaving = False
        self._server: asyncio.Server | None = None
        self._connections = 0

    def connected(self, connection: Connection) -> Receiver:
        del connection
        return _Silent()

    async def run(self) -> None:
        dual = socket.has_dualstack_ipv6()
        listener = socket.create_server(
            ("", self.port),
            family=socket.AF_INET6 if dual else socket.AF_INET,
            backlog=_MOST_CONNECTIONS,
            dualstack_ipv6=dual,
        )
        self._server = await asyncio.start_server(self._serve, sock=listener, limit=_MOST_BYTES)
        self.port = self._server.sockets[0].getsockname()[1]
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            self._leaving = True

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections += 1
        try:
            if self._connections <= _MOST_CONNECTIONS:
                with suppress(OSError, EOFError, TimeoutError, asyncio.LimitOverrunError):
                    async with asyncio.timeout(_TIMEOUT_S):
                        head = await reader.readuntil(b"\r\n\r\n")
                        writer.write(self._answer(head.split(b"\r\n", 1)[0]))
                        await writer.drain()
        finally:
            self._connections -= 1
            writer.close()

    def _answer(self, line: bytes) -> bytes:
        status, body = self.state(line.split(b" ")[1:2])
        text = json.dumps(body).encode()
        head = f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nConnection: close\r\n"
        return f"{head}Content-Length: {len(text)}\r\n\r\n".encode() + text

    def state(self, target: list[bytes]) -> tuple[str, dict[str, Any]]:
        """Status line and body for the target of a request."""
        if target == [b"/live"]:
            return "200 OK", {"live": True}
        if target != [b"/ready"]:
            return "404 Not Found", {"error": "there are /live and /ready"}
        fleet = self._supervisor.fleet
        agents = [] if fleet is None else list(fleet.agents())
        waiting = sorted(agent.name for agent in agents if not agent.ready.is_set())
        ready = bool(agents) and not waiting and not self._leaving
        body = {"ready": ready, "draining": self._leaving, "waiting_for": waiting}
        return ("200 OK" if ready else "503 Service Unavailable"), body
