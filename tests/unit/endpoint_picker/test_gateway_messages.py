"""The order of a gateway's messages, their words, and what is read of answers."""

from __future__ import annotations

import json

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st
from tests.support.front_door import engine_info

from commutator import Candidate, WorkerRecord
from commutator.contract.routing import Decision, WorkerLoad
from commutator_endpoint_picker.endpoints import endpoint_of, in_order_of_trial
from commutator_endpoint_picker.messages import (
    CHUNK_BYTES,
    DESTINATION,
    SERVED,
    SUBSET,
    Decided,
    answered,
    headers_of,
    message,
    parsed,
    passed_body,
    picked,
    served_by,
    subset_of,
)
from commutator_endpoint_picker.order import GatewayError, Order
from commutator_endpoint_picker.usage import Tokens, UsageTail

KINDS = [
    f"{side}_{part}" for side in ("request", "response") for part in ("headers", "body", "trailers")
]


@given(st.lists(st.tuples(st.sampled_from([*KINDS, None]), st.booleans()), max_size=9))
def test_what_comes_in_order_is_taken_and_all_else_refused(
    sent: list[tuple[str | None, bool]],
) -> None:
    order = Order()
    open_sides = {"request": True, "response": True}
    begun = {"request": False, "response": False}
    for kind, ends in sent:
        side, _, part = (kind or "none_").partition("_")
        legal = (
            kind is not None
            and open_sides[side]
            and begun[side] == (part != "headers")
            and (side == "request" or begun["request"])
        )
        if not legal:
            with pytest.raises(GatewayError):
                order.take(kind, ends=ends)
            return
        order.take(kind, ends=ends)
        begun[side] = True
        if part == "trailers" or ends:
            open_sides[side] = False
        assert order.answered == (not open_sides["response"])
        assert order.request_over == (not open_sides["request"] or begun["response"])


@given(st.binary(max_size=300))
def test_bytes_are_a_message_or_refused(data: bytes) -> None:
    try:
        request = parsed(data)
    except GatewayError:
        return
    subset_of(request)
    served_by(request)
    list(headers_of(request.request_headers))


@given(st.binary(max_size=3 * CHUNK_BYTES), st.booleans(), st.booleans())
def test_bodies_are_cut_and_come_whole(body: bytes, trailers: bool, duplex: bool) -> None:
    response = message("ProcessingResponse")
    decided = Decided(endpoints=["10.0.0.1:80", "10.0.0.2:80"], headers={"A": "b"}, body=body)
    head, *rest = [
        response.FromString(data) for data in picked(decided, had_body=True, had_trailers=trailers)
    ]
    common = head.request_headers.response
    told = {one.header.key: one.header.raw_value for one in common.header_mutation.set_headers}
    assert told == {
        b"a": b"b",
        DESTINATION.encode(): b"10.0.0.1:80,10.0.0.2:80",
        b"content-length": str(len(body)).encode(),
    }
    metadata = head.dynamic_metadata.fields["envoy.lb"].struct_value.fields[DESTINATION]
    assert metadata.string_value == "10.0.0.1:80,10.0.0.2:80"
    assert common.clear_route_cache
    if trailers:
        assert rest.pop().HasField("request_trailers")
    pieces = [one.request_body.response.body_mutation.streamed_response for one in rest]
    assert b"".join(piece.body for piece in pieces) == body
    assert all(len(piece.body) <= CHUNK_BYTES for piece in pieces)
    assert [piece.end_of_stream for piece in pieces] == [False] * (len(pieces) - 1) + [not trailers]
    back = [response.FromString(data) for data in passed_body(body, ends=True, duplex=duplex)]
    if duplex:
        got = [one.response_body.response.body_mutation.streamed_response for one in back]
        assert b"".join(piece.body for piece in got) == body
        assert got[-1].end_of_stream
    else:
        assert len(back) == 1
        assert not back[0].response_body.response.HasField("body_mutation")


def test_a_request_without_a_body_gets_none() -> None:
    decided = Decided(endpoints=["10.0.0.1:80"], headers={}, body=b"x")
    assert len([*picked(decided, had_body=False, had_trailers=False)]) == 1


def test_hints_are_lists_or_text() -> None:
    request = message("ProcessingRequest")()
    assert subset_of(request) is None
    fields = request.metadata_context.filter_metadata["envoy.lb.subset_hint"].fields
    fields[SUBSET].string_value = "10.0.0.1:80, 10.0.0.2:80,"
    assert subset_of(request) == frozenset({"10.0.0.1:80", "10.0.0.2:80"})
    listed = fields[SUBSET].list_value.values
    listed.add().string_value = "10.0.0.3:80"
    assert subset_of(request) == frozenset({"10.0.0.3:80"})
    listed[0].string_value = ""
    assert subset_of(request) == frozenset()
    assert served_by(request) is None
    known = request.metadata_context.filter_metadata["envoy.lb"].fields
    known[SERVED].string_value = "10.0.0.3:80"
    assert served_by(request) == "10.0.0.3:80"


