"""The conversation with a gateway about one request: what it says, and what it is told."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack, suppress
from typing import Any

import grpc
import grpc.aio
from multidict import CIMultiDict

from commutator.contract.answer import Failure
from commutator.frontend import rate_limits
from commutator_endpoint_picker.call import PickCall, PickerParts
from commutator_endpoint_picker.messages import (
    BODY_FULL_DUPLEX,
    BODY_NONE,
    answered,
    headers_of,
    parsed,
    passed_body,
    passed_headers,
    passed_trailers,
    picked,
    served_by,
    subset_of,
)
from commutator_endpoint_picker.order import GatewayError, Order
from commutator_endpoint_picker.picking import Pick
from commutator_http.middleware import noted

log = logging.getLogger(__name__)

_MAX_HEADERS = 256
_MAX_HEADER_BYTES = 64 << 10
_SMALL_BYTES = 64 << 10
"""Bodies up to this are read at once; larger ones share a budget."""
_SHOWN = 80
_OK = 200
_FIRST_ERROR = 400
_GONE = 499
_REQUEST_ID = "x-request-id"
_MISCONFIGURED = (
    "the gateway does not send bodies as an endpoint picker needs them: set request_body_mode "
    "FULL_DUPLEX_STREAMED, and response_body_mode FULL_DUPLEX_STREAMED or NONE"
)

Context = Any
"""The ``grpc.aio.ServicerContext`` of a call; grpcio's types are not checked."""


