"""Senseless bytes on every socket: nothing breaks, hangs or grows, and no stranger gets an answer.

``make fuzz`` sends 10,000 cases to each socket; a usual test run sends a few (FUZZ_CASES).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
import pytest
import zmq
from hypothesis import strategies as st
from tests.support.front_door import FakeDispatcher, make_services
from tests.support.fuzz_process import (
    CASES,
    FEW_CASES,
    VALUES,
    FuzzedProcess,
    connect,
    exchange,
    framed,
    run_cases,
    unread,
    wire,
)
from tests.support.fuzz_target import KEY

from commutator.contract.operations import OperationsContext
from commutator.contract.planner import Arrivals
from commutator.contract.protocol import DoorFacts
from commutator.contract.request import GenerateRequest, SamplingParams
from commutator.contract.worker import Role
from commutator.demand import DoorReport
from commutator.engine.protocol import PROTOCOLS, Codec
from commutator_console.live import Console
from commutator_console.page import PAGE_PATHS
from commutator_http.app import build_app, build_local_app
from commutator_http.config import HttpConfig
from commutator_openai.protocol import OpenAi, OpenAiConfig

pytestmark = pytest.mark.security


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FuzzedProcess]:
    log = tmp_path_factory.mktemp("fuzz") / "log.txt"
    with FuzzedProcess(log, "tests.support.fuzz_target") as target:
        yield target


REQUEST = Codec().pack_request(
    GenerateRequest(
        request_id="r", token_ids=(1, 2, 3), sampling=SamplingParams(max_tokens=3), cache_salt="s"
    )
)
REQUEST_OBJECT, TOKENS = msgspec.msgpack.decode(REQUEST)


def changed_requests() -> st.SearchStrategy[bytes]:
    """A request whose fields have other values, as the token API sends it."""
    assert isinstance(REQUEST_OBJECT, dict)
    fields = st.sampled_from(
        [
            *REQUEST_OBJECT,
            "handover",
            "retention",
            "options",
            "constraint",
            "adapter",
            "media",
            "priority",
        ]
    )
    objects = st.dictionaries(fields, VALUES, max_size=3).map(lambda new: REQUEST_OBJECT | new)
    sampling = st.dictionaries(st.sampled_from(list(REQUEST_OBJECT["sampling"])), VALUES).map(
        lambda new: REQUEST_OBJECT | {"sampling": REQUEST_OBJECT["sampling"] | new}
    )
    tokens = st.just(TOKENS) | st.binary(max_size=9) | VALUES
    packed = st.tuples(objects | sampling, tokens).map(msgspec.msgpack.encode)
    return packed.map(lambda one: framed(msgspec.msgpack.encode(["generate", 1, one])))


def test_the_token_api(target: FuzzedProcess) -> None:
    address = target.said["token"]
    known = wire(
        ["hello", PROTOCOLS.oldest],
        ["generate", 1, REQUEST],
        ["abort", 1],
        ["ask", 1, "load"],
        ["ask", 1, "drain!"],
        ["ask", 1, "kv", "contents", {}],
    )

    def still_serves() -> None:
        hello = framed(msgspec.msgpack.encode(["hello", PROTOCOLS.oldest]))
        with connect(address, 5) as connection:
            connection.sendall(hello)
            assert b"info" in connection.recv(1000)

    run_cases(target, known | changed_requests(), lambda case: unread(address, case), still_serves)


LIMITS = [900, 90_000, 9_000_000, 300]
USED = [["tenant", 3, 90, [2, 1, 0, 5, 7]]]
ARRIVED = {Role.BOTH: Arrivals(requests=2, prompt_tokens=9, prompt_lengths={8: 2})}


def test_the_registry(target: FuzzedProcess) -> None:
    """Also the ledger of limits and the planner, which answer on its port."""
    address = target.said["registry"]
    record = {"worker_id": "w", "engine": "e", "kind": "k", "model": "m", "address": "a:1"}
    known = wire(
        ["register", 1, record, 5.0],
        ["keep_alive", 1, 1],
        ["deregister", 1, 1, "stopped"],
        ["set_draining", 1, "w", True],
        ["set_role", 1, "w", "prefill"],
        ["read_document", 1, "plan"],
        ["write_document", 1, "plan", b"value", 0],
        ["delete_document", 1, "plan", 7],
        ["watch_document", "plan"],
        ["run", 1],
        ["watch"],
        ["share", "peer", 1, {"w": [1, 2, 3]}],
        ["limits", "open", "door", "first", [[1, 2, "tenant"]]],
        ["limits", "changes", 20_000, [["tenant", [[1, 2]], [[1, 30]], 30]]],
        ["planner", "report", DoorReport(door="d", number=1, arrived=ARRIVED).pack()],
        ["planner", "leave", "d"],
        ["planner", "ask", 1, "explain", 5.0],
    )
    opened = framed(msgspec.msgpack.encode(["limits", "open", "door", "first", []]))
    of_a_door = wire(
        ["limits", "admit", 1, "tenant", LIMITS, 30, 8, 240],
        ["limits", "report", USED, [[1, 1, 0, 5, 0]], [[3, "tenant", LIMITS, 8, 240]]],
        ["limits", "returned", "tenant"],
        ["limits", "changes", 20_000, [["tenant", [[1, 2]], [[1, 30]], 30]]],
    )
    known |= of_a_door.map(opened.__add__)

    def still_serves() -> None:
        sent = framed(msgspec.msgpack.encode(["keep_alive", 7, 1]))
        with connect(address, 5) as connection:
            connection.sendall(sent)
            assert b"answer" in connection.recv(100)

    run_cases(target, known, lambda case: unread(address, case), still_serves)


def test_the_exporter_of_peers_and_hand_overs(target: FuzzedProcess) -> None:
    address = target.said["exporter"]
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


@pytest.mark.parametrize("socket_name", ["events", "replay"])
def test_kv_events_as_bytes(target: FuzzedProcess, socket_name: str) -> None:
    """ZMQ's own greeting and frames, damaged."""
    address = target.said[socket_name].removeprefix("tcp://")
    greeting = b"\xff" + b"\0" * 8 + b"\x7f\x03\x00NULL" + b"\0" * 48
    cases = st.binary(max_size=300) | st.tuples(
        st.just(greeting), st.lists(st.binary(max_size=80), max_size=4).map(b"".join)
    ).map(b"".join)
    run_cases(target, cases, lambda case: unread(address, case), lambda: replayed(target.said))


