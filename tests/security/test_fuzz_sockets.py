"""Senseless bytes on every socket: nothing breaks, hangs or grows, and no stranger gets an answer.

``make fuzz`` sends 10,000 cases to each socket; a usual test run sends a few (FUZZ_CASES).
"""

from __future__ import annotations

import json
import os
import re
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import msgspec
import pytest
import zmq
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from tests.support.fuzz_target import KEY

from commutator.contract.request import GenerateRequest, SamplingParams
from commutator.engine.protocol import PROTOCOL, pack_request
from commutator.trust.handshake import MAGIC
from commutator_openai.ui import PAGE_PATHS

pytestmark = pytest.mark.security

CASES = int(os.environ.get("FUZZ_CASES", "200"))
FEW_CASES = CASES if CASES > 1000 else CASES // 4
"""Of what is tried at a second and third address in a usual test run."""
WARM_UP = max(50, CASES // 10)
MOST_TURN_S = 0.05
MOST_GROWTH_BYTES = 24 << 20
"""Allocators keep what they freed: this is what 10,000 cases may leave behind, not each."""
ANSWER_S = 0.02
"""Enough for most answers; a case without one, such as half a request, is left after it."""


class Target:
    """The process under attack."""

    def __init__(self, log: Path) -> None:
        self._log = log
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.fuzz_target"],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True,
            )  # fmt: skip
        self.addresses: dict[str, str] = self._read()

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


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    with Target(tmp_path_factory.mktemp("fuzz") / "log.txt") as target:
        yield target


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


