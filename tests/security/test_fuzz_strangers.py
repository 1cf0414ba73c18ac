"""Senseless bytes of strangers on each wire that asks for the run's secret: all are refused.

On one machine they lack the secret; between hosts also the certificate, or have one that is not of
this cluster, or one without the secret. A process of the run is answered afterwards.
"""

from __future__ import annotations

import socket
import ssl
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from hypothesis import strategies as st
from tests.support.certificates import Authorities
from tests.support.fuzz_closed_target import SECRET
from tests.support.fuzz_process import FuzzedProcess, connect, framed, run_cases, wire
from zmq.utils import z85

from commutator.engine.protocol import PROTOCOLS
from commutator.engine.protocol import SERVICE as TOKEN_API
from commutator.kv_events.curve import reader_keys
from commutator.registry.server import SERVICE as REGISTRY
from commutator.trust.handshake import MAC_BYTES, MAGIC, NONCE_BYTES, ClientHandshake
from commutator_engine_kit.kv.transfer.protocol import SERVICE as EXPORTER

pytestmark = pytest.mark.security

MODULE = "tests.support.fuzz_closed_target"
ANSWER_S = 10.0
SERVICES = {"token": TOKEN_API, "registry": REGISTRY, "exporter": EXPORTER}
HANDSHAKE_BYTES = len(MAGIC) + NONCE_BYTES + MAC_BYTES
"""Of the server's answer to a complete hello: all that it says before the client's proof."""

FRAMES: dict[str, list[list[Any]]] = {
    "token": [
        ["hello", PROTOCOLS.oldest],
        ["generate", 1, b"\x80"],
        ["abort", 1],
        ["ask", 1, "drain!"],
        ["ask", 1, "kv", "contents", {}],
    ],
    "registry": [
        ["watch"],
        ["keep_alive", 1, 1],
        ["register", 1, {"worker_id": "w"}, 5.0],
        ["set_draining", 1, "w", True],
        ["write_document", 1, "plan", b"value", 0],
        ["share", "peer", 1, {"w": [1, 2, 3]}],
        ["limits", "open", "door", "first", []],
        ["planner", "ask", 1, "explain", 5.0],
    ],
    "exporter": [
        ["ask", 1, "hello", {}],
        ["ask", 1, "watch", {"id": "x", "have": 0, "state": "unknown", "wait_s": 0.1}],
        ["ask", 1, "look_up", {"id": "x", "identity": "i", "slot_bytes": 1, "keys": [b"k"]}],
        ["ask", 1, "release", {"id": "x", "blocks": [1]}],
    ],
}
QUESTIONS: dict[str, list[Any]] = {
    "token": ["hello", PROTOCOLS.oldest],
    "registry": ["keep_alive", 7, 1],
    "exporter": ["ask", 9, "unknown", None],
}
"""What each answers a process of the run."""


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FuzzedProcess]:
    """The wires of one machine."""
    with FuzzedProcess(tmp_path_factory.mktemp("fuzz") / "log.txt", MODULE) as process:
        yield process