def test_replay_requests(target: FuzzedProcess) -> None:
    """Readers that speak ZMQ and ask for anything."""
    parts = st.lists(st.binary(max_size=16) | st.just(b""), min_size=1, max_size=5)
    sequences = st.integers(0, 2**64 - 1).map(lambda first: [b"", first.to_bytes(8, "big")])
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()

    def attack(case: list[bytes]) -> None:
        asking = context.socket(zmq.DEALER)
        asking.setsockopt(zmq.LINGER, 0)
        asking.connect(target.said["replay"])
        asking.send_multipart(case)
        asking.poll(1)
        asking.close()

    run_cases(target, parts | sequences, attack, lambda: replayed(target.said))


def replayed(addresses: dict[str, str]) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
    asking = context.socket(zmq.DEALER)
    asking.setsockopt(zmq.LINGER, 0)
    asking.connect(addresses["replay"])
    asking.send_multipart([b"", (95).to_bytes(8, "big")])
    assert asking.poll(10_000)
    asking.close()


METHODS = st.sampled_from([b"GET", b"POST", b"PUT", b"OPTIONS", b"HEAD", b"DELETE", b"PRI", b"X"])
PATHS = [
    *(b"/v1/chat/completions", b"/v1/completions", b"/v1/models", b"/v1/responses"),
    *(b"/tokenize", b"/detokenize", b"/metrics", b"/health", b"/openapi.json"),
    *(b"/admin/tiers", b"/admin/tiers/explain", b"/admin/tiers/evict?tier=%00&worker=x"),
    *(b"/admin/tiers/verify?timeout_s=nan", b"/admin/workers/x/drain"),
    *(b"/admin/workers/%ff%00/load", b"/admin/workers/x/role/%0a", b"/admin/workers/x/load"),
    *(b"/admin/workers/x/undrain", b"/admin/workers/x/role/prefill", b"/admin/"),
    *(b"/admin/tiers?model=smol", b"/admin/tiers/statistics?worker=x", b"/admin/tiers/verify"),
    *(b"/v1/embeddings", b"/v1/rerank", b"/v1/score", b"/v1/models/smol", b"/live", b"/ready"),
    *(b"/healthz", b"/ping", b"/version", b"/load", b"/tokenizer_info", b"/invocations"),
    b"/v1/chat/completions/batch",
    *(b"/admin/planner", b"/admin/planner/explain?at=nan", b"/admin/planner/history"),
    *(b"/admin/planner/explain", b"/admin/planner/explain?at=%00&at=1e999", b"/admin/planner/x"),
    *(b"/admin/route/explain", b"/leave"),
    *(path.encode() for path in sorted(PAGE_PATHS)),
    *(b"/admin/live/decision?request=%00", b"/admin/live/decision"),
    *(b"/admin/live", b"/admin/live/door", b"/admin/live/", b"/ui/../x", b"/%00", b"/..", b"*"),
]
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
    made = st.tuples(METHODS, st.sampled_from(PATHS), lines, BODIES).map(
        lambda parts: (
            b"%b %b HTTP/1.1\r\n%b\r\n\r\n%b"
            % (parts[0], parts[1], b"\r\n".join([*headers, *parts[2]]), parts[3])
        )
    )
    return made | st.binary(max_size=400)


