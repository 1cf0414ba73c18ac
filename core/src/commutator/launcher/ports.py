"""Free ports for workers; the front door's port, reserved while a deployment runs."""

from __future__ import annotations

import errno
import random
import socket
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from commutator.errors import ConfigError

__all__ = ["PortPicker", "free_ports", "reserved_port"]

_FIRST = 10_000
"""The first port that is picked."""

_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")

_TRIES = 100

_random = random.SystemRandom()


class PortPicker:
    """Picks free TCP ports. The last ``remembered`` are not picked again.

    A process that was given a port may take a minute to listen at it.
    """

    def __init__(self, remembered: int = 512) -> None:
        self._given: deque[int] = deque(maxlen=remembered)

    def pick(self, host: str) -> int:
        while True:
            (port,) = free_ports(host)
            if port not in self._given:
                self._given.append(port)
                return port


@contextmanager
def reserved_port(host: str, port: int) -> Iterator[int]:
    """Reserve ``port``, or a free one for 0, so that only our front doors can listen on it.

    Raises ConfigError when it is in use or ``host`` is not an address of this machine.
    """
    with ExitStack() as held:
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            for family, kind, protocol, _, address in found:
                # Only our own front doors may share the port. A first try without sharing
                # refuses a second deployment of the same user.
                with socket.socket(family, kind, protocol) as alone:
                    _bind(alone, (address[0], port), socket.SO_REUSEADDR)
                    port = alone.getsockname()[1]
                holder = held.enter_context(socket.socket(family, kind, protocol))
                _bind(holder, (address[0], port), socket.SO_REUSEADDR, socket.SO_REUSEPORT)
                holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
        except OSError as error:
            reason = error.strerror or str(error)
            if error.errno == errno.EADDRNOTAVAIL or isinstance(error, socket.gaierror):
                problem = (
                    f"frontend.host: cannot listen on {host}: {reason}; use an address of this "
                    "machine, or 0.0.0.0 for all of them"
                )
            else:
                problem = (
                    f"frontend.port: cannot listen on {host}:{port}: {reason}; choose another "
                    "port with --port or frontend.port (0 for a free one), or another frontend.host"
                )
            raise ConfigError([problem], "front door") from error
        yield port


def _bind(sock: socket.socket, address: tuple[str | int, int], *options: int) -> None:
    if sock.family == socket.AF_INET6:
        sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
    for option in options:
        sock.setsockopt(socket.SOL_SOCKET, option, 1)
    sock.bind(address)


def free_ports(host: str, count: int = 1) -> list[int]:
    """Different TCP ports at which no process listens now.

    They are outside the range that the system gives to outgoing connections, where that is known,
    because a process may take a minute to listen. Raises OSError when no port is left.
    """
    with ExitStack() as held:
        probes = [held.enter_context(_probe(host)) for _ in range(count)]
        return [int(probe.getsockname()[1]) for probe in probes]


def _probe(host: str) -> socket.socket:
    end = _ephemeral_begin()
    if end > _FIRST:
        for _ in range(_TRIES):
            try:
                return socket.create_server((host, _random.randrange(_FIRST, end)))
            except OSError:  # in use
                continue
    return socket.create_server((host, 0))


def _ephemeral_begin() -> int:
    try:
        return int(_EPHEMERAL.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return 0
