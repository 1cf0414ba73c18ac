"""What the fuzzer found in KV events: readers that come and go while nothing is published."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

import pytest

from commutator_engine_kit import EventPublisher

CONNECTIONS = 4000
MOST_GROWTH_BYTES = 8 << 20
"""An idle publisher once kept 6.5 kB of each lost connection: 26 MB of these."""
# The greeting of ZMTP 3.0 with the mechanism NULL, and the command READY of a SUB socket.
GREETING = b"\xff" + b"\0" * 8 + b"\x7f\x03\x00NULL" + b"\0" * 16 + b"\0" + b"\0" * 31
READY = b"\x04\x19\x05READY\x0bSocket-Type\0\0\0\x03SUB"


def come_and_go(endpoint: str, times: int) -> None:
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    for _ in range(times):
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(GREETING + READY)
            assert connection.recv(10)  # the publisher knows the reader now


def rss_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.slow
@pytest.mark.security
def test_an_idle_publisher_keeps_nothing_of_lost_readers() -> None:
    publisher = EventPublisher(keep_messages=10)
    come_and_go(publisher.source.endpoint, CONNECTIONS // 4)
    before = rss_bytes()
    come_and_go(publisher.source.endpoint, CONNECTIONS)
    deadline_s = time.monotonic() + 10
    while rss_bytes() - before > MOST_GROWTH_BYTES and time.monotonic() < deadline_s:
        time.sleep(0.1)
    grown = rss_bytes() - before
    publisher.close()
    assert grown <= MOST_GROWTH_BYTES