class Exchange:
    """One gRPC stream, from the headers of a request to the end of its answer."""

    def __init__(self, parts: PickerParts, context: Context) -> None:
        self._parts = parts
        self._context = context
        self._order = Order()
        self._handling: asyncio.Task[None] | None = None
        self._duplex = True
        """Whether pieces of the answer have to be given back."""
        self._shown = True
        """Whether the gateway tells of answers. If not, it only ends the stream after them."""
        self._had_body = self._had_trailers = False
        self._early: Any = None
        """The headers of an answer that the gateway gives by itself."""
        self._begun = False
        """The answer's headers were passed on: an error can only cut it."""
        self._late = False
        """The handler failed while the answer was passed on."""
        self._status = _OK

    async def run(self) -> None:
        """Until the gateway ends the stream. Every error is answered, or ends it with a status."""
        try:
            try:
                async with asyncio.timeout(self._parts.config.body_timeout_s):
                    first = await self._next()
            except TimeoutError:
                raise GatewayError("no request arrived") from None
            if first is not None:
                await self._serve(self._call(first))
        except GatewayError as wrong:
            log.warning("a gateway sends what an endpoint picker cannot follow: %s", wrong)
            await self._context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(wrong))

    async def _next(self) -> Any:
        """The next message; None: there is none. Raises GatewayError."""
        data = await self._context.read()
        if not isinstance(data, bytes):
            return None
        request = parsed(data)
        kind = request.WhichOneof("request")
        ends = kind is not None and getattr(getattr(request, kind), "end_of_stream", False)
        self._order.take(kind, ends=ends)
        return request

    def _call(self, first: Any) -> PickCall:
        """Raises GatewayError for headers that no gateway takes itself."""
        found = first.request_headers
        size = sum(len(one.key) + len(one.raw_value or one.value) for one in found.headers.headers)
        if len(found.headers.headers) > _MAX_HEADERS or size > _MAX_HEADER_BYTES:
            text = f"more than {_MAX_HEADERS} headers, or {_MAX_HEADER_BYTES} bytes of them"
            raise GatewayError(text)
        self._had_body = not found.end_of_stream
        if first.HasField("protocol_config"):
            modes = first.protocol_config
            self._duplex = modes.response_body_mode == BODY_FULL_DUPLEX
            self._shown = modes.response_body_mode != BODY_NONE
            if self._had_body and modes.request_body_mode != BODY_FULL_DUPLEX:
                raise GatewayError(_MISCONFIGURED)
        headers: CIMultiDict[str] = CIMultiDict(headers_of(found))
        method, path = headers.get(":method", ""), headers.get(":path", "")
        return PickCall(self._parts, method, path, headers, subset_of(first))

    async def _serve(self, call: PickCall) -> None:
        code, failure = _GONE, None
        try:
            try:
                await self._answer(call)
                code = self._status
            finally:
                await self._settle(call)
        except GatewayError:
            raise
        except (ConnectionError, grpc.aio.BaseError):
            log.debug("a gateway left before it had an answer", exc_info=True)
        except Exception as error:  # noqa: BLE001 - any error must be answered
            failure = noted(call, error)
            code = failure.status
        finally:
            call.account(code, is_quiet=call.is_quiet)
        if failure is not None:
            await self._fail(call, failure)

    async def _answer(self, call: PickCall) -> None:
        """Have the gateway answer the request, or answer it here. Raises what its handler does."""
        if self._parts.identifies:
            await call.identify()
        if call.route is None:
            text = f"{call.method} {call.path[:_SHOWN]} is not served by workers"
            raise Failure(404, text, "not_found")
        async with AsyncExitStack() as held:
            await self._receive(call, held)
            if self._early is not None:
                await self._pass_on(call, None)
                return
            handling = asyncio.ensure_future(call.route.handle(call))
            self._handling = handling
            either: set[asyncio.Future[Any]] = {handling, call.picked}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not call.picked.done():
                await handling
                headers = self._headers(call) | {"content-type": call.content_type}
                await self._context.write(answered(_OK, b"".join(call.whole), headers, "picker"))
                return
            pick = call.picked.result()
            for data in picked(
                pick.decided, had_body=self._had_body, had_trailers=self._had_trailers
            ):
                await self._context.write(data)
            call.body, pick.decided = b"", pick.decided.without_body()
        await self._follow(call, pick, handling)

    async def _receive(self, call: PickCall, held: AsyncExitStack) -> None:
        """Read the body, or the beginning of an answer that came first. Raises Failure."""
        config = self._parts.config
        if call.headers.get("content-encoding", "identity") != "identity":
            raise Failure(415, "expected no Content-Encoding", "unsupported_content_encoding")
        stated = call.headers.get("content-length", "")
        if stated.isdecimal() and int(stated[:_SHOWN]) > config.max_body_bytes:
            raise _too_large(config.max_body_bytes)
        pieces, size = bytearray(), 0
        limit = asyncio.timeout(config.body_timeout_s)
        try:
            async with limit:
                while not self._order.request_over:
                    request = await self._next()
                    if request is None:
                        raise ConnectionError("the gateway ended the stream")
                    if request.HasField("response_headers"):
                        self._early = request
                        return
                    self._had_trailers |= request.HasField("request_trailers")
                    pieces += request.request_body.body
                    if len(pieces) > config.max_body_bytes:
                        raise _too_large(config.max_body_bytes)
                    if size <= _SMALL_BYTES < len(pieces):
                        await held.enter_async_context(
                            self._parts.bodies.hold(config.max_body_bytes)
                        )
                    size = len(pieces)
        except TimeoutError:
            if not limit.expired():
                raise
            text = f"the body did not arrive within {config.body_timeout_s:g} s"
            raise Failure(408, text, "body_too_slow") from None
        call.body = bytes(pieces)

    async def _follow(self, call: PickCall, pick: Pick, handling: asyncio.Task[None]) -> None:
        """Pass the worker's answer on until it ends, the handler fails, or the client leaves."""
        me = asyncio.current_task()
        assert me is not None

        def over(done: asyncio.Task[None]) -> None:
            if not pick.ended.done() and not done.cancelled():
                self._late = True
                me.cancel()

        handling.add_done_callback(over)
        try:
            await self._pass_on(call, pick)
        except asyncio.CancelledError:
            if self._late:
                me.uncancel()
                await handling
                raise ConnectionError("the request ended before its answer did") from None
            if self._shown and not pick.ended.done():
                raise
            me.uncancel()
        finally:
            handling.remove_done_callback(over)
        if not pick.ended.done():
            if self._shown:
                raise ConnectionError("the gateway ended the stream before the answer's end")
            pick.end()
        try:
            await asyncio.shield(handling)
        except asyncio.CancelledError:  # the gateway ends a stream that it needs no more
            me.uncancel()
            await handling

    async def _pass_on(self, call: PickCall, pick: Pick | None) -> None:
        """Until the gateway ends the stream. ``pick``: whose answer it is; None: the gateway's."""
        request, self._early = self._early, None
        write = self._context.write
        while request is not None or (request := await self._next()) is not None:
            kind = request.WhichOneof("request")
            if kind == "response_body":
                body = request.response_body
                if pick is not None and body.body:
                    if call.ttft_s is None:
                        self._first_piece(call)
                    pick.take(body.body)
                for data in passed_body(body.body, ends=body.end_of_stream, duplex=self._duplex):
                    await write(data)
            elif kind == "response_headers":
                self._begun = True
                self._note(request, pick)
                await write(passed_headers(self._headers(call)))
            elif kind == "response_trailers":
                await write(passed_trailers(kind))
            if pick is not None and self._order.answered:
                pick.end()
            request = None

    def _first_piece(self, call: PickCall) -> None:
        call.ttft_s = time.perf_counter() - call.arrived_s
        self._parts.services.metrics.token_times(call.model, call.arrived_s).tokens(1)

    def _note(self, request: Any, pick: Pick | None) -> None:
        """Status and server of an answer whose headers came."""
        for name, value in headers_of(request.response_headers):
            if name == ":status" and value.isdecimal():
                self._status = int(value[:3])
        served = served_by(request)
        if pick is None or served is None or served == pick.decided.endpoints[0]:
            return
        worker_id = self._parts.endpoints.worker_at(served)
        if worker_id is not None:
            pick.moved(worker_id, self._parts.services.dispatcher.load)

    def _headers(self, call: PickCall) -> dict[str, str]:
        """What the client is told beside the answer."""
        added = {**call.answer_headers, _REQUEST_ID: call.request_id}
        if call.ticket is not None:
            added |= rate_limits(call.ticket.standing)
        return added

    async def _settle(self, call: PickCall) -> None:
        """End the handler, and count what the request took."""
        handling = self._handling
        if handling is not None and not handling.done():
            handling.cancel()
            await asyncio.gather(handling, return_exceptions=True)
        if call.picked.done() and not call.picked.cancelled():
            pick, metrics = call.picked.result(), self._parts.services.metrics
            call.workers = (pick.forward.worker_id,)
            tokens = pick.usage.tokens(call.prompt_tokens)
            if self._status >= _FIRST_ERROR:
                call.used(0, 0, 0)
            else:
                call.used(tokens.prompt, tokens.cached, tokens.generated)
                metrics.tokens_used(call.model, tokens.prompt, tokens.cached, tokens.generated)
        call.settle()

    async def _fail(self, call: PickCall, failure: Failure) -> None:
        """Answer the client, or cut the answer that it has begun to get."""
        with suppress(ConnectionError, grpc.aio.BaseError):
            if self._begun:
                await self._context.abort(grpc.StatusCode.UNAVAILABLE, failure.message[:2000])
            assert call.protocol is not None
            headers: Mapping[str, str] = {
                **failure.headers,
                "content-type": call.protocol.failed_type,
                _REQUEST_ID: call.request_id,
            }
            code = failure.code or "error"
            body = call.protocol.failed(failure)
            await self._context.write(answered(failure.status, body, headers, code))


def _too_large(most: int) -> Failure:
    return Failure(413, f"the body is longer than {most} bytes", "body_too_large")
