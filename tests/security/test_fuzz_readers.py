"""Senseless messages to those who read them: KV events, blocks of peers, the registry's frames.

``make fuzz`` sends 10,000 cases of each; a usual test run sends a few (FUZZ_CASES). Nothing breaks,
hangs or grows, and afterwards what is valid is still believed.
"""

from __future__ import annotations

import queue
import socket
import struct
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from hypothesis import strategies as st
from tests.support.fuzz_process import (
    DEEP,
    FEW_CASES,
    VALUES,
    FuzzedProcess,
    framed,
    run_cases,
)
from tests.support.fuzz_readers import BLOCK, OWN, PROMPT, worker

from commutator.contract.block import BlockStored, EventBatch
from commutator.contract.request import GenerateRequest, SamplingParams
from commutator.contract.worker import EventSource
from commutator.kv_events.codec import encode_batch
from commutator_engine_kit.kv.transfer.protocol import (
    ExportedMemory,
    ExportState,
    ExportUpdate,
    ReadyBlock,
    handover_keys,
)

pytestmark = pytest.mark.security

WITHIN_S = 60.0
"""Long enough for a machine that does much else."""
_LOOK_S = 0.001


class Events:
    """An engine's sockets for KV events, which send what a fuzzer says."""

    def __init__(self, stack: ExitStack) -> None:
        context = stack.enter_context(zmq.Context())
        self._events = stack.enter_context(context.socket(zmq.PUB))
        self._replays = stack.enter_context(context.socket(zmq.ROUTER))
        for each in (self._events, self._replays):
            each.setsockopt(zmq.LINGER, 0)
            each.set_hwm(0)
        self.addresses = [
            f"tcp://127.0.0.1:{each.bind_to_random_port('tcp://127.0.0.1')}"
            for each in (self._events, self._replays)
        ]
        self._number = 0

    def send(self, frames: list[bytes]) -> None:
        self._events.send_multipart(frames)

    def send_next(self, body: bytes) -> None:
        """A message with the expected number."""
        self.send([b"", self._number.to_bytes(8, "big"), body])
        self._number += 1

    def restart(self) -> None:
        """The numbers begin anew, with a message that says that the cache is empty."""
        self._number = 0
        self.send_next(msgspec.msgpack.encode([0.0, [CLEARED]]))

    def answer_replay(self, frames: list[list[bytes]], *, ends: bool) -> None:
        """Answer the replay requests that have come."""
        while self._replays.poll(0):
            reader, *_ = self._replays.recv_multipart()
            for each in frames:
                self._replays.send_multipart([reader, *each])
            if ends:
                self._replays.send_multipart([reader, b"", b"", b"\xff" * 8, b""])


NUMBER, FIRST_KEY = "the number of the question", "the first key in the question"


