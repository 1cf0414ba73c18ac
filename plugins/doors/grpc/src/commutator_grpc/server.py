"""The listening server: its routes, its limits, and how it ends."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2_grpc

from commutator.contract.door import OpenDoor
from commutator.contract.protocol import RPC_METHODS, MountedProtocol, Route
from commutator.errors import ConfigError
from commutator.frontend import FrontendServices, Gate
from commutator_grpc.call import CallInfo, DoorParts, UnaryCall, headers_of
from commutator_grpc.config import GrpcConfig, GrpcServerConfig
from commutator_grpc.health import HealthServicer
from commutator_grpc.outbox import Outbox
from commutator_grpc.reflection import GuardedReflection, pool_of
from commutator_grpc.stream import OpenStreams
from commutator_http.app import StaticKeys
from commutator_http.config import HttpConfig
from commutator_http.middleware import noted
from commutator_http.server import Runner, open_local

log = logging.getLogger(__name__)

_OK = 200
_UNAUTHORIZED = 401
_CLIENT_GONE = 499
_MAX_METADATA_BYTES = 64 << 10
_HANDSHAKE_S = 10.0
_DRAIN_S = 86_400.0
"""Longer than any drain: ``close`` ends it."""
_HEALTH = "grpc.health.v1.Health"

_Handler = Callable[[Any, CallInfo], Awaitable[bytes | None]]


async def open_server(
    config: GrpcConfig,
    services: FrontendServices,
    protocols: Sequence[MountedProtocol],
    local_socket: str | None = None,
) -> OpenServer:
    """Listen on the configured address; on the Unix socket ``local_socket`` HTTP is spoken.

    Raises ConfigError when an address cannot be listened on, a file or a key cannot be read, or a
    protocol has no RPCs, or one that another one has.
    """
    if not services.models:
        raise ConfigError(["models: there is nothing to serve; add a model"])
    parts = DoorParts(config, services, gate_of(config, services))
    streams = OpenStreams()
    routes = _handlers(parts, protocols, streams)
    server = grpc.aio.server(
        options=server_options(config), maximum_concurrent_rpcs=config.max_calls
    )
    names = sorted({path.rpartition("/")[0][1:] for path in routes})
    health_pb2_grpc.add_HealthServicer_to_server(HealthServicer(services, names), server)
    if config.reflection:
        pool = pool_of(protocol.descriptors for protocol in protocols)
        reflection_pb2_grpc.add_ServerReflectionServicer_to_server(
            GuardedReflection(parts, [*names, _HEALTH], pool), server
        )
    server.add_generic_rpc_handlers((_Routes(routes),))
    return await serve(server, config, services, protocols, local_socket, streams.end)


def gate_of(config: GrpcServerConfig, services: FrontendServices) -> Gate:
    """The front door's gate, which also lets in whoever has a key of this door."""
    if not config.api_keys:
        return services.gate
    keys = StaticKeys([secret.reveal() for secret in config.api_keys])
    return services.gate.after("api_keys", keys)


async def serve(
    server: grpc.aio.Server,
    config: GrpcServerConfig,
    services: FrontendServices,
    protocols: Sequence[MountedProtocol],
    local_socket: str | None,
    on_stop: Callable[[], None] = lambda: None,
) -> OpenServer:
    """Listen with ``server``, whose handlers are there; HTTP is spoken on ``local_socket``.

    ``on_stop`` is called before connections are told to go elsewhere. Raises ConfigError when an
    address cannot be listened on, or a file cannot be read.
    """
    port = listen(server, config)
    await server.start()
    local = None
    if local_socket is not None:
        try:
            local = await open_local(HttpConfig(), services, protocols, local_socket)
        except BaseException:
            await server.stop(None)
            raise
    return OpenServer(server, port, local, on_stop)


class OpenServer(OpenDoor):
    """The listening server."""

    def __init__(
        self,
        server: grpc.aio.Server,
        port: int,
        local: Runner | None,
        on_stop: Callable[[], None],
    ) -> None:
        """``local`` serves the run's own user until the end."""
        self.port = port
        self._server = server
        self._local = local
        self._on_stop = on_stop
        self._stopping: asyncio.Task[None] | None = None

    async def stop_accepting(self) -> None:
        self._on_stop()
        # Connections are told to go elsewhere; calls that have begun go on.
        self._stopping = asyncio.create_task(self._server.stop(_DRAIN_S))
        await asyncio.sleep(0)

    async def close(self) -> None:
        if self._stopping is not None:
            self._stopping.cancel()
            await asyncio.gather(self._stopping, return_exceptions=True)
        await self._server.stop(None)
        if self._local is not None:
            await self._local.cleanup()


