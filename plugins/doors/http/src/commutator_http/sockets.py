"""WebSockets: each message of a client is a request of its own, with all that requests have.

That is a principal, whose key may have been revoked since the last one, limits, an account, a line
in the log. Messages are answered one after another; while one is, the connection is read all the
same, so that pings are answered and a client that leaves is noticed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from typing import Any

from aiohttp import WSCloseCode, WSMsgType, hdrs, web

from commutator.contract.answer import Failure
from commutator_http.call import (
    DOOR,
    WEBSOCKET,
    ClientConnection,
    DoorParts,
    HttpCall,
    MessageCall,
    request_id_of,
    room_for,
)
from commutator_http.middleware import begin, noted

_MAX_WAITING = 4
"""Messages that wait while one is answered."""
_CLOSE_S = 2.0
"""How long a client has to agree that the connection is closed."""
_OK = 200
_CLIENT_GONE = 499
_UNAUTHORIZED = 401
_UPGRADE_REQUIRED = 426
_UNAVAILABLE = 503

Handle = Callable[[Any], Awaitable[None]]


class SocketCall(MessageCall):
    """One message of a WebSocket."""

    def __init__(
        self,
        opening: HttpCall,
        socket: web.WebSocketResponse,
        message: bytes,
        connection: dict[str, Any],
    ) -> None:
        super().__init__(
            opening.services,
            request_id_of({}),
            opening.endpoint,
            WEBSOCKET,
            opening.path,
            opening.headers,
        )
        self.protocol = opening.protocol
        self.body = message
        self.connection = connection
        self._opening = opening
        self._socket = socket

    @property
    def peer(self) -> str | None:
        return self._opening.peer

    @property
    def forwarded(self) -> Sequence[str]:
        return self._opening.forwarded

    @property
    def query(self) -> Mapping[str, str]:
        return self._opening.query

    @property
    def parts(self) -> Mapping[str, str]:
        return self._opening.parts

    def room_for_body(self, *types: str) -> AbstractAsyncContextManager[None]:
        del types  # a message has none
        return room_for(self, self._opening.parts_of_door.bodies, len(self.body))

    async def write(self, data: bytes) -> None:
        for line in data.split(b"\n"):
            if line:
                self._begun = True
                await self._socket.send_frame(line, WSMsgType.TEXT)


async def serve_socket(handle: Handle, call: HttpCall) -> None:
    """Answer each message by ``handle`` until the client leaves, or is idle.

    Raises ``Failure`` for requests that open no WebSocket.
    """
    parts = call.parts_of_door
    _check(call, parts)
    socket = web.WebSocketResponse(
        timeout=_CLOSE_S,
        heartbeat=parts.websocket_ping_s,
        max_msg_size=parts.max_body_bytes,
        compress=False,  # a few kilobytes may become as much as anybody wants
    )
    call.response = socket
    await socket.prepare(call.request)
    call.sent = True  # that its client leaves later is no failure
    parts.websockets.add(socket)
    try:
        await _serve(handle, call, socket)
    finally:
        parts.websockets.discard(socket)
        with suppress(ConnectionError):
            await socket.close()


def _check(call: HttpCall, parts: DoorParts) -> None:
    if call.headers.get(hdrs.UPGRADE, "").strip().lower() != "websocket":
        text = f"GET {call.path} opens a WebSocket; send a POST for one answer over HTTP"
        headers = {"Upgrade": "websocket"}
        raise Failure(_UPGRADE_REQUIRED, text, "upgrade_required", headers=headers)
    call.check_origin()
    if call.services.draining:
        raise Failure(_UNAVAILABLE, "this front door ends; connect again", "draining")
    if len(parts.websockets) >= parts.max_websockets:
        text = f"{parts.max_websockets} WebSockets are open here; use HTTP, or try again later"
        headers = {"Retry-After": "1"}
        raise Failure(_UNAVAILABLE, text, "too_many_websockets", headers=headers)


async def _serve(handle: Handle, opening: HttpCall, socket: web.WebSocketResponse) -> None:
    messages = _Messages(opening.parts_of_door.max_body_bytes)
    reading = asyncio.create_task(_read(socket, messages))
    client = opening.request.protocol
    state: dict[str, Any] = {}
    try:
        while True:
            if isinstance(client, ClientConnection):
                client.waits_for_client()
            try:
                async with asyncio.timeout(opening.parts_of_door.websocket_idle_s):
                    message = await messages.first()
            except TimeoutError:
                await socket.close(message=b"idle for too long")
                return
            if message is None:
                return
            if isinstance(client, ClientConnection):
                client.works_for_client()
            call = SocketCall(opening, socket, message, state)
            code = await _while(reading, _answer(handle, call, opening))
            if code == _UNAUTHORIZED:
                await socket.close(code=WSCloseCode.POLICY_VIOLATION)
            elif opening.services.draining:
                await socket.close(code=WSCloseCode.GOING_AWAY)
    finally:
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)


async def _while(reading: asyncio.Task[None], work: Awaitable[int]) -> int:
    """What ``work`` returns; it is cancelled when the client leaves."""
    answering = asyncio.ensure_future(work)
    try:
        await asyncio.wait({answering, reading}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        answering.cancel()  # does nothing to what is done
        await asyncio.wait({answering})
    try:
        return answering.result()
    except (asyncio.CancelledError, ConnectionError):
        return _CLIENT_GONE


class _Messages:
    """Those that wait to be answered."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._queue: asyncio.Queue[bytes | None] = asyncio.Queue()

    def add(self, message: bytes) -> bool:
        """False: too many wait."""
        if self._queue.qsize() >= _MAX_WAITING or self._bytes + len(message) > self._max_bytes:
            return False
        self._bytes += len(message)
        self._queue.put_nowait(message)
        return True

    def end(self) -> None:
        """The client has left."""
        self._queue.put_nowait(None)

    async def first(self) -> bytes | None:
        """Taken out; None: the client has left."""
        message = await self._queue.get()
        self._bytes -= 0 if message is None else len(message)
        return message


async def _read(socket: web.WebSocketResponse, messages: _Messages) -> None:
    """Put what comes into ``messages``; pings are answered on the way."""
    try:
        async for message in socket:
            if message.type is not WSMsgType.TEXT:
                await socket.close(code=WSCloseCode.UNSUPPORTED_DATA, message=b"send text")
            elif not messages.add(message.data.encode()):
                text = b"too many messages wait; send one when the last is answered"
                await socket.close(code=WSCloseCode.POLICY_VIOLATION, message=text)
    finally:
        messages.end()


async def _answer(handle: Handle, call: SocketCall, opening: HttpCall) -> int:
    """The status that HTTP would have, once the message is answered."""
    code = _CLIENT_GONE
    try:
        try:
            if opening.parts_of_door.identifies:
                await begin(call, opening)
            await handle(call)
            code = _OK
        finally:
            call.settle()
    except (asyncio.CancelledError, ConnectionError):
        raise
    except Exception as error:  # noqa: BLE001 - any error must be answered
        failure = noted(call, error)
        code = failure.status
        await call.write(call.failed_message(failure))
    finally:
        call.account(code, is_quiet=False)
    return code


async def close_sockets(app: web.Application) -> None:
    """The door closes: tell those who are connected."""
    closing = [socket.close(code=WSCloseCode.GOING_AWAY) for socket in app[DOOR].websockets]
    await asyncio.gather(*closing, return_exceptions=True)
