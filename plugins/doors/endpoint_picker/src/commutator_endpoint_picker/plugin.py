"""The door of kind `endpoint_picker`, and the router `named`. No gRPC until it is opened."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from commutator import DoorRegister, RouterConfig, RouterRegister, hookimpl
from commutator.contract.door import DoorAddress, OpenDoor
from commutator.contract.protocol import Example, MountedProtocol
from commutator_endpoint_picker.config import EndpointPickerConfig
from commutator_endpoint_picker.named import Named
from commutator_grpc.plugin import GrpcServerDoor

if TYPE_CHECKING:
    from commutator.frontend import FrontendServices

_KEEP_ANSWERS = frozenset({"responses"})
"""Protocols that keep answers, which a picker does not read."""


class EndpointPicker(GrpcServerDoor[EndpointPickerConfig]):
    """Envoy's external processing protocol."""

    called = "an endpoint picker"

    def protocol_problems(self, config: EndpointPickerConfig) -> Iterable[str]:
        if not config.protocols:
            yield "protocols: an endpoint picker without any reads no request: [{kind: openai}]"
        for one in config.protocols:
            if one.kind in _KEEP_ANSWERS:
                yield f"protocols: {one.kind} keeps answers, which pass an endpoint picker by"

    def address(
        self, config: EndpointPickerConfig, netloc: str, example: Example | None
    ) -> DoorAddress:
        del example  # a gateway's clients have it
        url = f"{'https' if config.tls else 'http'}://{netloc}"
        check = "commutator epp check http://GATEWAY:PORT --model MODEL"
        return DoorAddress(url=url, api_url=netloc, example=check)

    async def open(
        self,
        config: EndpointPickerConfig,
        services: FrontendServices,
        protocols: Sequence[MountedProtocol],
        *,
        local_socket: str | None = None,
    ) -> OpenDoor:
        from commutator_endpoint_picker.server import open_server

        return await open_server(config, services, protocols, local_socket)


@hookimpl
def door_register(register: DoorRegister) -> None:
    """Kind `endpoint_picker`: tells gateways which worker gets a request."""
    register("endpoint_picker", EndpointPickerConfig, EndpointPicker(), "alpha")


@hookimpl
def router_register(register: RouterRegister) -> None:
    """Kind `named`: the worker that an endpoint picker chose."""
    register("named", RouterConfig, lambda _: Named(), stability="alpha")
