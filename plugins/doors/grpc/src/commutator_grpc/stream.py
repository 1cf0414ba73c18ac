"""Streams: each message of a client is a call of its own, and all of them run at the same time.

Each has a principal, whose key may have been revoked since the last one, limits, an account, a line
in the log. Answers are messages of the same stream, one at a time, no faster than the client reads.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

from commutator.contract.answer import Failure
from commutator.contract.protocol import MountedProtocol, Route
from commutator_grpc.call import CallInfo, DoorParts, RpcCall, headers_of
from commutator_grpc.outbox import Outbox
from commutator_grpc.status import code_of, trailers_of
from commutator_http.middleware import noted

_OK = 200
_UNAUTHORIZED = 401
_CLIENT_GONE = 499
_UNAVAILABLE = 503
_LAST_WORDS_S = 1.0
"""A client has this long to read why a request failed."""
_GONE = Failure(_CLIENT_GONE, "the client does not read its answers", "unread_answer")
_ENDS = Failure(
    _UNAVAILABLE,
    "this front door ends; open another stream",
    "draining",
    headers={"Retry-After": "1"},
)


class StreamCall(RpcCall):
    """One message of a stream."""

    def __init__(self, stream: _Stream, message: bytes) -> None:
        super().__init__(
            stream.parts, stream.route, stream.protocol, stream.headers, stream.context
        )
        self.body = message
        self.connection = stream.remembered
        self._stream = stream

    async def write(self, data: bytes) -> None:
        if data:
            self._begun = True
            await self._stream.outbox.write(data)

    async def reply(
        self, parts: list[bytes], content_type: str = "application/json; charset=utf-8"
    ) -> None:
        await super().reply(parts, content_type)
        await self._stream.outbox.flush()

    async def end(self, last: bytes = b"") -> None:
        await super().end(last)
        await self._stream.outbox.flush()  # a drain waits for what is not answered, and no longer

    async def end_failed(self, failure: Failure) -> None:
        """Say what went wrong as the protocol does."""
        async with asyncio.timeout(_LAST_WORDS_S):
            await self._stream.outbox.write(self.failed_message(failure))


class OpenStreams:
    """The streams of one door."""

    def __init__(self) -> None:
        self._open: set[_Stream] = set()
        self._ending = False

    async def serve(
        self, parts: DoorParts, route: Route, protocol: MountedProtocol, context: CallInfo
    ) -> None:
        """Answer the messages of one stream until its client ends it, or it has to end."""
        stream = _Stream(parts, route, protocol, context)
        if self._ending or parts.services.draining:
            await stream.abort(_ENDS)
        self._open.add(stream)
        try:
            ended = await stream.serve()
        finally:
            self._open.discard(stream)
        await stream.outbox.settle()
        if ended is not None:
            await stream.abort(ended)

    def end(self) -> None:
        """Take no more messages; end each stream once its requests are answered."""
        self._ending = True
        for stream in self._open:
            stream.end(_ENDS)

    def __len__(self) -> int:
        return len(self._open)


class _Stream:
    """One open stream."""

    def __init__(
        self, parts: DoorParts, route: Route, protocol: MountedProtocol, context: CallInfo
    ) -> None:
        self.parts = parts
        self.route = route
        self.protocol = protocol
        self.context = context
        self.headers = headers_of(context)
        self.remembered: dict[str, Any] = {}
        """What the protocol remembers of it."""
        self.outbox = Outbox(parts.unread, context, self._lose)
        self._tasks: set[asyncio.Task[None]] = set()
        self._ended: asyncio.Future[Failure] = asyncio.get_running_loop().create_future()
        self._over = False

    def end(self, failure: Failure) -> None:
        """Read no more; when all is answered, say ``failure``."""
        if not self._ended.done():
            self._ended.set_result(failure)

    async def abort(self, failure: Failure) -> None:
        """End the call. Always raises what grpcio does."""
        await self.context.abort(code_of(failure), failure.message, trailers_of(failure))

    async def serve(self) -> Failure | None:
        """Until the client has ended the stream and has its answers, or why it has to end."""
        try:
            failure = await self._read_all()
            while self._tasks:
                await asyncio.wait(self._tasks)
            with suppress(ConnectionError):
                await self.outbox.flush()
            return failure
        finally:  # the client left, or the door closes
            self._cancel()
            if self._tasks:
                await asyncio.wait(self._tasks)

    def _cancel(self) -> None:
        self._over = True
        for task in self._tasks:
            task.cancel()

    def _lose(self) -> None:
        self.end(_GONE)
        self._cancel()

    async def _read_all(self) -> Failure | None:
        idle_s = self.parts.config.stream_idle_s
        while True:
            # A read that is given up cannot be repeated: gRPC allows one at a time.
            reading = asyncio.ensure_future(self.context.read())
            try:
                while not reading.done():
                    awaited = {reading, self._ended}
                    found, _ = await asyncio.wait(
                        awaited, timeout=idle_s, return_when=asyncio.FIRST_COMPLETED
                    )
                    if self._ended in found:
                        return self._ended.result()
                    if not found and not self._tasks:
                        return Failure(408, f"nothing was asked for {idle_s:g} s", "idle")
            finally:
                reading.cancel()  # does nothing to what is done
            message = reading.result()
            if not isinstance(message, bytes):
                return None
            self._begin(message)

    def _begin(self, message: bytes) -> None:
        call = StreamCall(self, message)
        why, most = None, self.parts.config.max_stream_requests
        if len(self._tasks) >= most:
            text = f"{most} requests of this stream are being answered; wait, or open another one"
            why = Failure(429, text, "too_many_requests", headers={"Retry-After": "1"})
        task = asyncio.create_task(self._answer(call, why))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, call: StreamCall, refused: Failure | None) -> None:
        code = _CLIENT_GONE
        try:
            try:
                if refused is not None:
                    raise refused
                if self.parts.identifies:
                    await call.identify()
                await self.route.handle(call)
                code = _OK
            finally:
                call.settle()
        except ConnectionError:
            pass
        except asyncio.CancelledError:
            if self._over:
                return
            # Not the stream is cancelled, but one request of it, by another.
            await self._say(call, Failure(_CLIENT_GONE, "cancelled, as asked", "cancelled"))
        except Exception as error:  # noqa: BLE001 - any error must be answered
            failure = noted(call, error)
            code = failure.status
            await self._say(call, failure)
            if code == _UNAUTHORIZED:
                self.end(failure)
        finally:
            call.account(code, is_quiet=False)

    async def _say(self, call: StreamCall, failure: Failure) -> None:
        try:
            await call.end_failed(failure)
        except (ConnectionError, TimeoutError):
            # A client that does not read leaves no room for others either.
            self.end(failure)