class _Routes(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Finds what answers a call by its method. Messages stay bytes."""

    def __init__(self, handlers: Mapping[str, grpc.RpcMethodHandler]) -> None:
        self._found = handlers

    def service(self, handler_call_details: Any) -> grpc.RpcMethodHandler | None:
        return self._found.get(handler_call_details.method)


def _handlers(
    parts: DoorParts, protocols: Sequence[MountedProtocol], streams: OpenStreams
) -> dict[str, grpc.RpcMethodHandler]:
    """By path. Raises ConfigError."""
    found: dict[str, grpc.RpcMethodHandler] = {}
    owners: dict[str, MountedProtocol] = {}
    for protocol in protocols:
        routes = [route for route in protocol.routes() if route.method in RPC_METHODS]
        name = type(protocol).__module__
        if not routes:
            raise ConfigError([f"protocols: {name} is not spoken at a grpc door"], "frontend")
        for route in routes:
            if (other := owners.setdefault(route.path, protocol)) is not protocol:
                problem = f"protocols: {route.path} is claimed by {type(other).__module__} and "
                raise ConfigError([f"{problem}{name}; give each a door of its own"], "frontend")
            serve: _Handler
            if route.method == "RPC_STREAM":
                serve = partial(_serve_stream, streams, parts, route, protocol)
                found[route.path] = grpc.stream_stream_rpc_method_handler(serve)
            else:
                # On the wire one message is a stream of one, which is read when it is wanted. The
                # answer leaves with its status: each batch of gRPC's costs a turn of the loop.
                serve = partial(_serve_unary, parts, route, protocol)
                found[route.path] = grpc.stream_unary_rpc_method_handler(serve)
    return found


async def _serve_stream(
    streams: OpenStreams,
    parts: DoorParts,
    route: Route,
    protocol: MountedProtocol,
    messages: Any,
    context: CallInfo,
) -> None:
    del messages  # they are read from the context
    await streams.serve(parts, route, protocol, context)


async def _serve_unary(
    parts: DoorParts, route: Route, protocol: MountedProtocol, messages: Any, context: CallInfo
) -> bytes:
    """The answer to one call; every error ends it with a status."""
    del messages
    call = UnaryCall(parts, route, protocol, headers_of(context), context)
    code, failure = _CLIENT_GONE, None
    try:
        try:
            if parts.identifies:
                await call.identify()
            await call.receive()
            await route.handle(call)
            code = _OK
        finally:
            call.settle()
    except (ConnectionError, grpc.aio.BaseError):  # its client has left
        log.debug("a call ended before its answer was made", exc_info=True)
    except Exception as error:  # noqa: BLE001 - any error must be answered
        failure = noted(call, error)
        code = failure.status
    finally:
        is_quiet = route.method == "RPC_GET"
        if code == _UNAUTHORIZED and not parts.strangers.add(
            "requests without a valid key", call.peer or ""
        ):
            is_quiet = True
        call.account(code, is_quiet=is_quiet)
    if failure is not None:
        await call.abort(failure)
    Outbox(parts.unread, context).leave(call.answer)
    return call.answer


def server_options(config: GrpcServerConfig) -> list[tuple[str, int]]:
    """Those of gRPC's core, which has milliseconds."""

    def ms(seconds: float) -> int:
        return max(1, round(seconds * 1000))

    return [
        ("grpc.so_reuseport", 1),
        ("grpc.max_receive_message_length", config.max_message_bytes),
        ("grpc.max_send_message_length", -1),
        ("grpc.max_metadata_size", _MAX_METADATA_BYTES),
        ("grpc.absolute_max_metadata_size", _MAX_METADATA_BYTES),
        ("grpc.server_handshake_timeout_ms", ms(_HANDSHAKE_S)),
        ("grpc.max_allowed_incoming_connections", config.max_connections),
        ("grpc.max_concurrent_streams", config.max_calls),
        ("grpc.max_connection_idle_ms", ms(config.keep_alive_timeout_s)),
        ("grpc.keepalive_time_ms", ms(config.ping_s)),
        ("grpc.keepalive_timeout_ms", ms(config.ping_timeout_s)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.min_ping_interval_without_data_ms", ms(config.min_ping_interval_s)),
    ]


def listen(server: grpc.aio.Server, config: GrpcServerConfig) -> int:
    """The bound port. Raises ConfigError."""
    host = f"[{config.host}]" if ":" in config.host else config.host
    address = f"{host}:{config.port}"
    try:
        if config.tls is None:
            bound = server.add_insecure_port(address)
        else:
            key, certificates, of_clients = config.tls.read()
            credentials = grpc.ssl_server_credentials(
                [(key, certificates)],
                root_certificates=of_clients,
                require_client_auth=of_clients is not None,
            )
            bound = server.add_secure_port(address, credentials)
    except OSError as error:
        raise ConfigError([f"tls: {error}"], "frontend") from error
    except RuntimeError as error:
        raise ConfigError([f"cannot listen on {address}: {error}"], "frontend") from error
    if not bound:
        raise ConfigError([f"cannot listen on {address}"], "frontend")
    return int(bound)
