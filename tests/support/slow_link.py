"""Two network namespaces, joined with each other and with this one; one's way out can be slow."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress

from attrs import frozen

__all__ = ["ONLY_TCP", "Namespace", "SlowLink", "slow_link"]

ONLY_TCP: Mapping[str, str] = {"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": "eth"}
"""Otherwise UCX sees that both processes are on one machine, and reads memory past the network."""


@frozen
class Namespace:
    """Where a process may run: put ``command`` before its own."""

    name: str
    host: str

    @property
    def command(self) -> tuple[str, ...]:
        return ("ip", "netns", "exec", self.name)


@frozen
class SlowLink:
    """What leaves ``slow`` is limited; everything else is not."""

    slow: Namespace
    fast: Namespace

    def limit(self, bytes_per_s: int) -> None:
        """Let so much out of ``slow``, from now on."""
        rate = f"rate {bytes_per_s * 8}bit burst 16kb latency 1s"
        _run(f"ip netns exec {self.slow.name} tc qdisc replace dev eth root tbf {rate}")


@contextmanager
def slow_link() -> Iterator[SlowLink]:
    """Raises PermissionError where namespaces may not be made, or there are no tools for it."""
    if shutil.which("ip") is None or shutil.which("tc") is None or os.geteuid() != 0:
        raise PermissionError("network namespaces need root, and iproute2's `ip` and `tc`")
    bridge, subnet = _new_bridge()
    slow = Namespace(f"{bridge}-slow", f"{subnet}.1")
    fast = Namespace(f"{bridge}-fast", f"{subnet}.2")
    try:
        _run(f"ip addr add {subnet}.254/24 dev {bridge}")
        _run(f"ip link set {bridge} up")
        for place, end in ((slow, f"{bridge}s"), (fast, f"{bridge}f")):
            _run(f"ip netns add {place.name}")
            _run(f"ip link add {end} type veth peer name eth netns {place.name}")
            _run(f"ip link set {end} master {bridge} up")
            _run(f"ip -n {place.name} addr add {place.host}/24 dev eth")
            _run(f"ip -n {place.name} link set eth up")
            _run(f"ip -n {place.name} link set lo up")
        yield SlowLink(slow, fast)
    finally:
        for undo in (
            f"ip netns del {slow.name}",
            f"ip netns del {fast.name}",
            f"ip link del {bridge}",
        ):
            with suppress(PermissionError):
                _run(undo)


def _new_bridge() -> tuple[str, str]:
    """Its name and its subnet; other test runs have others."""
    for number in range(1, 251):
        try:
            _run(f"ip link add cmt{number} type bridge")
        except PermissionError as error:
            if "File exists" not in str(error):
                raise
        else:
            return f"cmt{number}", f"10.213.{number}"
    raise PermissionError("all 250 bridges for tests are taken: remove those named cmt...")


def _run(command: str) -> None:
    done = subprocess.run(command.split(), capture_output=True, text=True, check=False)
    if done.returncode:
        raise PermissionError(f"{command}: {done.stderr.strip()}")