def test_no_path_is_forgotten() -> None:
    """Each route of each application stands in the list of what is fuzzed."""
    services = make_services(FakeDispatcher())
    services.operations = [Console(OperationsContext(services=services, local_socket=None))]
    facts = DoorFacts(needs_key=False, operations=True)
    spoken = OpenAi().mount(OpenAiConfig(kind="openai"), services, facts)
    forgotten = {
        route.resource.canonical
        for app in (
            build_app(HttpConfig(), services, [spoken]),
            build_local_app(HttpConfig(), services, [spoken], "door.sock"),
            build_app(HttpConfig(operations="open"), services),
        )
        for route in app.router.routes()
        if route.resource is not None and not is_fuzzed(route.resource.get_info())
    }
    assert forgotten == set()


def is_fuzzed(resource: Mapping[str, Any]) -> bool:
    pattern = resource.get("pattern") or re.compile(re.escape(resource["path"]))
    return any(pattern.fullmatch(path.decode().split("?")[0]) for path in PATHS)


STATUS = re.compile(rb"HTTP/1\.[01] (\d{3})")
THE_PAGE = {path.encode() for path in PAGE_PATHS}
OPEN = {b"/live", b"/ready", b"/healthz", b"/ping", *THE_PAGE}
OPEN_TO_OPERATORS = {*OPEN, b"/health", b"/metrics"}


def test_http_without_a_key(target: FuzzedProcess) -> None:
    address = target.said["http"]

    def attack(case: bytes) -> None:
        path = case.split(b" ", 2)[1:2]
        for status in STATUS.findall(exchange(address, case)):
            assert not status.startswith(b"5"), case
            if status.startswith(b"2"):
                assert path[0].split(b"?")[0] in OPEN, "a stranger was answered"

    run_cases(target, http_requests(), attack, lambda: chat(address))


@pytest.mark.parametrize("name", ["http", "operators", "local", "open"])
def test_http_with_a_key(target: FuzzedProcess, name: str) -> None:
    """Also at the address for operators, and on the Unix socket, which asks for no key.

    The last front door knows no keys.
    """
    address = target.said[name]

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


def test_operators_without_a_key(target: FuzzedProcess) -> None:
    """On their address they read without a key, but nothing under /admin/."""
    address = target.said["operators"]

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