class Liar:
    """A server in ``commutator.frames`` that answers as a fuzzer says.

    ``usual`` are its answers to questions for which the fuzzer has none, by the question's name or
    the frame's first word; None: no answer.
    """

    def __init__(self, stack: ExitStack, usual: dict[str, list[Any] | None]) -> None:
        self._usual = usual
        self._server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        self.address = f"127.0.0.1:{self._server.getsockname()[1]}"
        self._cases: dict[str, queue.SimpleQueue[bytes | list[Any]]] = defaultdict(
            queue.SimpleQueue
        )
        self._open: dict[str, tuple[socket.socket, list[Any]]] = {}
        """The connection and the frame of the last question of each name."""
        self._connections: set[socket.socket] = set()
        self._lock = threading.Lock()
        """Held where an answer is chosen, so that a connection has got the usual one before a case
        is waiting, or gets the case."""
        threading.Thread(target=self._accept, daemon=True).start()

    def say(self, question: str, answer: bytes | list[Any]) -> None:
        """Give this answer to the next such question, and wait until it was asked."""
        cases = self._cases[question]
        with self._lock:
            cases.put(answer)
            if question == "hello":  # asked once for each connection
                self._cut()
        until(cases.empty, f"nobody asks for {question} any more")

    def push(self, question: str, said: bytes | list[Any]) -> None:
        """Send to whom asked this last; wait until somebody has."""
        found = None
        while found is None:
            until(lambda: question in self._open, f"nobody asks for {question} any more")
            found = self._open.get(question)
        connection, asked = found
        with suppress(OSError):  # its reader may have just left
            if isinstance(said, bytes):
                connection.sendall(said)
                connection.shutdown(socket.SHUT_RDWR)  # else it may wait for the rest
            else:
                connection.sendall(packed(said, asked))

    def _cut(self) -> None:
        for connection in self._connections:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def always(self, question: str, answer: list[Any]) -> None:
        """From now on, this is the usual answer."""
        self._usual[question] = answer

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._server.accept()
                with self._lock:
                    self._connections.add(connection)
                threading.Thread(target=self._serve, args=[connection], daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            self._converse(connection)
        finally:
            with self._lock:  # closed only then, as its number may soon be another's
                self._connections.discard(connection)
                connection.close()

    def _converse(self, connection: socket.socket) -> None:
        question = None
        with suppress(OSError), connection.makefile("rb") as stream:
            while len(length := stream.read(4)) == 4:
                asked = msgspec.msgpack.decode(stream.read(struct.unpack(">I", length)[0]))
                question = asked[2] if asked[0] == "ask" else asked[0]
                case, answer = self._answer_to(question)
                if isinstance(answer, bytes):
                    connection.sendall(answer)
                    return
                if answer is not None:
                    connection.sendall(packed(answer, asked))
                if case and answer and (question == "hello" or answer[1:2] != [NUMBER]):
                    return  # it is asked once for each connection; or it would stay open
                self._open[question] = connection, asked
        if question is not None and self._open.get(question, (None,))[0] is connection:
            self._open.pop(question, None)

    def _answer_to(self, question: str) -> tuple[bool, bytes | list[Any] | None]:
        """Whether the fuzzer gave the answer, and the answer."""
        with self._lock, suppress(queue.Empty):
            return True, self._cases[question].get_nowait()
        if question == "watch":
            time.sleep(0.002)  # as an exporter that waits for news
        return False, self._usual[question]


def packed(frame: list[Any], asked: list[Any]) -> bytes:
    """A frame that answers this one."""

    def filled(value: Any) -> Any:
        match value:
            case dict():
                return {key: filled(part) for key, part in value.items()}
            case list():
                return [filled(part) for part in value]
            case "the number of the question" if len(asked) > 1:
                return asked[1]
            case "the first key in the question":
                return asked[3]["keys"][0]
            case _:
                return value

    return framed(msgspec.msgpack.encode(filled(frame)))


def until(done: Callable[[], bool], problem: str) -> None:
    """Looks as often as fits into ``WITHIN_S``: a machine that stood still meanwhile has not."""
    for _ in range(round(WITHIN_S / _LOOK_S)):
        if done():
            return
        time.sleep(_LOOK_S)
    raise AssertionError(problem)


MEMORY = ExportedMemory(OWN, "agent", b"", "DRAM", 4096, BLOCK * OWN.token_bytes, 100)
RECORD = msgspec.to_builtins(worker(EventSource(endpoint="tcp://127.0.0.1:1")))
CHANGES = ["changes", [["up", RECORD], ["down", "w", "stopped"]]]
LENT = {"agent": {"name": "a", "metadata": b""}, "lease_s": 30.0, "blocks": []}
SNAPSHOT = ["snapshot", []]


def answer(value: Any) -> list[Any]:
    return ["answer", NUMBER, msgspec.to_builtins(value, builtin_types=(bytes,))]


class Readers:
    """The process that reads, and what sends to it."""

    def __init__(self, stack: ExitStack, log: Path) -> None:
        self.events = Events(stack)
        self.exporter = Liar(
            stack,
            {
                "hello": answer(MEMORY),
                "watch": answer({"state": "running"}),
                "look_up": answer(LENT),
                "release": answer(None),
            },
        )
        self.registry = Liar(stack, {"watch": SNAPSHOT, "keep_alive": answer(True), "share": None})
        self.process = stack.enter_context(
            FuzzedProcess(
                log,
                "tests.support.fuzz_readers",
                *self.events.addresses,
                self.exporter.address,
                self.registry.address,
            )
        )

    def wait_for_more(self, what: str, say: Callable[[], None] = lambda: None) -> None:
        """Say what is valid until it is believed."""
        before = 0 if what == "doors" else self.process.report()[what]  # they fall silent soon

        def believed() -> bool:
            say()
            return self.process.report()[what] > before

        until(believed, f"nothing is believed any more: {what}")


@pytest.fixture(scope="module")
def readers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Readers]:
    with ExitStack() as stack:
        yield Readers(stack, tmp_path_factory.mktemp("fuzz") / "log.txt")


