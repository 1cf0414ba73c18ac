"""Listening sockets that can stop taking connections without losing one that is on its way."""

from __future__ import annotations

import ctypes
import socket
import struct
import sys
from collections.abc import Iterable
from contextlib import suppress

__all__ = ["listening_sockets", "turn_away"]

_SO_ATTACH_FILTER = 26
_INSTRUCTION = struct.Struct("=HBBI")
# Classic BPF over the TCP header: drop what has SYN but not ACK in its flags, pass all else.
_DROP_SYN = (
    (0x30, 0, 0, 13),  # load the byte with the flags
    (0x54, 0, 0, 0x12),  # keep SYN and ACK
    (0x15, 0, 1, 0x02),  # only SYN: go on; otherwise skip one
    (0x06, 0, 0, 0),  # drop
    (0x06, 0, 0, 0xFFFFFFFF),  # pass
)


def listening_sockets(
    host: str, port: int, *, backlog: int, reuse_port: bool
) -> list[socket.socket]:
    """One for each address of ``host``; port 0 chooses one, the same for all. Raises OSError."""
    sockets: list[socket.socket] = []
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    try:
        for family, _, _, _, address in dict.fromkeys(found):
            made = socket.create_server(
                (address[0], port), family=family, backlog=backlog, reuse_port=reuse_port
            )
            sockets.append(made)
            port = made.getsockname()[1]
    except OSError:
        for made in sockets:
            made.close()
        raise
    return sockets


def turn_away(sockets: Iterable[socket.socket]) -> None:
    """Ignore new connection attempts; those already begun can still be accepted.

    Closing a listening socket resets the connections that wait in its queue, although their
    clients may have sent requests already. Ignored attempts are repeated by the client's system,
    and find the port closed, or another process listening. Does nothing but on Linux.
    """
    if sys.platform != "linux":
        return
    code = ctypes.create_string_buffer(b"".join(_INSTRUCTION.pack(*line) for line in _DROP_SYN))
    program = struct.pack("@HL", len(_DROP_SYN), ctypes.addressof(code))
    for listening in sockets:
        with suppress(OSError):  # a hardened kernel may refuse filters
            listening.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)
