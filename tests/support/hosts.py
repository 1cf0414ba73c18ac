"""Hosts of a cluster as network namespaces on one bridge: real interfaces, addresses and routes.

Needs root and iproute2. Each host has the address 10.N.0.NUMBER on the interface `eth`.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from attrs import frozen

__all__ = ["Host", "hosts", "why_not"]

_NOBODY = "02:00:00:00:00:00"


@frozen
class Host:
    """One namespace."""

    name: str
    """Short, as in certificates: h1, h2, ..."""
    namespace: str
    address: str

    def command(self, *argv: str | Path) -> list[str]:
        """The command line that runs ``argv`` there."""
        return ["ip", "netns", "exec", self.namespace, *map(str, argv)]

    def pids(self) -> list[int]:
        """The processes that run there."""
        done = subprocess.run(
            ["ip", "netns", "pids", self.namespace], capture_output=True, text=True, check=True
        )
        return [int(pid) for pid in done.stdout.split()]

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to all of its processes at once, as far as that can be done."""
        for pid in self.pids():
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def received_bytes(self) -> int:
        """What has come over its network so far."""
        shown = _run(f"ip -n {self.namespace} -s -j link show dev eth")
        return int(json.loads(shown)[0]["stats64"]["rx"]["bytes"])

    def cut_off(self, *others: Host, cut: bool = True) -> None:
        """Lose every packet to and from other hosts, and nobody is told; or no longer."""
        for other in others:
            for here, there in ((self, other), (other, self)):
                ip = f"ip -n {here.namespace} neigh"
                # Frames for an address of the link layer that nobody has reach nobody.
                if cut:
                    _run(f"{ip} replace {there.address} lladdr {_NOBODY} nud permanent dev eth")
                else:
                    with suppress(RuntimeError):  # a link that went down took it along
                        _run(f"{ip} del {there.address} dev eth")

    def set_link(self, up: bool) -> None:
        """Plug the host's cable in, or pull it: packets are lost, and nobody is told."""
        _run(f"ip -n {self.namespace} link set eth {'up' if up else 'down'}")


def why_not() -> str | None:
    """Why this machine cannot make hosts; None if it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "network namespaces need iproute2's `ip`"
    probe = f"cmtprobe{os.getpid()}"
    try:
        _run(f"ip netns add {probe}")
    except RuntimeError as error:
        return f"network namespaces cannot be made: {error}"
    _run(f"ip netns del {probe}")
    return None


@contextmanager
def hosts(count: int) -> Iterator[Sequence[Host]]:
    """That many hosts, which reach each other and this machine. Raises RuntimeError.

    Processes in them must have ended before the block does.
    """
    bridge, net = _network()
    made = [Host(f"h{i}", f"{bridge}-h{i}", f"{net}.{i}") for i in range(1, count + 1)]
    try:
        _run(f"ip addr add {net}.254/24 dev {bridge}")
        _run(f"ip link set {bridge} up")
        for host in made:
            end = f"{bridge}{host.name}"
            _run(f"ip netns add {host.namespace}")
            _run(f"ip link add {end} type veth peer name eth netns {host.namespace}")
            _run(f"ip link set {end} master {bridge} up")
            _run(f"ip -n {host.namespace} addr add {host.address}/24 dev eth")
            _run(f"ip -n {host.namespace} link set eth up")
            _run(f"ip -n {host.namespace} link set lo up")
        yield made
    finally:
        for host in made:
            # Without the link, which the kernel would delete some time after the namespace.
            for command in (f"link del {bridge}{host.name}", f"netns del {host.namespace}"):
                with suppress(RuntimeError):
                    _run(f"ip {command}")
        with suppress(RuntimeError):
            _run(f"ip link del {bridge}")


def _network() -> tuple[str, str]:
    """A bridge that no other run has, and the beginning of its hosts' addresses."""
    last = 250
    for number in range(200, last):
        try:
            _run(f"ip link add cmh{number} type bridge")
        except RuntimeError:
            continue
        return f"cmh{number}", f"10.{number}.0"
    _run(f"ip link add cmh{last} type bridge")
    return f"cmh{last}", f"10.{last}.0"


def _run(command: str) -> str:
    done = subprocess.run(command.split(), capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{command}: {done.stderr.strip()}")
    return done.stdout
