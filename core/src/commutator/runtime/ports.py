"""Free ports for workers, and the front door's port, held for as long as we serve."""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from commutator.engine.launching import free_ports
from commutator.errors import ConfigError

__all__ = ["PortPicker", "reserved_port"]

_REMEMBERED = 512


class PortPicker:
    """Picks free TCP ports, none again soon: its first owner may not listen yet."""

    def __init__(self) -> None:
        self._given: deque[int] = deque(maxlen=_REMEMBERED)

    def pick(self, host: str) -> int:
        while True:
            (port,) = free_ports(host)
            if port not in self._given:
                self._given.append(port)
                return port


@contextmanager
def reserved_port(host: str, port: int) -> Iterator[int]:
    """The port, 0 replaced by a free one; nobody but our front doors can take it meanwhile.

    Raises ConfigError when it is in use or the address is not one of this machine.
    """
    with ExitStack() as held:
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            for family, kind, protocol, _, address in found:
                # Sharing must be possible for our own front doors only, so that a second
                # deployment of the same user is refused: hence a first try without it.
                with socket.socket(family, kind, protocol) as alone:
                    _bind(alone, (address[0], port), socket.SO_REUSEADDR)
                    port = alone.getsockname()[1]
                holder = held.enter_context(socket.socket(family, kind, protocol))
                _bind(holder, (address[0], port), socket.SO_REUSEADDR, socket.SO_REUSEPORT)
                holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
        except OSError as error:
            reason = error.strerror or str(error)
            problem = (
                f"frontend.port: cannot listen on {host}:{port}: {reason}; choose another port "
                "with --port or frontend.port (0 for a free one), or another frontend.host"
            )
            raise ConfigError([problem], "front door") from error
        yield port


def _bind(sock: socket.socket, address: tuple[str | int, int], *options: int) -> None:
    if sock.family == socket.AF_INET6:
        sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
    for option in options:
        sock.setsockopt(socket.SOL_SOCKET, option, 1)
    sock.bind(address)
