"""What other hosts reach of a deployment: where its processes listen, and a scan of its ports."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import psutil
from tests.support.slow_link import Namespace, slow_link

from commutator_scaffold.local_cluster import LocalCluster

__all__ = ["OutsideHost", "listeners", "of_others", "outside_host"]

# Prints the ports of a host that accept a connection.
_SCAN = """
import json, socket, sys
found = []
for port in range(1, 65536):
    with socket.socket() as probe:
        probe.settimeout(2)
        if probe.connect_ex((sys.argv[1], port)) == 0:
            found.append(port)
print(json.dumps(found))
"""


class OutsideHost:
    """A network namespace: as far as the network is concerned, another host."""

    def __init__(self, namespace: Namespace) -> None:
        self._namespace = namespace
        self._here = namespace.host.rpartition(".")[0] + ".254"

    def reachable_ports(self) -> set[int]:
        """Every TCP port of this machine that accepts a connection from there."""
        scan = [*self._namespace.command, sys.executable, "-c", _SCAN, self._here]
        done = subprocess.run(scan, check=True, capture_output=True, timeout=300)
        return set(json.loads(done.stdout))


@contextmanager
def outside_host() -> Iterator[OutsideHost]:
    """Raises PermissionError where namespaces may not be made."""
    with slow_link() as link:
        yield OutsideHost(link.fast)


def listeners(cluster: LocalCluster) -> list[tuple[str, int]]:
    """The addresses at which the deployment's processes listen."""
    assert cluster.process is not None
    serve = psutil.Process(cluster.process.pid)
    return [
        (connection.laddr.ip, connection.laddr.port)
        for process in (serve, *serve.children(recursive=True))
        for connection in process.net_connections(kind="inet")
        if connection.status == psutil.CONN_LISTEN
    ]


def of_others(open_ports: Iterable[tuple[str, int]]) -> list[tuple[str, int]]:
    """Those that other hosts reach."""
    return [(ip, port) for ip, port in open_ports if ip not in ("127.0.0.1", "::1")]
