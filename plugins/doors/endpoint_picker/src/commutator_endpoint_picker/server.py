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
from commutator_grpc.server import gate_of, serve, server_options

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
    parts = PickerParts(config, services, gate_of(config, services), protocols)
    server = grpc.aio.server(
        options=server_options(config), maximum_concurrent_rpcs=config.max_calls
    )
    health = HealthServicer(services, ["readiness", SERVICE], alive=["liveness"])
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    server.add_generic_rpc_handlers((_Process(parts),))
    return OpenPicker(await serve(server, config, services, protocols, local_socket), parts)


class OpenPicker(OpenDoor):
    """The listening server, and what is forgotten meanwhile."""

    def __init__(self, server: OpenDoor, parts: PickerParts) -> None:
        self.port = server.port
        self._server = server
        self._forgetting = asyncio.create_task(_forget_the_gone(parts))

    async def stop_accepting(self) -> None:
        await self._server.stop_accepting()

    async def close(self) -> None:
        self._forgetting.cancel()
        await asyncio.gather(self._forgetting, return_exceptions=True)
        await self._server.close()


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
