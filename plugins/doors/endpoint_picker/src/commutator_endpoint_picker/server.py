"""The listening server of the endpoint picker."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2_grpc

from commutator.contract.door import OpenDoor
from commutator.contract.protocol import MountedProtocol
from commutator.errors import ConfigError
from commutator.frontend import FrontendServices
from commutator_endpoint_picker.call import PickerParts
from commutator_endpoint_picker.config import EndpointPickerConfig
from commutator_endpoint_picker.exchange import Exchange
from commutator_endpoint_picker.messages import METHOD, SERVICE
from commutator_grpc.health import HealthServicer
from commutator_grpc.server import listen, server_options
from commutator_http.app import StaticKeys
from commutator_http.config import HttpConfig
from commutator_http.server import Runner, open_local

_DRAIN_S = 86_400.0
"""Longer than any drain: ``close`` ends it."""
_FORGET_S = 60.0


async def open_server(
    config: EndpointPickerConfig,
    services: FrontendServices,
    protocols: Sequence[MountedProtocol],
    local_socket: str | None = None,
) -> OpenPicker:
    """Listen on the configured address; on the Unix socket ``local_socket`` HTTP is spoken.

    Raises ConfigError when an address cannot be listened on, a file or a key cannot be read, there
    is nothing to serve, or workers hand over and no front door beside them could.
    """
    if not services.models:
        raise ConfigError(["models: there is nothing to serve; add a model"])
    if not protocols:
        raise ConfigError(["protocols: an endpoint picker without any reads no request"])
    loaded = services.loaded
    if loaded is not None and loaded.config.disaggregation is not None and not config.endpoints:
        problem = (
            "disaggregation: a gateway sends a request to one worker; run a front door beside "
            "each worker and name its port in the door's `endpoints`, or leave it out"
        )
        raise ConfigError([problem], "frontend")
    gate = services.gate
    if config.api_keys:
        keys = StaticKeys([secret.reveal() for secret in config.api_keys])
        gate = gate.after("api_keys", keys)
    parts = PickerParts(config, services, gate, protocols)
    server = grpc.aio.server(
        options=server_options(config), maximum_concurrent_rpcs=config.max_calls
    )
    health = HealthServicer(services, ["readiness", SERVICE], alive=["liveness"])
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    server.add_generic_rpc_handlers((_Process(parts),))
    port = listen(server, config)
    await server.start()
    local = None
    if local_socket is not None:
        try:
            local = await open_local(HttpConfig(), services, protocols, local_socket)
        except BaseException:
            await server.stop(None)
            raise
    return OpenPicker(server, port, parts, local)


class OpenPicker(OpenDoor):
    """The listening server."""

    def __init__(
        self, server: grpc.aio.Server, port: int, parts: PickerParts, local: Runner | None
    ) -> None:
        """``local`` serves the run's own user until the end."""
        self.port = port
        self._server = server
        self._local = local
        self._stopping: asyncio.Task[None] | None = None
        self._forgetting = asyncio.create_task(_forget_the_gone(parts))

    async def stop_accepting(self) -> None:
        # Gateways are told to go elsewhere; to end a stream early would cut its answer.
        self._stopping = asyncio.create_task(self._server.stop(_DRAIN_S))
        await asyncio.sleep(0)

    async def close(self) -> None:
        tasks = [task for task in (self._stopping, self._forgetting) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._server.stop(None)
        if self._local is not None:
            await self._local.cleanup()


async def _forget_the_gone(parts: PickerParts) -> None:
    while True:
        await asyncio.sleep(_FORGET_S)
        found = parts.services.dispatcher.statuses()
        parts.endpoints.keep({one.worker_id for some in found for one in some})


class _Process(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Answers the one method; messages stay bytes."""

    def __init__(self, parts: PickerParts) -> None:
        self._handler = grpc.stream_stream_rpc_method_handler(partial(_process, parts))

    def service(self, handler_call_details: Any) -> grpc.RpcMethodHandler | None:
        return self._handler if handler_call_details.method == METHOD else None


async def _process(parts: PickerParts, messages: Any, context: Any) -> None:
    del messages  # they are read from the context
    await Exchange(parts, context).run()
