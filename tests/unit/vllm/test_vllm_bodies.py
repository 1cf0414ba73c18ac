"""A request as the body that vLLM takes."""

from __future__ import annotations

import json
import struct
from typing import Any

import msgspec
import pytest
from attrs import evolve

from commutator import AdapterIdentity, Constraint, Operation, Pooling
from commutator.contract.request import GenerateRequest, SamplingParams
from commutator.errors import RequestError
from commutator_vllm.messages import (
    COMPLETIONS,
    GENERATE,
    Classes,
    Embeddings,
    check_forwarded,
    pooling_body,
    request_body,
    request_headers,
)

REQUEST = GenerateRequest(
    request_id="r1",
    token_ids=[5, 6, 7],
    sampling=SamplingParams(
        max_tokens=20,
        min_tokens=3,
        temperature=0.5,
        top_k=4,
        seed=9,
        presence_penalty=0.25,
        logit_bias={17: -1.5},
        top_logprobs=0,
        stop_token_ids=(2,),
    ),
    cache_salt="tenant",
    priority=7,
)


def test_for_the_token_endpoint() -> None:
    body = request_body(GENERATE, REQUEST, "m", use_priority=True)
    assert body["model"] == "m"
    assert body["token_ids"] == [5, 6, 7]
    assert (body["cache_salt"], body["priority"]) == ("tenant", 7)
    assert body["stream"] is True
    sampling = body["sampling_params"]
    assert sampling["max_tokens"] == 20
    assert sampling["logit_bias"] == {"17": -1.5}
    assert (sampling["seed"], sampling["top_k"], sampling["logprobs"]) == (9, 4, 0)
    assert sampling["detokenize"] is False
    assert "stop" not in sampling


def test_for_completions() -> None:
    body = request_body(COMPLETIONS, REQUEST, "m", use_priority=False)
    assert body["prompt"] == [5, 6, 7]
    assert body["return_token_ids"] is True
    assert (body["max_tokens"], body["stop_token_ids"]) == (20, [2])
    assert "priority" not in body
    assert "detokenize" not in body


def test_stop_strings_need_text() -> None:
    request = evolve(REQUEST, sampling=SamplingParams(stop=("\n",)))
    sampling = request_body(GENERATE, request, "m", use_priority=False)["sampling_params"]
    assert sampling["stop"] == ["\n"]
    assert sampling["detokenize"] is True


def test_a_continued_answer_gets_what_is_left() -> None:
    for begun, least in ((2, 1), (5, 0)):
        request = evolve(REQUEST, generated_prefix=begun)
        sampling = request_body(GENERATE, request, "m", use_priority=False)["sampling_params"]
        assert sampling["max_tokens"] == 20 - begun
        assert sampling["min_tokens"] == least


def test_an_adapter_is_a_model() -> None:
    request = evolve(REQUEST, adapter=AdapterIdentity(name="sql", digest="a" * 64))
    assert request_body(GENERATE, request, "m", use_priority=False)["model"] == "a" * 64


def test_what_is_vllms_own_goes_among_the_sampling_parameters() -> None:
    request = evolve(REQUEST, options={"bad_words": ["a"]})
    body = request_body(GENERATE, request, "m", use_priority=False)
    assert body["sampling_params"]["bad_words"] == ["a"]
    body = request_body(COMPLETIONS, request, "m", use_priority=False)
    assert body["bad_words"] == ["a"]


@pytest.mark.parametrize(
    ("constraint", "told"),
    [
        (Constraint(kind="json_object"), {"json_object": True}),
        (Constraint(kind="json_schema", value='{"b":1,"a":2}'), {"json": '{"b":1,"a":2}'}),
        (Constraint(kind="regex", value="a+"), {"regex": "a+"}),
        (Constraint(kind="choice", value=("a", "b")), {"choice": ("a", "b")}),
        (Constraint(kind="grammar", value="root ::= x"), {"grammar": "root ::= x"}),
        (
            Constraint(kind="structural_tag", value='{"triggers": [], "added_tokens": {"<a>": 1}}'),
            {"structural_tag": '{"triggers": []}'},
        ),
    ],
)
def test_constraints_in_its_words(constraint: Constraint, told: dict[str, Any]) -> None:
    request = evolve(REQUEST, constraint=constraint)
    body = request_body(GENERATE, request, "m", use_priority=False)
    assert body["sampling_params"]["structured_outputs"] == told
    body = request_body(COMPLETIONS, request, "m", use_priority=False)
    assert body["structured_outputs"] == told