def run_cases(
    target: Target,
    cases: st.SearchStrategy[Any],
    attack: Callable[[Any], None],
    still_serves: Callable[[], None],
    count: int = CASES,
) -> None:
    """Attack with ``count`` cases; assert what this module promises."""

    def many(count: int) -> None:
        @given(cases)
        @settings(
            max_examples=count,
            deadline=None,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        def run(case: Any) -> None:
            attack(case)

        run()

    many(WARM_UP)
    still_serves()
    before, log_before = target.report(), target.log_bytes()
    many(count)
    still_serves()
    after = target.report()
    assert target.errors() == []
    assert after["longest_s"] <= MOST_TURN_S, "a case held the event loop"
    assert after["rss_bytes"] - before["rss_bytes"] <= MOST_GROWTH_BYTES
    assert target.log_bytes() - log_before <= count * 2000, "a case filled the log"


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


REQUEST = pack_request(
    GenerateRequest(
        request_id="r", token_ids=(1, 2, 3), sampling=SamplingParams(max_tokens=3), cache_salt="s"
    )
)
REQUEST_OBJECT = msgspec.msgpack.decode(REQUEST)


def changed_requests() -> st.SearchStrategy[bytes]:
    """A request whose fields have other values, as the token API sends it."""
    assert isinstance(REQUEST_OBJECT, dict)
    fields = st.sampled_from([*REQUEST_OBJECT, "handover", "retention", "extra", "priority"])
    objects = st.dictionaries(fields, VALUES, max_size=3).map(lambda new: REQUEST_OBJECT | new)
    sampling = st.dictionaries(st.sampled_from(list(REQUEST_OBJECT["sampling"])), VALUES).map(
        lambda new: REQUEST_OBJECT | {"sampling": REQUEST_OBJECT["sampling"] | new}
    )
    return (objects | sampling).map(
        lambda body: framed(msgspec.msgpack.encode(["generate", 1, msgspec.msgpack.encode(body)]))
    )


def test_the_token_api(target: Target) -> None:
    address = target.addresses["token"]
    known = wire(
        ["hello", PROTOCOL],
        ["generate", 1, REQUEST],
        ["abort", 1],
        ["ask", 1, "load"],
        ["ask", 1, "drain!"],
        ["ask", 1, "kv", "contents", {}],
    )

    def still_serves() -> None:
        hello = framed(msgspec.msgpack.encode(["hello", PROTOCOL]))
        with connect(address, 5) as connection:
            connection.sendall(hello)
            assert b"info" in connection.recv(1000)

    run_cases(target, known | changed_requests(), lambda case: unread(address, case), still_serves)


def unread(address: str, sent: bytes) -> None:
    """Send, and leave without reading, as a client that vanished."""
    with connect(address) as connection, suppress(OSError):
        connection.sendall(sent)
        connection.setsockopt(
            socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", len(sent) % 2, 0)
        )


def test_the_registry(target: Target) -> None:
    address = target.addresses["registry"]
    record = {"worker_id": "w", "engine": "e", "kind": "k", "model": "m", "address": "a:1"}
    known = wire(
        ["register", 1, record, 5.0],
        ["keep_alive", 1, 1],
        ["deregister", 1, 1, "stopped"],
        ["set_draining", 1, "w", True],
        ["set_role", 1, "w", "prefill"],
        ["watch"],
        ["share", "peer", 1, {"w": [1, 2, 3]}],
    )

    def still_serves() -> None:
        sent = framed(msgspec.msgpack.encode(["keep_alive", 7, 1]))
        with connect(address, 5) as connection:
            connection.sendall(sent)
            assert b"answer" in connection.recv(100)

    run_cases(target, known, lambda case: unread(address, case), still_serves)


def test_the_exporter_of_peers_and_hand_overs(target: Target) -> None:
    address = target.addresses["exporter"]
    known = wire(
        ["ask", 1, "hello", {}],
        ["ask", 1, "watch", {"id": "x", "have": 0, "state": "unknown", "wait_s": 0.1}],
        ["ask", 1, "look_up", {"id": "x", "identity": "i", "slot_bytes": 1, "keys": [b"k"]}],
        ["ask", 1, "release", {"id": "x", "blocks": [1]}],
    )

    def still_serves() -> None:
        sent = framed(msgspec.msgpack.encode(["ask", 9, "unknown", None]))
        with connect(address, 5) as connection:
            connection.sendall(sent)
            assert b"failed" in connection.recv(300)

    run_cases(target, known, lambda case: unread(address, case), still_serves)


@pytest.mark.parametrize("name", ["token", "registry", "exporter"])
def test_a_stranger_at_a_wire_that_requires_the_secret(target: Target, name: str) -> None:
    """It gets no frame, whatever it sends before or instead of the handshake."""
    address = target.addresses[f"closed {name}"]
    known = wire(
        ["hello", PROTOCOL],
        ["watch"],
        ["keep_alive", 1, 1],
        ["ask", 1, "hello", {}],
        ["generate", 1, REQUEST],
    )
    begun = st.integers(0, 64).flatmap(lambda size: st.binary(min_size=size, max_size=size))
    cases = known | st.tuples(begun.map(MAGIC.__add__), known).map(b"".join)

    def attack(case: bytes) -> None:
        got = exchange(address, case)
        assert not any(word in got for word in ANSWERS), "a stranger was answered"

    run_cases(target, cases, attack, lambda: None)


ANSWERS = (b"info", b"answer", b"failed", b"snapshot", b"deltas", b"refused")


@pytest.mark.parametrize("socket_name", ["events", "replay"])
def test_kv_events_as_bytes(target: Target, socket_name: str) -> None:
    """ZMQ's own greeting and frames, damaged."""
    address = target.addresses[socket_name].removeprefix("tcp://")
    greeting = b"\xff" + b"\0" * 8 + b"\x7f\x03\x00NULL" + b"\0" * 48
    cases = st.binary(max_size=300) | st.tuples(
        st.just(greeting), st.lists(st.binary(max_size=80), max_size=4).map(b"".join)
    ).map(b"".join)
    run_cases(target, cases, lambda case: unread(address, case), lambda: replayed(target.addresses))


def test_replay_requests(target: Target) -> None:
    """Readers that speak ZMQ and ask for anything."""
    parts = st.lists(st.binary(max_size=16) | st.just(b""), min_size=1, max_size=5)
    sequences = st.integers(0, 2**64 - 1).map(lambda first: [b"", first.to_bytes(8, "big")])
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()

    def attack(case: list[bytes]) -> None:
        asking = context.socket(zmq.DEALER)
        asking.setsockopt(zmq.LINGER, 0)
        asking.connect(target.addresses["replay"])
        asking.send_multipart(case)
        asking.poll(1)
        asking.close()

    run_cases(target, parts | sequences, attack, lambda: replayed(target.addresses))


def replayed(addresses: dict[str, str]) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
    asking = context.socket(zmq.DEALER)
    asking.setsockopt(zmq.LINGER, 0)
    asking.connect(addresses["replay"])
    asking.send_multipart([b"", (95).to_bytes(8, "big")])
    assert asking.poll(10_000)
    asking.close()


METHODS = st.sampled_from([b"GET", b"POST", b"PUT", b"OPTIONS", b"HEAD", b"DELETE", b"PRI", b"X"])
PATHS = st.sampled_from(
    [
        *(b"/v1/chat/completions", b"/v1/completions", b"/v1/models", b"/v1/responses"),
        *(b"/tokenize", b"/detokenize", b"/metrics", b"/health", b"/openapi.json"),
        *(b"/admin/tiers", b"/admin/tiers/explain", b"/admin/tiers/evict?tier=%00&worker=x"),
        *(b"/admin/tiers/verify?timeout_s=nan", b"/admin/workers/x/drain"),
        *(b"/admin/workers/%ff%00/load", b"/admin/workers/x/role/%0a", b"/admin/workers/x/load"),
        *(b"/admin/workers/x/undrain", b"/admin/workers/x/role/prefill", b"/admin/"),
        *(b"/admin/tiers?model=smol", b"/admin/tiers/statistics?worker=x", b"/admin/tiers/verify"),
        *(b"/v1/embeddings", b"/v1/rerank", b"/v1/score", b"/v1/models/smol", b"/live", b"/ready"),
        *(b"/", b"/ui", b"/ui/app.js", b"/ui/../x", b"/admin/live/door", b"/admin/live/"),
        *(b"/%00", b"/..", b"*"),
    ]
)
HEADERS = st.sampled_from(
    [
        *(b"Host: x", b"Content-Type: application/json", b"Content-Length: 5"),
        *(b"Content-Length: -1", b"Content-Length: 99999999999999999999"),
        *(b"Transfer-Encoding: chunked", b"Expect: 100-continue", b"Content-Encoding: gzip"),
        *(b"Upgrade: websocket", b"X-Request-Timeout-S: nan", b"Connection: close"),
        *(b"X-Request-Id: \xff\xfe", b"traceparent: 00-0", b"X-Commutator-Explain: 1"),
        *(b": ", b"A:" + b"b" * 9000),
    ]
)
BODIES = st.binary(max_size=100) | st.sampled_from(
    [
        *(b"{}", b"[" * 3000, b'{"model": "smol", "prompt": "Hi"}', b"\xff" * 50),
        *(b'{"token_ids": [1, 2, 3]}', b'{"token_ids": [99999999999999999999]}'),
        *(b'{"token_ids": [-1], "cache_salt": "\\ud800"}', b'{"token_ids": "x", "lora_name": 1}'),
        b"5\r\nhello\r\n0\r\n\r\n",
    ]
)


def http_requests(*headers: bytes) -> st.SearchStrategy[bytes]:
    """Requests in which one part or another is wrong, and mere bytes."""
    lines = st.lists(HEADERS, max_size=5)
    made = st.tuples(METHODS, PATHS, lines, BODIES).map(
        lambda parts: (
            b"%b %b HTTP/1.1\r\n%b\r\n\r\n%b"
            % (parts[0], parts[1], b"\r\n".join([*headers, *parts[2]]), parts[3])
        )
    )
    return made | st.binary(max_size=400)


STATUS = re.compile(rb"HTTP/1\.[01] (\d{3})")
THE_PAGE = {path.encode() for path in PAGE_PATHS}
OPEN = {b"/openapi.json", b"/live", b"/ready", *THE_PAGE}
OPEN_TO_OPERATORS = {b"/live", b"/ready", b"/health", b"/metrics", *THE_PAGE}


def test_http_without_a_key(target: Target) -> None:
    address = target.addresses["http"]

    def attack(case: bytes) -> None:
        path = case.split(b" ", 2)[1:2]
        for status in STATUS.findall(exchange(address, case)):
            assert not status.startswith(b"5"), case
            if status.startswith(b"2"):
                assert path[0].split(b"?")[0] in OPEN, "a stranger was answered"

    run_cases(target, http_requests(), attack, lambda: chat(address))


@pytest.mark.parametrize("name", ["http", "operators", "local"])
def test_http_with_a_key(target: Target, name: str) -> None:
    """Also at the address for operators, and on the Unix socket, which asks for no key."""
    address = target.addresses[name]

    def attack(case: bytes) -> None:
        for status in STATUS.findall(exchange(address, case)):
            assert status not in {b"500", b"502"}, case

    run_cases(
        target,
        http_requests(b"Authorization: Bearer " + KEY.encode()),
        attack,
        lambda: chat(address) if name != "operators" else alive(address),
        CASES if name == "http" else FEW_CASES,
    )


def test_operators_without_a_key(target: Target) -> None:
    """On their address they read without a key, but nothing under /admin/."""
    address = target.addresses["operators"]

    def attack(case: bytes) -> None:
        path = case.split(b" ", 2)[1:2]
        for status in STATUS.findall(exchange(address, case)):
            assert not status.startswith(b"5"), case
            if status.startswith(b"2"):
                assert path[0].split(b"?")[0] in OPEN_TO_OPERATORS, "a stranger was answered"

    run_cases(target, http_requests(), attack, lambda: alive(address), FEW_CASES)


def alive(address: str) -> None:
    sent = b"GET /live HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    assert b" 200 " in exchange(address, sent, 10)


def chat(address: str) -> None:
    body = b'{"model": "smol", "messages": [{"role": "user", "content": "Hi"}]}'
    sent = (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
        b"Content-Type: application/json\r\nAuthorization: Bearer %b\r\n"
        b"Content-Length: %d\r\n\r\n%b" % (KEY.encode(), len(body), body)
    )
    assert b" 200 " in exchange(address, sent, 10)