STORED = {
    "type": "BlockStored", "block_hashes": [1, 2], "parent_block_hash": None,
    "token_ids": list(range(2 * BLOCK)), "block_size": BLOCK, "medium": "GPU",
}  # fmt: skip
EVENTS: list[dict[str, Any]] = [
    STORED,
    STORED | {"parent_block_hash": 7, "extra_keys": [["salt"]], "lora_name": "a"},
    STORED | {"cache_salt": "s", "group_idx": 1, "kv_cache_spec_kind": "mamba"},
    STORED | {"token_ids": [], "medium": "CPU"},
    {"type": "BlockRemoved", "block_hashes": [1, b"x"], "medium": "GPU", "group_idx": None},
    {"type": "AllBlocksCleared"},
]
CLEARED = EVENTS[-1]
SIZES = st.sampled_from([0, -1, 1, 8, 24, 32, 1 << 20, 1 << 40, (1 << 63) - 1])
SIZED = st.builds(
    lambda size, blocks: STORED | {"block_size": size, "block_hashes": blocks},
    SIZES,
    st.lists(st.integers(0, 50) | st.binary(max_size=8), max_size=5),
)
FIELDS = st.sampled_from([*STORED, "extra_keys", "lora_name", "cache_salt", "group_idx", "type"])


def changed_events() -> st.SearchStrategy[Any]:
    """Events in which some values are others, as maps and as arrays."""
    known = st.sampled_from(EVENTS)
    changes = st.dictionaries(FIELDS, VALUES, max_size=2)
    maps = st.builds(lambda event, new: event | new, known, changes) | SIZED
    return maps | maps.map(lambda event: [event["type"], *list(event.values())[1:]]) | VALUES


def batches() -> st.SearchStrategy[bytes]:
    ranks = st.none() | st.integers(0, 3) | st.integers(-(2**63), 2**63) | VALUES
    stamps = st.just(1.5) | VALUES
    whole = st.tuples(stamps, st.lists(changed_events(), max_size=4), ranks)
    made = whole.map(list) | st.lists(VALUES, max_size=4) | VALUES
    return made.map(msgspec.msgpack.encode) | DEEP | st.binary(max_size=100)


def test_batches_of_kv_events(readers: Readers) -> None:
    """Also messages of other frames, with numbers that jump, and wrong answers to replays."""
    bodies = batches()
    numbers = st.integers(0, 2**64 - 1) | st.integers(0, 20)
    other = st.builds(lambda number, body: [b"", number.to_bytes(8, "big"), body], numbers, bodies)
    other |= st.lists(st.binary(max_size=16), min_size=1, max_size=5)
    replays = st.lists(other.map(lambda frames: [b"", *frames]), max_size=3)
    cases = st.tuples(bodies, st.none() | other, replays, st.booleans())

    def attack(case: tuple[bytes, list[bytes] | None, list[list[bytes]], bool]) -> None:
        body, frames, replayed, ends = case
        readers.events.send_next(body)
        if frames is not None:
            readers.events.send(frames)
        readers.events.answer_replay(replayed, ends=ends)

    def still_reads() -> None:
        def cleared() -> bool:
            readers.events.answer_replay([], ends=True)
            readers.events.restart()
            return not readers.process.report()["indexed"]

        until(cleared, "blocks of an engine that restarted are still in the index")
        stored = BlockStored(
            block_hashes=(1, 2), parent_block_hash=None, token_ids=PROMPT, block_size=BLOCK
        )
        body = encode_batch(EventBatch(timestamp_s=0.0, events=(stored,)))
        readers.wait_for_more("indexed", lambda: readers.events.send_next(body))

    run_cases(readers.process, cases, attack, still_reads, FEW_CASES)