@pytest.fixture(scope="module")
def authorities(tmp_path_factory: pytest.TempPathFactory) -> Authorities:
    return Authorities(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def host(
    authorities: Authorities, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[FuzzedProcess]:
    """The wires of a host of a cluster."""
    folder = str(Path(authorities.files("h1").cert_file).parent)
    with FuzzedProcess(tmp_path_factory.mktemp("fuzz") / "log.txt", MODULE, folder) as process:
        yield process


class Plain:
    """A connection without TLS."""

    def __init__(self, address: str) -> None:
        self._socket = connect(address, ANSWER_S)

    def send(self, data: bytes) -> None:
        self._socket.sendall(data)

    def receive(self) -> bytes:
        """What came; nothing at the end."""
        return self._socket.recv(65536)

    def end(self) -> None:
        """Send no more. The other end closes the connection."""
        self._socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._socket.close()


class Encrypted(Plain):
    """A connection with TLS. Raises OSError, ssl.SSLError among them, where it is refused."""

    def __init__(self, address: str, context: ssl.SSLContext) -> None:
        super().__init__(address)
        self._got, self._made = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._got, self._made)
        try:
            self._until_done(self._tls.do_handshake)
        except BaseException:
            self.close()
            raise

    def send(self, data: bytes) -> None:
        self._tls.write(data)
        self._flush()

    def receive(self) -> bytes:
        return self._until_done(lambda: self._tls.read(65536))

    def _until_done(self, step: Callable[[], bytes | None]) -> bytes:
        while True:
            try:
                done = step()
            except ssl.SSLWantReadError:
                self._flush()
                if part := super().receive():
                    self._got.write(part)
                else:
                    self._got.write_eof()
            else:
                self._flush()
                return done or b""

    def _flush(self) -> None:
        if made := self._made.read():
            super().send(made)


def said_to(connection: Plain, first: bytes, then: Callable[[bytes], bytes] | None) -> bytes:
    """Everything that is said to who sends ``first``, and ``then`` what it makes of the answer."""
    got = b""
    with suppress(OSError):
        connection.send(first)
        if then is not None:
            got = connection.receive()
            connection.send(then(got))
        connection.end()
        while part := connection.receive():
            got += part
    connection.close()
    return got


def cases_of(name: str) -> st.SearchStrategy[tuple[bytes, bool]]:
    """Bytes to begin with, and whether what the server proves is sent back to it as our proof."""
    known = wire(*FRAMES[name])
    begun = st.binary(max_size=NONCE_BYTES + MAC_BYTES)
    complete = st.binary(min_size=NONCE_BYTES + MAC_BYTES, max_size=NONCE_BYTES + MAC_BYTES)
    starts = (begun | complete).map(MAGIC.__add__)
    nonces = st.binary(min_size=NONCE_BYTES, max_size=NONCE_BYTES).map(MAGIC.__add__)
    silent = known | st.tuples(starts, known).map(b"".join)
    return silent.map(lambda sent: (sent, False)) | nonces.map(lambda sent: (sent, True))


def reflected(name: str) -> Callable[[bytes], bytes]:
    request = framed(msgspec.msgpack.encode(QUESTIONS[name]))
    return lambda got: got[-MAC_BYTES:] + request


def nothing_but_a_handshake(got: bytes) -> bool:
    return got == b"" or (got.startswith(MAGIC) and len(got) == HANDSHAKE_BYTES)


def answers_the_run(connection: Plain, name: str, end: str) -> None:
    """``end`` is the server's end of the connection, as both prove it."""
    handshake = ClientHandshake(SECRET, SERVICES[name], end)
    connection.send(handshake.begin())
    while not handshake.proven:
        proof, _ = handshake.feed(connection.receive())
    connection.send(proof + framed(msgspec.msgpack.encode(QUESTIONS[name])))
    assert connection.receive()
    connection.close()


def all_are_refused(process: FuzzedProcess, cases: Any, attack: Any, still_serves: Any) -> None:
    """``run_cases``, and that each was counted."""
    tried = 0

    def counted(case: Any) -> None:
        nonlocal tried
        tried += 1
        attack(case)

    before = process.report()["refused"]
    run_cases(process, cases, counted, still_serves)
    assert process.report()["refused"] - before == tried


@pytest.mark.parametrize("name", SERVICES)
def test_strangers_on_the_machine(machine: FuzzedProcess, name: str) -> None:
    """They get no frame, whatever they send before or instead of the handshake."""
    address = machine.said[name]

    def attack(case: tuple[bytes, bool]) -> None:
        sent, reflects = case
        got = said_to(Plain(address), sent, reflected(name) if reflects else None)
        assert nothing_but_a_handshake(got), "a stranger was answered"

    all_are_refused(
        machine, cases_of(name), attack, lambda: answers_the_run(Plain(address), name, address)
    )


def contexts_of_strangers(authorities: Authorities) -> dict[str, ssl.SSLContext]:
    return {
        "no certificate": authorities.context(None),
        "another authority": authorities.context(authorities.files("h1", by=authorities.theirs)),
        "another cluster": authorities.context(authorities.files("h9", cluster="other")),
        "expired": authorities.context(authorities.files("h8", valid=timedelta(hours=-0.5))),
        "no secret": authorities.context(authorities.files("h2")),
    }


@pytest.mark.parametrize("name", SERVICES)
def test_strangers_from_other_hosts(
    host: FuzzedProcess, authorities: Authorities, name: str
) -> None:
    """Who has a certificate and not the secret gets a handshake; all others nothing."""
    address, contexts = host.said[name], contexts_of_strangers(authorities)
    friend = authorities.context(authorities.files("h3"))

    def attack(case: tuple[str, tuple[bytes, bool]]) -> None:
        who, (sent, reflects) = case
        try:
            connection = Encrypted(address, contexts[who])
        except OSError:
            return
        got = said_to(connection, sent, reflected(name) if reflects else None)
        assert got == b"" or (who == "no secret" and nothing_but_a_handshake(got)), who

    all_are_refused(
        host,
        st.tuples(st.sampled_from(list(contexts)), cases_of(name)),
        attack,
        lambda: answers_the_run(Encrypted(address, friend), name, "TLS"),
    )


ALERT, HANDSHAKE = 21, 22
"""Kinds of TLS records that are sent before anybody is known."""


@pytest.mark.parametrize("name", SERVICES)
def test_bytes_from_other_hosts(host: FuzzedProcess, authorities: Authorities, name: str) -> None:
    """Instead of TLS, or TLS with damaged bytes."""
    address = host.said[name]
    friend = authorities.context(authorities.files("h3"))
    made = ssl.MemoryBIO()
    with suppress(ssl.SSLWantReadError):
        authorities.context(None).wrap_bio(ssl.MemoryBIO(), made).do_handshake()
    hello = made.read()

    def damaged(where: tuple[int, int]) -> bytes:
        return hello[: where[0]] + bytes([where[1]]) + hello[where[0] + 1 :]

    hellos = st.tuples(st.integers(0, len(hello) - 1), st.integers(0, 255)).map(damaged)
    hellos |= st.integers(1, len(hello)).map(lambda size: hello[:size])
    followed = st.tuples(hellos, st.binary(max_size=200)).map(b"".join)
    cases = followed | cases_of(name).map(lambda case: case[0]) | st.binary(max_size=300)

    def attack(case: bytes) -> None:
        got = said_to(Plain(address), case, None)
        assert got[:1] in (b"", bytes([ALERT]), bytes([HANDSHAKE])), "a stranger was answered"

    all_are_refused(
        host, cases, attack, lambda: answers_the_run(Encrypted(address, friend), name, "TLS")
    )


GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00"
GREETING_BYTES = 64
COMMAND = b"\x04"
"""What ZMQ's frames of a handshake begin with, and those of messages do not."""


@pytest.mark.parametrize("name", ["events", "replay"])
def test_bytes_at_kv_events(host: FuzzedProcess, name: str) -> None:
    """ZMQ's own greeting and the handshake of CURVE, damaged."""
    address = host.said[name].removeprefix("tcp://")
    mechanisms = st.sampled_from([b"NULL", b"CURVE", b"PLAIN", b"GSSAPI", b"X" * 20])
    greetings = mechanisms.map(lambda name: GREETING + name.ljust(20, b"\0") + bytes(32))
    commands = st.sampled_from([b"\x05HELLO\1\0", b"\x08INITIATE", b"\x05READY", b"\x05ERROR"])
    bodies = st.tuples(commands, st.binary(max_size=80) | st.just(bytes(192))).map(b"".join)
    frames = bodies.map(lambda body: COMMAND + bytes([len(body)]) + body)
    frames |= st.binary(max_size=80)
    begun = st.tuples(greetings, st.lists(frames, max_size=4).map(b"".join)).map(b"".join)

    def attack(case: bytes) -> None:
        got = said_to(Plain(address), case, None)[GREETING_BYTES:]
        assert got[:1] in (b"", COMMAND), "a stranger was answered"
        assert b"READY" not in got

    run_cases(host, st.binary(max_size=300) | begun, attack, lambda: replays_to_the_run(host))


@pytest.mark.parametrize("name", ["events", "replay"])
def test_readers_of_kv_events(host: FuzzedProcess, name: str) -> None:
    """Who speaks ZMQ, without CURVE or with keys of its own, gets neither events nor replays."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
    keys = st.binary(min_size=32, max_size=32).map(z85.encode)
    parts = st.lists(st.binary(max_size=16) | st.just(b""), min_size=1, max_size=5)
    sequences = st.integers(0, 2**64 - 1).map(lambda first: [b"", first.to_bytes(8, "big")])
    waiting: deque[zmq.Socket[bytes]] = deque()

    def attack(case: tuple[bytes | None, list[bytes]]) -> None:
        key, message = case
        reader = context.socket(zmq.SUB if name == "events" else zmq.DEALER)
        reader.linger = 0
        if key is not None:
            reader.curve_secretkey, reader.curve_publickey = key, zmq.curve_public(key)
            reader.curve_serverkey = host.said["server key"].encode()
        reader.connect(host.said[name])
        if name == "events":
            reader.subscribe(b"")
        else:
            with suppress(zmq.Again):  # refused before it asked
                reader.send_multipart(message, zmq.NOBLOCK)
        reader.poll(1)
        waiting.append(reader)
        if len(waiting) > 100:  # its handshake has had time to fail
            end(waiting.popleft())

    def end(reader: zmq.Socket[bytes]) -> None:
        assert not reader.poll(0), "a stranger was answered"
        reader.close()

    def still_serves() -> None:
        while waiting:
            end(waiting.popleft())
        replays_to_the_run(host)

    cases = st.tuples(st.none() | keys, parts | sequences)
    before = host.report()["refused"]
    try:
        run_cases(host, cases, attack, still_serves)
    finally:
        for reader in waiting:
            reader.close()
    assert host.report()["refused"] > before


def replays_to_the_run(host: FuzzedProcess) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
    asking = context.socket(zmq.DEALER)
    asking.linger = 0
    asking.curve_publickey, asking.curve_secretkey = reader_keys(SECRET)
    asking.curve_serverkey = host.said["server key"].encode()
    asking.connect(host.said["replay"])
    asking.send_multipart([b"", (95).to_bytes(8, "big")])
    assert asking.poll(10_000)
    asking.close()
