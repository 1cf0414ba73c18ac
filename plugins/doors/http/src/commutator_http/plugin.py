"""The door of kind `http`: HTTP/1.1. Until it is opened it imports no server library."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from commutator import DoorRegister, hookimpl
from commutator.contract.door import Door, DoorAddress, OpenDoor
from commutator.contract.protocol import Example, MountedProtocol
from commutator.errors import ConfigError
from commutator_http.config import HttpConfig, key_problems, tls_context

if TYPE_CHECKING:
    from commutator.frontend import FrontendServices


def _data(example: Example) -> str:
    """The body for curl, which reads the file X where `-d` is "@X"."""
    option = "--data-raw" if isinstance(example.body, str) else "-d"
    return f"{option} {shlex.quote(example.text)}"


class HttpDoor(Door[HttpConfig, "FrontendServices"]):
    """HTTP/1.1."""

    def problems(self, config: HttpConfig) -> Iterable[str]:
        yield from key_problems(config.api_keys)
        if config.tls is None:
            return
        try:
            tls_context(config.tls)
        except ConfigError as error:
            yield from (f"tls: {problem}" for problem in error.problems)

    def needs_key(self, config: HttpConfig, services: FrontendServices) -> bool:
        return bool(config.api_keys) or not services.gate.is_open

    def address(self, config: HttpConfig, netloc: str, example: Example | None) -> DoorAddress:
        url = f"{'https' if config.tls else 'http'}://{netloc}"
        security = f" --cacert {shlex.quote(config.tls.cert_file)}" if config.tls else ""
        if example is None:
            return DoorAddress(url=url, api_url=url, example=f"curl -s {url}/ready{security}")
        content_type = shlex.quote(f"Content-Type: {example.content_type}")
        parts = [f"curl -s {url}{example.path}", f"-H {content_type}"]
        if config.api_keys:
            key = config.api_keys[0]
            value = f"${key.env}" if key.env else f"$(cat {shlex.quote(str(key.file))})"
            parts.append(f'-H "Authorization: Bearer {value}"')
        parts.append(f"{security.strip()} {_data(example)}".strip())
        return DoorAddress(url=url, api_url=url + example.api_url, example=" ".join(parts))

    async def open(
        self,
        config: HttpConfig,
        services: FrontendServices,
        protocols: Sequence[MountedProtocol],
        *,
        local_socket: str | None = None,
    ) -> OpenDoor:
        from commutator_http.server import open_server

        return await open_server(config, services, protocols, local_socket)


@hookimpl
def door_register(register: DoorRegister) -> None:
    """Kind `http`: HTTP/1.1."""
    register("http", HttpConfig, HttpDoor(), "beta")
