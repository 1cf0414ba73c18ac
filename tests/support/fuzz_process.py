"""Fuzzing of another process: cases, and what none of them may cause there."""

from __future__ import annotations

import json
import os
import re
import socket
import struct
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import msgspec
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

CASES = int(os.environ.get("FUZZ_CASES", "200"))
FEW_CASES = CASES if CASES > 1000 else CASES // 4
"""Of what is tried at a second and third address in a usual test run."""
WARM_UP = max(50, CASES // 10)
ANSWER_S = 0.02
"""Enough for most answers; a case without one, such as half a request, is left after it."""
MOST_TURN_S = 0.05
MOST_GROWTH_BYTES = 24 << 20
"""Allocators keep what they freed: this is what 10,000 cases may leave behind, not each."""


class FuzzedProcess:
    """A module of tests that runs under attack; it prints a line of JSON when it is ready."""

    def __init__(self, log: Path, module: str, *arguments: str) -> None:
        self._log = log
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True,
            )  # fmt: skip
        self.said: dict[str, str] = self._read()
        """What it printed first."""

    def report(self) -> dict[str, float]:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        report: dict[str, float] = self._read()
        return report

    def errors(self) -> list[str]:
        """What no input may cause: exceptions that nobody caught."""
        wrong = re.compile(r"Traceback|never retrieved|Exception in callback|Fatal error")
        return [line for line in self._log.read_text().splitlines() if wrong.search(line)]

    def log_bytes(self) -> int:
        return self._log.stat().st_size

    def _read(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the process ended:\n{self._log.read_text()[-3000:]}"
        return json.loads(line)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.terminate()
        self._process.wait(20)


def run_cases(
    target: FuzzedProcess,
    cases: st.SearchStrategy[Any],
    attack: Callable[[Any], None],
    still_serves: Callable[[], None],
    count: int = CASES,
) -> None:
    """Attack with ``count`` cases; assert what no case may cause."""

    def many(count: int) -> None:
        failed: list[Exception] = []

        @given(cases)
        @settings(
            max_examples=count,
            deadline=None,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        def run(case: Any) -> None:
            if failed:
                return
            try:
                attack(case)
            except Exception as error:
                # Hypothesis would try it again, and wait for each deadline in it once more.
                error.add_note(f"the case: {case!r:.2000}")
                failed.append(error)

        run()
        if failed:
            raise failed[0]

    many(WARM_UP)
    still_serves()
    before, log_before = target.report(), target.log_bytes()
    many(count)
    still_serves()
    after = target.report()
    growth_bytes = after["rss_bytes"] - before["rss_bytes"]
    log_bytes = target.log_bytes() - log_before
    print(
        f"{count} cases after {WARM_UP}: longest turn {after['longest_s'] * 1e3:.1f} ms, "
        f"growth {growth_bytes / 2**20:.1f} MiB, log {log_bytes / 2**10:.0f} KiB"
    )
    assert target.errors() == []
    assert after["longest_s"] <= MOST_TURN_S, "a case held the event loop"
    assert growth_bytes <= MOST_GROWTH_BYTES
    assert log_bytes <= count * 2000, "a case filled the log"


LEAVES: st.SearchStrategy[Any] = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=20)
    | st.binary(max_size=40)
    | st.sampled_from(["", 0, -1, 1e308, float("nan"), "x" * 5000, b"\0" * 5000])
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=8) | st.integers(0, 9), inner, max_size=4)
    ),
    max_leaves=10,
)
DEEP = st.integers(1, 5000).map(lambda depth: b"\x91" * depth + b"\xc0")
"""Arrays in arrays."""


def framed(body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + body


def connect(address: str, timeout_s: float = ANSWER_S) -> socket.socket:
    """To "host:port", or to the Unix socket of this path."""
    host, colon, port = address.rpartition(":")
    if colon:
        made = socket.create_connection((host, int(port)), timeout=10)
    else:
        made = socket.socket(socket.AF_UNIX)
        made.connect(address)
    made.settimeout(timeout_s)
    return made


def exchange(address: str, sent: bytes, timeout_s: float = ANSWER_S) -> bytes:
    """What comes back for ``sent``, until the end of the connection or ``timeout_s`` pass."""
    got = b""
    with connect(address, timeout_s) as connection, suppress(OSError):
        connection.sendall(sent)
        while part := connection.recv(65536):
            got += part
    return got


def wire(*known: list[Any]) -> st.SearchStrategy[bytes]:
    """Frames: those of ``known`` with values exchanged or bytes changed, and mere bytes."""

    def exchanged(frame: list[Any]) -> st.SearchStrategy[bytes]:
        parts = [st.just(part) | VALUES for part in frame[1:]]
        changed = st.tuples(st.just(frame[0]), *parts).map(list)
        longer = st.tuples(changed, st.lists(VALUES, max_size=2)).map(lambda two: two[0] + two[1])
        return (changed | longer).map(msgspec.msgpack.encode)

    def damaged(frame: list[Any]) -> st.SearchStrategy[bytes]:
        body = msgspec.msgpack.encode(frame)
        return st.tuples(st.integers(0, len(body) - 1), st.integers(0, 255)).map(
            lambda where: body[: where[0]] + bytes([where[1]]) + body[where[0] + 1 :]
        )

    frames = st.sampled_from(known)
    bodies = frames.flatmap(exchanged) | frames.flatmap(damaged) | DEEP
    bodies |= VALUES.map(msgspec.msgpack.encode) | st.binary(max_size=200)
    stream = st.lists(bodies.map(framed), min_size=1, max_size=4).map(b"".join)
    return stream | st.binary(max_size=300)


def unread(address: str, sent: bytes) -> None:
    """Send, and leave without reading, as a client that vanished."""
    with connect(address) as connection, suppress(OSError):
        connection.sendall(sent)
        connection.setsockopt(
            socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", len(sent) % 2, 0)
        )
