"""One call over gRPC: its metadata, its message, read within limits, and the answer to it.

Who sends it is asked before its message is read: until then a client has no more room than the
window of its stream.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any
from urllib.parse import unquote

from multidict import CIMultiDict

from commutator.contract.answer import Failure
from commutator.contract.principal import Credentials, Principal
from commutator.contract.protocol import MountedProtocol, Route
from commutator.errors import RequestError
from commutator.frontend import (
    TIMEOUT_HEADER,
    WORKING_FOR,
    FrontendServices,
    Gate,
    TimeLimit,
    rate_limits,
    require,
)
from commutator_grpc.config import GrpcConfig
from commutator_grpc.outbox import Unread
from commutator_grpc.status import code_of, trailers_of
from commutator_http.byte_budget import ByteBudget
from commutator_http.call import MessageCall, request_id_of, room_for
from commutator_http.connections import Strangers
from commutator_http.middleware import bearer_of

_REQUEST_ID = "x-request-id"
_MESSAGES = 8
"""Messages of the largest size that are parsed at the same time; others wait."""
_MAX_WAITING = 256
_SHORTEST_S = 0.001
_MAX_DETAILS = 2_000
"""Characters of what a status says."""

CallInfo = Any
"""The ``grpc.aio.ServicerContext`` of a call; grpcio's types are not checked."""


class DoorParts:
    """What the calls of one door share."""

    def __init__(self, config: GrpcConfig, services: FrontendServices, gate: Gate) -> None:
        self.config = config
        self.services = services
        self.gate = gate
        self.identifies = not gate.is_open
        self.messages = ByteBudget(_MESSAGES * config.max_message_bytes, _MAX_WAITING)
        """Those that are being parsed, small ones apart."""
        self.unread = Unread(
            config.max_unread_bytes, config.max_calls // 2, config.write_timeout_s, self._dropped
        )
        self.forward_headers = tuple(services.config.forward_headers)
        self.strangers = Strangers()

    def _dropped(self) -> None:
        self.services.metrics.connection_dropped("unread_answer")


async def identify(call: MessageCall, gate: Gate, *, counts: bool) -> None:
    """Find the principal of a call, whose requests it counts among where it ``counts``.

    Raises AuthenticationError, and what says that the principal may send no more, or not so.
    """
    headers = call.headers
    principal: Principal | None = gate.known.get(headers.get("authorization", ""))
    if principal is None:  # not by its key alone
        principal = await gate.principal(
            Credentials(bearer=bearer_of(headers), headers=headers, peer=call.peer)
        )
    call.principal = principal
    WORKING_FOR.set(principal.name)
    if counts:
        if call.explains:
            require(principal, "explain", "X-Commutator-Explain")
        call.counts = call.services.request_limiter.begin(principal)


class RpcCall(MessageCall):
    """What a message of a stream and a call of its own have in common."""

    path_attribute = "rpc.method"

    def __init__(
        self,
        parts: DoorParts,
        route: Route,
        protocol: MountedProtocol,
        headers: Mapping[str, str],
        context: CallInfo,
    ) -> None:
        # The messages of a stream share its metadata, so each has an id of its own.
        request_id = request_id_of({} if route.method == "RPC_STREAM" else headers)
        super().__init__(parts.services, request_id, route.path, route.method, route.path, headers)
        self.protocol = protocol
        self.parts_of_door = parts
        self.context = context

    @property
    def peer(self) -> str | None:
        return address_of(self.context.peer())

    @property
    def forwarded(self) -> Sequence[str]:
        return self.parts_of_door.forward_headers

    def room_for_body(self, *types: str) -> AbstractAsyncContextManager[None]:
        del types  # messages have none
        return room_for(self, self.parts_of_door.messages, len(self.body))

    async def identify(self) -> None:
        """Find the principal, and begin to count the request. Raises AuthenticationError."""
        await identify(self, self.parts_of_door.gate, counts=self.method != "RPC_GET")


class UnaryCall(RpcCall):
    """A call with one message and one answer."""

    answer = b""
    """Sent when the call ends."""

    async def receive(self) -> None:
        """Read the message. Raises Failure, and RequestError where there is none."""
        timeout_s = self.parts_of_door.config.message_timeout_s
        limit = asyncio.timeout(timeout_s)
        try:
            async with limit:
                message = await self.context.read()
        except TimeoutError:
            if not limit.expired():
                raise
            text = f"the message did not arrive within {timeout_s:g} s"
            raise Failure(408, text, "body_too_slow") from None
        if not isinstance(message, bytes):
            raise RequestError("the call has no message", code="invalid_body")
        self.body = message

    def time_limit(self) -> TimeLimit:
        """The deadline of the request: the server's, or an earlier one of the client's."""
        left_s = self.context.time_remaining()
        if left_s is not None and TIMEOUT_HEADER not in self.headers:
            self.headers = CIMultiDict(self.headers)
            self.headers[TIMEOUT_HEADER] = str(max(left_s, _SHORTEST_S))
        return super().time_limit()

    async def begin(
        self,
        content_type: str,
        status: int = 200,
        *,
        failed: Callable[[Failure], bytes] | None = None,
    ) -> None:
        raise NotImplementedError(f"{self.path} has one answer")

    async def write(self, data: bytes) -> None:
        self.context.set_trailing_metadata(tuple(self.trailers()))
        self._begun = True
        self.answer = data

    def trailers(self) -> list[tuple[str, str | bytes]]:
        """The request id and the collected headers; gRPC sends them after the answer."""
        found: list[tuple[str, str | bytes]] = [(_REQUEST_ID, self.request_id)]
        found += [(name.lower(), value) for name, value in self.answer_headers.items()]
        if self.ticket is not None:
            standing = rate_limits(self.ticket.standing)
            found += [(name.lower(), value) for name, value in standing.items()]
        return found

    async def abort(self, failure: Failure) -> None:
        """End the call without an answer. Always raises what grpcio does."""
        trailers = ((_REQUEST_ID, self.request_id), *trailers_of(failure))
        await self.context.abort(code_of(failure), failure.message[:_MAX_DETAILS], trailers)


def headers_of(context: CallInfo) -> CIMultiDict[str]:
    """The metadata of a call but what is binary; names in any case."""
    found: CIMultiDict[str] = CIMultiDict()
    for name, value in context.invocation_metadata() or ():
        if isinstance(value, str):
            found.add(name, value)
    return found


def address_of(peer: str) -> str | None:
    """The IP address in gRPC's "ipv4:127.0.0.1:80"; None where there is none."""
    kind, _, rest = peer.partition(":")
    if kind not in {"ipv4", "ipv6"}:
        return None
    return unquote(rest).rpartition(":")[0].strip("[]") or None
