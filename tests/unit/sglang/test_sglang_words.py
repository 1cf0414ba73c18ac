"""Requests as SGLang takes them, and its answers as deltas and EngineInfo."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from commutator import Constraint
from commutator.contract.disagg import HandoverRequest
from commutator.contract.request import FinishReason, GenerateRequest, SamplingParams, TokenDelta
from commutator.contract.worker import EngineInfo, EventSource, KvTransferInfo, WorkerRecord
from commutator.errors import EngineError, EngineHandoverError, RequestError
from commutator_engine_kit.completions import ModelList
from commutator_engine_kit.http import FailedAnswerError, message_of
from commutator_sglang.discovery import (
    engine_info,
    engine_load,
    event_source,
    private_event_source,
)
from commutator_sglang.handover import RoomHandover, room_of
from commutator_sglang.messages import (
    DeltaReader,
    KvEvents,
    Loads,
    ModelInfo,
    RankLoad,
    ServerInfo,
    request_body,
)

SERVER = ServerInfo("0.5.23", 16, 4096, 2042)
REQUEST = GenerateRequest(
    request_id="r1",
    token_ids=[5, 6, 7],
    sampling=SamplingParams(max_tokens=20, min_tokens=3, temperature=0.5, logit_bias={17: -1.5}),
    cache_salt="tenant",
    priority=7,
)


def test_everything_is_written_out() -> None:
    body = request_body(REQUEST, "x-r1", SERVER)
    assert (body["rid"], body["input_ids"], body["stream"]) == ("x-r1", [5, 6, 7], True)
    assert body["cache_salt"] == "tenant"
    sampling = body["sampling_params"]
    assert (sampling["max_new_tokens"], sampling["min_new_tokens"]) == (20, 3)
    assert (sampling["temperature"], sampling["top_k"]) == (0.5, -1)
    assert sampling["logit_bias"] == {"17": -1.5}
    assert not {"priority", "return_logprob", "lora_path", "routed_dp_rank"} & set(body)


@pytest.mark.parametrize(("low_first", "expected"), [(True, 7), (False, -7)])
def test_lower_priorities_are_served_earlier(low_first: bool, expected: int) -> None:
    server = ServerInfo(
        "1",
        16,
        64,
        60,
        enable_priority_scheduling=True,
        schedule_low_priority_values_first=low_first,
    )
    assert request_body(REQUEST, "x", server)["priority"] == expected


def test_a_seed_is_refused_where_it_would_be_ignored() -> None:
    drawn = evolve(REQUEST, sampling=SamplingParams(seed=3))
    with pytest.raises(RequestError, match="seed"):
        request_body(drawn, "x", SERVER)
    greedy = evolve(REQUEST, sampling=SamplingParams(seed=3, temperature=0.0))
    assert request_body(greedy, "x", SERVER)["sampling_params"]["sampling_seed"] == 3
    heeding = ServerInfo("1", 16, 64, 60, enable_deterministic_inference=True)
    assert request_body(drawn, "x", heeding)["sampling_params"]["sampling_seed"] == 3


def test_a_continued_answer_gets_what_is_left() -> None:
    for begun, least in ((2, 1), (5, 0)):
        sampling = request_body(evolve(REQUEST, generated_prefix=begun), "x", SERVER)[
            "sampling_params"
        ]
        assert (sampling["max_new_tokens"], sampling["min_new_tokens"]) == (20 - begun, least)


def test_what_is_sglangs_own_goes_among_the_sampling_parameters() -> None:
    body = request_body(evolve(REQUEST, options={"stop_regex": "a+"}), "x", SERVER)
    assert body["sampling_params"]["stop_regex"] == "a+"


@pytest.mark.parametrize(
    ("constraint", "told"),
    [
        (Constraint(kind="json_object"), {"json_schema": '{"type": "object"}'}),
        (Constraint(kind="json_schema", value='{"b":1,"a":2}'), {"json_schema": '{"b":1,"a":2}'}),
        (Constraint(kind="regex", value="a+"), {"regex": "a+"}),
        (Constraint(kind="choice", value=("a.", "b")), {"regex": "(a\\.|b)"}),
        (Constraint(kind="grammar", value="root ::= x"), {"ebnf": "root ::= x"}),
        (Constraint(kind="structural_tag", value="{}"), {"structural_tag": "{}"}),
    ],
)
def test_constraints_in_its_words(constraint: Constraint, told: dict[str, str]) -> None:
    """With another library than llguidance."""
    sampling = request_body(evolve(REQUEST, constraint=constraint), "x", SERVER)["sampling_params"]
    assert told.items() <= sampling.items()
    plain = request_body(REQUEST, "x", SERVER)["sampling_params"]
    assert sampling.keys() - plain.keys() == told.keys()


def test_constraints_for_llguidance() -> None:
    server = msgspec.structs.replace(SERVER, grammar_backend="llguidance")
    request = evolve(REQUEST, constraint=Constraint(kind="json_object", whitespace=" ?"))
    told = request_body(request, "x", server)["sampling_params"]["json_schema"]
    assert json.loads(told) == {
        "type": "object",
        "x-guidance": {
            "whitespace_flexible": False,
            "item_separator": "(?: ?)?,(?: ?)?",
            "key_separator": "(?: ?)?:(?: ?)?",
        },
    }
    tag = {"structures": [{"begin": "<a", "schema": {}, "end": ">"}], "triggers": ["<a"]}
    request = evolve(REQUEST, constraint=Constraint(kind="structural_tag", value=json.dumps(tag)))
    assert "start: " in request_body(request, "x", server)["sampling_params"]["ebnf"]


@pytest.mark.parametrize(
    "changes",
    [
        {"constraint": Constraint(kind="json_schema", value='{"multipleOf": 2}')},
        {"constraint": Constraint(kind="regex", value="a", after=(7,))},
        {"constraint": Constraint(kind="json_object", whitespace=" ?")},
        {"constraint": Constraint(kind="json_object"), "generated_prefix": 1},
    ],
)
def test_what_it_cannot_be_told_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(RequestError):
        request_body(evolve(REQUEST, **changes), "x", SERVER)


def chunk(ids: list[int], done: int, **meta: Any) -> bytes:
    told = {"output_ids": ids, "meta_info": {"completion_tokens": done, **meta}}
    return b"data: " + json.dumps(told).encode() + b"\n\n"


@given(
    st.lists(st.lists(st.integers(0, 99), max_size=4), min_size=1, max_size=6),
    st.booleans(),
    st.data(),
)
def test_both_ways_to_stream_give_the_same(
    parts: list[list[int]], incremental: bool, data: st.DataObject
) -> None:
    whole: list[int] = []
    stream = b""
    for number, part in enumerate(parts):
        whole += part
        last = number == len(parts) - 1
        meta = {"finish_reason": {"type": "length", "length": 1}} if last else {}
        stream += chunk(part if incremental else whole, len(whole), cached_tokens=3, **meta)
    stream += b"data: [DONE]\n\n"
    cut = data.draw(st.integers(0, len(stream)))
    reader = DeltaReader(None)
    deltas = [*reader.feed(stream[:cut]), *reader.feed(stream[cut:])]
    assert [token for delta in deltas for token in delta.token_ids] == whole
    assert [d.cached_tokens for d in deltas if d.cached_tokens is not None] == [3]
    assert [d.finish_reason for d in deltas if d.finish_reason] == [FinishReason.LENGTH]
    assert reader.ended


def read(*chunks: bytes, reader: DeltaReader | None = None) -> list[TokenDelta]:
    reader = reader or DeltaReader(None)
    return [delta for data in chunks for delta in reader.feed(data)]


def test_logprobs_of_what_is_new() -> None:
    values: list[Any] = [[-0.5, 8, None], [-0.25, 9, None]]
    tops: list[Any] = [[[-0.5, 8, None], [-2.0, 1, None]], [[-3.0, 2, None], [-0.25, 9, None]]]
    reader = DeltaReader(1)
    first = chunk([8], 1, output_token_logprobs=values[:1], output_top_logprobs=tops[:1])
    second = chunk([8, 9], 2, output_token_logprobs=values, output_top_logprobs=tops)
    deltas = read(first, second, reader=reader)
    (entry,) = deltas[1].logprobs
    assert (entry.token_id, entry.logprob, entry.top) == (9, -0.25, ((9, -0.25),))
    with pytest.raises(EngineError, match="0 logprobs for 1 tokens"):
        read(chunk([8], 1), reader=DeltaReader(0))


def test_stopped_by_what() -> None:
    (delta,) = read(chunk([8, 2], 2, finish_reason={"type": "stop", "matched": 2}))
    assert (delta.finish_reason, delta.stop_reason) == (FinishReason.STOP, 2)


def test_ended_here_where_the_server_would_go_on() -> None:
    reader = DeltaReader(None, {9})
    (delta,) = read(chunk([8, 9, 7], 3), chunk([6], 4), reader=reader)
    assert (delta.token_ids, delta.stop_reason) == ((8, 9), 9)
    assert delta.finish_reason is FinishReason.STOP
    assert reader.ended
    assert reader.cut


@pytest.mark.parametrize(
    ("event", "code"),
    [
        (b'data: {"error": {"message": "too long", "code": 400}}\n\n', 400),
        (b'data: {"error": "too long"}\n\n', 500),
        (
            chunk(
                [], 0, finish_reason={"type": "abort", "message": "too long", "status_code": 503}
            ),
            503,
        ),
    ],
)
def test_failures_in_the_stream(event: bytes, code: int) -> None:
    with pytest.raises(FailedAnswerError, match="too long") as caught:
        read(event)
    assert caught.value.status == code


def test_a_request_that_the_server_aborted() -> None:
    (delta,) = read(chunk([1], 1, finish_reason={"type": "abort", "message": "by name"}))
    assert (delta.finish_reason, delta.error) == (FinishReason.ABORT, "by name")


@pytest.mark.parametrize(
    "body",
    [b'{"error":{"message":"m"}}', b'{"error":"m"}', b'{"detail":"m"}', b'{"message":"m"}', b"m"],
)
def test_what_an_error_says(body: bytes) -> None:
    assert message_of(body) == "m"


def test_what_a_server_is() -> None:
    models = ModelList([])
    info = engine_info("http://h:1", SERVER, ModelInfo("m"), models, None)
    assert (info.kind, info.version, info.model) == ("sglang", "0.5.23", "m")
    assert (info.max_model_len, info.block_size, info.kv_capacity_blocks) == (2042, 16, 256)
    assert info.handover is None
    assert info.operations == ("generate",)
    info = engine_info("http://h:1", SERVER, ModelInfo("m", is_generation=False), models, None)
    assert info.operations == ("embed",)
    assert not info.constraints


def test_events_of_each_rank_at_the_host_of_the_server() -> None:
    events = KvEvents("zmq", "*", 5557, 16, 2, "kv", 6557)
    assert event_source(events, "http://10.1.2.3:80") == EventSource(
        endpoint="tcp://10.1.2.3:5557",
        replay_endpoint="tcp://10.1.2.3:6557",
        topic="kv",
        further_ranks=(
            EventSource(
                endpoint="tcp://10.1.2.3:5558", replay_endpoint="tcp://10.1.2.3:6558", topic="kv"
            ),
        ),
    )
    elsewhere = event_source(KvEvents("zmq", "10.9.9.9", 1, 16), "http://h:80")
    assert elsewhere == EventSource(endpoint="tcp://10.9.9.9:1")
    assert event_source(None, "http://h:80") is None


PRIVATE: dict[str, object] = {
    "publisher": "zmq",
    "endpoint": "ipc:///run/a",
    "replay_endpoint": "ipc:///run/b",
}


def test_unix_sockets_are_read_from_the_servers_option() -> None:
    def found(config: object, dp_size: int = 1) -> EventSource | None:
        text = config if isinstance(config, str | None) else json.dumps(config)
        server = ServerInfo("1", 16, 64, 60, dp_size=dp_size, kv_events_config=text)
        return private_event_source(server)

    assert found(PRIVATE | {"topic": "kv"}) == EventSource(
        endpoint="ipc:///run/a", replay_endpoint="ipc:///run/b", topic="kv"
    )
    for other in (
        *(None, "", "[", "{}", {"publisher": "zmq"}, PRIVATE | {"publisher": "null"}),
        *(PRIVATE | {"endpoint": other} for other in ("tcp://*:5557", "ipc://x", "ipc://@x", 7)),
    ):
        assert found(other) is None
    assert found(PRIVATE, dp_size=2) is None


def test_load_of_all_ranks() -> None:
    load = engine_load(Loads([RankLoad(2, 1, 17), RankLoad(1, 0, 16)]), 16, 99)
    assert (load.running, load.waiting, load.kv_used_blocks, load.kv_capacity_blocks) == (
        3,
        1,
        3,
        99,
    )


def worker(name: str, ranks: int, address: str | None) -> WorkerRecord:
    handover = KvTransferInfo(
        protocol="sglang-nixl", identity="m", block_size=16, token_bytes=0, address=address
    )
    info = EngineInfo(
        kind="sglang",
        version="1",
        model="m",
        max_model_len=64,
        block_size=16,
        kv_capacity_blocks=9,
        data_parallel_size=ranks,
        handover=handover,
    )
    return WorkerRecord(
        worker_id=name, engine="sglang", kind="sglang", model="m", address="http://h:1", info=info
    )


def test_both_legs_are_sent_the_same_but_for_the_ranks() -> None:
    prefill, decode = worker("p", 4, "10.0.0.1:8998"), worker("d", 1, None)
    handover = HandoverRequest(
        handover_id="0123456789abcdef0123",
        request=REQUEST,
        prefill=prefill,
        decode=decode,
        prefill_rank=3,
    )
    style = RoomHandover()
    here, there = style.prefill_request(handover), style.decode_request(handover, None)
    assert here.sampling == there.sampling == REQUEST.sampling
    body = request_body(there, "x", SERVER)
    assert body["bootstrap_host"] == "10.0.0.1"
    assert body["bootstrap_port"] == 8998
    assert body["bootstrap_room"] % 4 == 3
    assert body["disagg_prefill_dp_rank"] == 3
    assert "answer_within_s" not in body
    assert here.handover is not None
    assert here.handover["bootstrap_room"] == body["bootstrap_room"]
    with pytest.raises(EngineHandoverError, match="bootstrap_port"):
        style.prefill_request(evolve(handover, prefill=worker("p", 1, None)))


@given(st.text(max_size=30), st.integers(1, 64), st.data())
def test_rooms(handover_id: str, ranks: int, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, ranks - 1))
    room = room_of(handover_id, ranks, rank)
    assert 0 <= room < 1 << 63
    assert room % ranks == rank
    assert json.loads(json.dumps(room)) == room


def test_rooms_have_63_bits_and_differ() -> None:
    rooms = {room_of(str(number), 1, 0) for number in range(1000)}
    assert len(rooms) == 1000
    assert max(rooms) >> 62 == 1


def test_logprobs_of_a_prompt_come_with_the_first_token() -> None:
    values: list[Any] = [[None, 5, None], [-0.5, 6, None], [-4.0, 7, None]]
    tops: list[Any] = [None, [[-0.5, 6, None], [-2.0, 1, None]], [[-0.1, 2, None], [-3.0, 3, None]]]
    told = {"input_token_logprobs": values, "input_top_logprobs": tops}
    reader = DeltaReader(None, prompt_logprobs=1)
    first, second = read(chunk([8], 1, **told), chunk([8, 9], 2, **told), reader=reader)
    assert [(one.token_id, one.logprob, one.top) for one in first.prompt_logprobs] == [
        (6, -0.5, ((6, -0.5),)),
        (7, -4.0, ((2, -0.1),)),
    ]
    assert (first.logprobs, second.prompt_logprobs) == ((), ())
