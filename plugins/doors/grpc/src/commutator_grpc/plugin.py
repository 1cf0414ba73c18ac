"""The door of kind `grpc`. Until it is opened it imports no gRPC library."""

from __future__ import annotations

import json
import shlex
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, ClassVar, TypeVar

from commutator import DoorRegister, hookimpl
from commutator.contract.door import Door, DoorAddress, OpenDoor
from commutator.contract.protocol import Example, MountedProtocol
from commutator_grpc.config import GrpcConfig, GrpcServerConfig
from commutator_http.config import key_problems

if TYPE_CHECKING:
    from commutator.frontend import FrontendServices

ServerConfigT = TypeVar("ServerConfigT", bound=GrpcServerConfig)


class GrpcServerDoor(Door[ServerConfigT, "FrontendServices"]):
    """What every door that listens for gRPC has."""

    called: ClassVar[str]
    """For people, such as "a door of kind grpc"."""

    @abstractmethod
    def protocol_problems(self, config: ServerConfigT) -> Iterable[str]:
        """What is wrong with the protocols of the door."""

    def problems(self, config: ServerConfigT) -> Iterable[str]:
        if config.operations != "off":
            yield (
                f"operations: {self.called} serves no operators: leave it out, and write "
                "`admin: {port: 9000}` beside the door, or a door of kind http"
            )
        yield from self.protocol_problems(config)
        yield from key_problems(config.api_keys)
        if config.tls is not None and (problem := config.tls.problem()):
            yield f"tls: {problem}"

    def needs_key(self, config: ServerConfigT, services: FrontendServices) -> bool:
        return bool(config.api_keys) or not services.gate.is_open


class GrpcDoor(GrpcServerDoor[GrpcConfig]):
    """gRPC over HTTP/2."""

    serves_rpcs = True
    called = "a door of kind grpc"

    def protocol_problems(self, config: GrpcConfig) -> Iterable[str]:
        if not config.protocols:
            yield "protocols: a door of kind grpc without any serves nobody: write [{kind: kserve}]"

    def address(self, config: GrpcConfig, netloc: str, example: Example | None) -> DoorAddress:
        url = f"{'https' if config.tls else 'http'}://{netloc}"
        parts = ["grpcurl"]
        if config.tls is None:
            parts.append("-plaintext")
        else:
            parts.append(f"-cacert {shlex.quote(config.tls.cert_file)}")
            if config.tls.client_ca_file is not None:
                parts.append("-cert CLIENT.crt -key CLIENT.key")
        if config.api_keys:
            key = config.api_keys[0]
            value = f"${key.env}" if key.env else f"$(cat {shlex.quote(str(key.file))})"
            parts.append(f'-H "Authorization: Bearer {value}"')
        method = "grpc.health.v1.Health/Check"
        if example is not None and example.rpc is not None and config.reflection:
            method, body = example.rpc
            parts.append(f"-d {shlex.quote(json.dumps(body))}")
        parts.append(f"{netloc} {method}")
        return DoorAddress(url=url, api_url=netloc, example=" ".join(parts))

    async def open(
        self,
        config: GrpcConfig,
        services: FrontendServices,
        protocols: Sequence[MountedProtocol],
        *,
        local_socket: str | None = None,
    ) -> OpenDoor:
        from commutator_grpc.server import open_server

        return await open_server(config, services, protocols, local_socket)


@hookimpl
def door_register(register: DoorRegister) -> None:
    """Kind `grpc`: gRPC over HTTP/2."""
    register("grpc", GrpcConfig, GrpcDoor(), "alpha")
