"""Makes the link of a host bad: frames are lost, and come late. Needs root and /dev/net/tun.

Kernels may lack netem. So a thread carries every frame between two TAP devices: one on the bridge
of all hosts, one on a bridge of its own with the host's cable.
"""

from __future__ import annotations

import fcntl
import os
import random
import select
import struct
import subprocess
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from attrs import define
from tests.support.hosts import Host

__all__ = ["BadLink", "bad_link"]

_TUNSETIFF = 0x400454CA
_TAP_WITHOUT_HEADER = 0x1002
_LONGEST_FRAME_BYTES = 65536


@define
class BadLink:
    """What has become of frames so far."""

    delivered: int = 0
    lost: int = 0


@contextmanager
def bad_link(
    host: Host, *, loss: float = 0.0, delay_s: float = 0.0, seed: int = 1
) -> Iterator[BadLink]:
    """Lose a part of the frames to and from a host, from 0 to 1; the others take that much longer.

    The delay is that of one direction.
    """
    bridge = host.namespace.removesuffix(f"-{host.name}")
    cable = f"{bridge}{host.name}"
    own_bridge, inner, outer = (f"{cable}{letter}" for letter in "xio")
    with ExitStack() as undo:
        taps = []
        for name in (inner, outer):
            taps.append(_tap(name))
            undo.callback(os.close, taps[-1])  # the device goes with its descriptor
        _ip(f"link add {own_bridge} type bridge")
        undo.callback(_ip, f"link del {own_bridge}")
        undo.callback(_ip, f"link set {cable} master {bridge}")
        _ip(f"link set {inner} master {own_bridge} up")
        _ip(f"link set {outer} master {bridge} up")
        _ip(f"link set {own_bridge} up")
        link = BadLink()
        undo.enter_context(_carried(taps[0], taps[1], link, loss, delay_s, random.Random(seed)))
        _ip(f"link set {cable} master {own_bridge}")
        yield link


@contextmanager
def _carried(
    one: int, other: int, link: BadLink, loss: float, delay_s: float, chance: random.Random
) -> Iterator[None]:
    """Carry frames between two TAP devices by a thread, in the block."""
    stop, told = os.pipe()

    def carry() -> None:
        way = {one: other, other: one}
        carried: deque[tuple[float, int, bytes]] = deque()
        while True:
            wait_s = max(0.0, carried[0][0] - time.monotonic()) if carried else None
            ready, _, _ = select.select([stop, one, other], [], [], wait_s)
            if stop in ready:
                return
            now_s = time.monotonic()
            for end in ready:
                frame = os.read(end, _LONGEST_FRAME_BYTES)
                if chance.random() < loss:
                    link.lost += 1
                else:
                    carried.append((now_s + delay_s, way[end], frame))
            while carried and carried[0][0] <= now_s:
                _, end, frame = carried.popleft()
                os.write(end, frame)
                link.delivered += 1

    carrying = threading.Thread(target=carry, name="link")
    carrying.start()
    try:
        yield
    finally:
        os.close(told)
        carrying.join()
        os.close(stop)


def _tap(name: str) -> int:
    """The descriptor of a new TAP device, which gives and takes whole frames."""
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC)
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _TAP_WITHOUT_HEADER))
    return device


def _ip(command: str) -> None:
    done = subprocess.run(["ip", *command.split()], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"ip {command}: {done.stderr.strip()}")
