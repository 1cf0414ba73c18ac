"""The options of the endpoint picker."""

from __future__ import annotations

from collections.abc import Mapping

from attrs import Factory, frozen

from commutator import PositiveInt, PositiveSeconds, Secret, setting
from commutator.contract.settings import Port
from commutator_grpc.config import GrpcServerConfig


@frozen(kw_only=True)
class EndpointPickerConfig(GrpcServerConfig):
    """Tells gateways, by Envoy's external processing protocol, which worker gets a request."""

    api_keys: tuple[Secret, ...] = setting(
        "Clients of the gateway must send one of these as a bearer token; empty lets everyone in.",
        (),
    )
    endpoints: Mapping[str, Port] = setting(
        "By engine, the port of the front door beside each of its workers, at the host of the "
        "worker's address: for engines that answer no HTTP requests, and for hand-over. Such front "
        "doors have the router `named`. Workers of other engines are sent requests themselves.",
        Factory(dict),
    )
    max_body_bytes: PositiveInt = setting("Larger bodies are answered 413.", 8 << 20)
    body_timeout_s: PositiveSeconds = setting(
        "Longest time for a body to arrive; then the client is answered 408.", 60.0
    )
    max_message_bytes: PositiveInt = setting(
        "Larger messages of the gateway end the request; it sends pieces of a body of up to its "
        "buffer's limit.",
        4 << 20,
    )