def test_an_answer_of_ours_is_immediate() -> None:
    said = message("ProcessingResponse").FromString(
        answered(429, b"{}", {"Retry-After": "1"}, "busy")
    )
    immediate = said.immediate_response
    assert (immediate.status.code, immediate.body, immediate.details) == (429, b"{}", "busy")
    assert immediate.headers.set_headers[0].header.key == b"retry-after"


def usage_of(*pieces: bytes) -> Tokens:
    tail = UsageTail()
    for piece in pieces:
        tail.take(piece)
    return tail.tokens(7)


@pytest.mark.parametrize(
    ("usage", "expected"),
    [
        ({"prompt_tokens": 9, "completion_tokens": 3}, Tokens(9, 0, 3)),
        (
            {
                "prompt_tokens": 9,
                "completion_tokens": 3,
                "prompt_tokens_details": {"cached_tokens": 8, "audio_tokens": None},
            },
            Tokens(9, 8, 3),
        ),
        ({"prompt_tokens": 9, "total_tokens": 9}, Tokens(9, 0, 0)),
        (
            {"input_tokens": 9, "output_tokens": 3, "cache_read_input_tokens": 4},
            Tokens(9, 4, 3),
        ),
        (
            {
                "input_tokens": 9,
                "output_tokens": 3,
                "input_tokens_details": {"cached_tokens": 99},
            },
            Tokens(9, 9, 3),
        ),
        ({"prompt_tokens": "nine"}, Tokens(7, 0, 0)),
        ({"prompt_tokens": -9, "completion_tokens": -1}, Tokens(0, 0, 0)),
    ],
)
def test_usage_is_read_in_every_protocol(usage: dict[str, object], expected: Tokens) -> None:
    whole = json.dumps({"choices": [{"text": '"usage": {"prompt_tokens": 1}'}], "usage": usage})
    assert usage_of(whole.encode()) == expected


def test_without_usage_events_are_tokens() -> None:
    assert usage_of(b"data: 1\n\ndata: 2\n\n", b"data: [DONE]\n\n") == Tokens(7, 0, 2)
    assert usage_of(b"{}") == Tokens(7, 0, 0)


@given(st.lists(st.binary(max_size=40), max_size=20))
def test_any_answer_is_counted(pieces: list[bytes]) -> None:
    tokens = usage_of(*pieces)
    assert 0 <= tokens.cached <= tokens.prompt
    assert tokens.generated >= 0


def record(
    address: str, *, forwards: bool = True, engine: str = "e", ident: str = "w"
) -> WorkerRecord:
    return WorkerRecord(
        worker_id=ident,
        engine=engine,
        kind="fake",
        model="m",
        address=address,
        info=engine_info(forwards=forwards),
    )


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("http://10.0.0.1:8000", "10.0.0.1:8000"),
        ("10.0.0.1:8000", "10.0.0.1:8000"),
        ("http://[fd00::1]:8000/token?x", "[fd00::1]:8000"),
        ("http://localhost:80", "127.0.0.1:80"),
        ("http://pod.example:80", None),
        ("http://10.0.0.1", None),
        ("http://10.0.0.1:99999", None),
        ("ipc:///run/x", None),
        ("", None),
    ],
)
def test_workers_answer_at_their_address(address: str, expected: str | None) -> None:
    assert endpoint_of(record(address), {}) == expected
    assert endpoint_of(record(address, forwards=False), {}) is None


def test_front_doors_beside_workers_answer_for_them() -> None:
    assert endpoint_of(record("10.0.0.1:5000", forwards=False), {"e": 80}) == "10.0.0.1:80"
    assert endpoint_of(record("10.0.0.1:5000", forwards=False), {"f": 80}) is None


def test_the_next_best_are_tried_next() -> None:
    def candidate(ident: str, active: int) -> Candidate:
        return Candidate(worker=record("", ident=ident), load=WorkerLoad(active_requests=active))

    candidates = [candidate("a", 3), candidate("b", 1), candidate("c", 2), candidate("d", 0)]
    endpoints = {name: f"10.0.0.{name}" for name in "abc"}
    decision = Decision(worker_id="a", policy="p", reason="r")
    order = in_order_of_trial(decision, "10.0.0.a", candidates, endpoints)
    assert order == ["10.0.0.a", "10.0.0.b", "10.0.0.c"]
    costs = {"a": {"cost": 1.0}, "b": {"cost": 9.0}, "c": {"cost": 2.0}}
    decision = evolve(decision, scores=costs)
    order = in_order_of_trial(decision, "10.0.0.a", candidates, endpoints)
    assert order == ["10.0.0.a", "10.0.0.c", "10.0.0.b"]
    assert in_order_of_trial(decision, "x", [], {}) == ["x"]