def parts(value: Any) -> st.SearchStrategy[Any]:
    """``value``, of which one or another part is something else."""
    if isinstance(value, dict):
        return st.fixed_dictionaries({key: parts(part) for key, part in value.items()}) | VALUES
    if isinstance(value, list):
        return st.tuples(*map(parts, value)).map(list) | VALUES
    return st.just(value) | st.just(value) | VALUES


def changed(*known: Any) -> st.SearchStrategy[list[Any] | bytes]:
    """Answers with these values, in part changed; refusals, other frames, and bytes."""
    values = st.one_of(*map(parts, msgspec.to_builtins(known, builtin_types=(bytes,))))
    framed_values = values.map(lambda value: ["answer", NUMBER, value])
    failures = VALUES.map(lambda value: ["failed", NUMBER, value])
    frames = framed_values | framed_values | framed_values | failures
    frames |= st.lists(VALUES, min_size=1, max_size=4)
    return frames | st.binary(min_size=1, max_size=60) | DEEP.map(framed)


SPAN = [4096, 64, 0]
READY = {"index": 3, "key": FIRST_KEY, "checksum": 0, "span": SPAN}
KEYS = handover_keys(
    OWN, GenerateRequest(request_id="r", token_ids=PROMPT, sampling=SamplingParams())
)
NEWS = ExportUpdate(
    ExportState.COMPLETE, tuple(ReadyBlock(i, key, 0) for i, key in enumerate(KEYS))
)


@pytest.mark.parametrize(
    ("question", "known"),
    [
        ("look_up", [LENT, LENT | {"blocks": [READY]}, LENT | {"blocks": [READY] * 3}]),
        ("watch", [NEWS, {"state": "failed", "reason": "x"}, {"state": "complete"}]),
        ("hello", [MEMORY]),
    ],
)
def test_answers_of_peers_and_hand_overs(readers: Readers, question: str, known: list[Any]) -> None:
    def still_reads() -> None:
        if question == "look_up":
            lent = answer(LENT | {"blocks": [READY]})
            readers.wait_for_more("borrowed", lambda: readers.exporter.say("look_up", lent))
        else:
            readers.exporter.always("watch", answer(NEWS))
            readers.wait_for_more("pulled")
            readers.exporter.always("watch", answer({"state": "running"}))

    def attack(case: list[Any] | bytes) -> None:
        readers.exporter.say(question, case)

    run_cases(readers.process, changed(*known), attack, still_reads, FEW_CASES)


TOLD: dict[str, list[list[Any]]] = {
    "watch": [SNAPSHOT, ["snapshot", [RECORD]], CHANGES, ["age", 1.0], ["age", None]],
    "share": [["shared", "peer", 1, {"w": [1, 2, 3]}], ["shared", "peer", 2, None]],
    "keep_alive": [["answer", NUMBER, True], ["failed", NUMBER, "x"], ["taken", NUMBER, "w", "h"]],
}


@pytest.mark.parametrize("question", TOLD)
def test_what_the_registry_tells(readers: Readers, question: str) -> None:
    """Workers that come and go, loads of other front doors, and answers."""
    frames = st.sampled_from(TOLD[question]).flatmap(parts)
    cases = frames.filter(lambda frame: frame and isinstance(frame, list))
    cases |= st.binary(min_size=1, max_size=60) | DEEP.map(framed)

    def attack(case: bytes | list[Any]) -> None:
        readers.registry.push(question, case)

    def still_reads() -> None:
        said = ["changes", [["up", RECORD]]]
        readers.wait_for_more("changes", lambda: readers.registry.push("watch", said))
        told = ["shared", "last", 1, {"w": [1, 2, 3]}]
        readers.wait_for_more("doors", lambda: readers.registry.push("share", told))
        readers.wait_for_more("kept_alive")

    run_cases(readers.process, cases, attack, still_reads, FEW_CASES)