@pytest.mark.parametrize(
    ("whitespace", "separators"),
    [
        (None, None),
        ("", (",", ":")),
        (" ", ("(?: )?,(?: )?", "(?: )?:(?: )?")),
    ],
)
def test_schemas_for_llguidance_have_their_white_space(
    whitespace: str | None, separators: tuple[str, str] | None
) -> None:
    schema = json.dumps({"not": {"type": ["string", "array", "object", "number", "null"]}})
    for constraint, told in (
        (Constraint(kind="json_object", whitespace=whitespace), {"type": "object"}),
        (
            Constraint(kind="json_schema", value=schema, whitespace=whitespace),
            {"allOf": [{"type": ["boolean"]}]},
        ),
    ):
        request = evolve(REQUEST, constraint=constraint)
        body = request_body(GENERATE, request, "m", use_priority=False, llguidance=True)
        (guide,) = body["sampling_params"]["structured_outputs"].items()
        assert guide[0] == "json"
        asked = json.loads(guide[1])
        options = asked.pop("x-guidance", None)
        assert asked == told
        if separators is None:
            assert options is None
        else:
            item, key = separators
            expected = {"item_separator": item, "key_separator": key}
            assert options == {"whitespace_flexible": False, **expected}


def test_tags_for_llguidance_are_a_grammar_with_the_ids_of_their_marks() -> None:
    structure = {"begin": "<call>\n", "schema": {"type": "object"}, "end": "</call>"}
    tag = {"structures": [structure], "triggers": ["<call>"], "added_tokens": {"<call>": 7}}
    request = evolve(REQUEST, constraint=Constraint(kind="structural_tag", value=json.dumps(tag)))
    body = request_body(GENERATE, request, "m", use_priority=False, llguidance=True)
    (guide,) = body["sampling_params"]["structured_outputs"].items()
    assert guide[0] == "grammar"
    assert "<[7]> (" in guide[1]
    assert '"</call>"' in guide[1]


@pytest.mark.parametrize(
    ("changes", "refused"),
    [
        ({}, True),
        ({"tool_choice": "auto"}, True),
        ({"tools": [{"type": "function", "name": "a", "strict": True}]}, True),
        ({"tool_choice": "required"}, False),
        ({"tool_choice": "none"}, False),
        ({"tools": [{"type": "function", "function": {"name": "a", "strict": False}}]}, False),
        ({"tools": None, "response_format": {"json_schema": {"strict": True}}}, False),
    ],
)
def test_strict_calls_of_its_own_are_refused(changes: dict[str, Any], refused: bool) -> None:
    tools = [{"type": "function", "function": {"name": "a", "strict": True}}]
    body = json.dumps({"tools": tools, **changes}).encode()
    if not refused:
        check_forwarded(body)
        return
    with pytest.raises(RequestError, match="strict") as found:
        check_forwarded(body)
    assert found.value.param == "tools"


def test_a_schema_that_excludes_all_is_refused() -> None:
    request = evolve(REQUEST, constraint=Constraint(kind="json_schema", value="false"))
    with pytest.raises(RequestError, match="excludes all"):
        request_body(GENERATE, request, "m", use_priority=False, llguidance=True)


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"constraint": Constraint(kind="regex", value="a", after=(7,))}, "response_format"),
        ({"constraint": Constraint(kind="json_object", whitespace=" ?")}, "response_format"),
        (
            {"constraint": Constraint(kind="json_schema", value='{"not": {"const": 1}}')},
            "response_format",
        ),
        (
            {"constraint": Constraint(kind="regex", value="a"), "generated_prefix": 1},
            "response_format",
        ),
    ],
)
def test_what_it_cannot_be_told_is_refused(changes: dict[str, Any], param: str) -> None:
    for path in (GENERATE, COMPLETIONS):
        with pytest.raises(RequestError) as refused:
            request_body(path, evolve(REQUEST, **changes), "m", use_priority=False)
        assert refused.value.param == param


def test_a_prefill_leg_is_no_stream() -> None:
    for words, stream in (({"do_remote_decode": True}, False), ({"do_remote_prefill": True}, True)):
        body = request_body(GENERATE, evolve(REQUEST, handover=words), "m", use_priority=False)
        assert body["stream"] is stream
        assert ("stream_options" in body) is stream
        assert body["kv_transfer_params"] == words


def test_headers() -> None:
    assert request_headers(REQUEST) == {"X-Request-Id": "r1"}
    assert request_headers(evolve(REQUEST, data_parallel_rank=0))["X-data-parallel-rank"] == "0"


@pytest.mark.parametrize("operation", [Operation.EMBED, Operation.CLASSIFY])
def test_inputs_to_which_nothing_is_generated(operation: str) -> None:
    pooling = Pooling(operation=operation, lengths=(2, 1), activation=False)
    body = pooling_body(REQUEST, pooling, "m", use_priority=False)
    assert body["input"] == [[5, 6], [7]]
    assert body["use_activation"] is False
    # Only vectors may be asked for as bytes.
    assert ("encoding_format" in body) == (operation == Operation.EMBED)


def test_rows_of_an_answer_are_in_the_order_of_the_inputs() -> None:
    first, second = struct.pack("<2f", 0.25, 0.75), struct.pack("<2f", 0.5, 0.5)
    classes = [{"index": 1, "label": "b", "probs": [0.5, 0.5]}, {"index": 0, "probs": [0.25, 0.75]}]
    found: Any = msgspec.convert({"data": classes}, Classes)
    assert found.vectors == first + second
    rows = [{"index": 1, "embedding": second}, {"index": 0, "embedding": first}]
    found = msgspec.json.decode(msgspec.json.encode({"data": rows}), type=Embeddings)
    assert found.vectors == first + second
