"""What connectors that start a server need: free ports, a replica's GPUs, another Python."""

from __future__ import annotations

import random
import socket
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from commutator.errors import ConfigError

__all__ = ["free_ports", "gpus_of", "python_at"]

_FIRST = 10_000
_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
_TRIES = 100
_random = random.SystemRandom()


def free_ports(host: str, count: int = 1) -> list[int]:
    """Different TCP ports at which nobody listens now.

    Whoever is given one may take a minute to listen. So they are none that the system gives to
    outgoing connections, where it tells which those are. Raises OSError when there are none left.
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
            except OSError:  # somebody has it
                continue
    return socket.create_server((host, 0))


def _ephemeral_begin() -> int:
    try:
        return int(_EPHEMERAL.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return 0


def gpus_of(gpus: Sequence[int], replicas: int, worker_id: str) -> tuple[int, ...]:
    """Those of one replica, whose id ends with its number: each has as many."""
    each = len(gpus) // replicas
    number = int(worker_id.rpartition("-")[2])
    return tuple(gpus[number * each : (number + 1) * each])


def python_at(path: str, advice: str, where: str) -> str:
    """The path of an environment's Python. Raises ConfigError, with advice, if it is not there."""
    # Not resolved: an environment's Python is a link, and knows by its own path where it belongs.
    python = Path(path).expanduser().absolute()
    if not python.is_file():
        raise ConfigError([f"python: there is no {python}; {advice}"], where)
    return str(python)
