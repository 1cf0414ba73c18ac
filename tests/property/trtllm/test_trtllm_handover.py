"""64-bit integers and the opaque state reach the other server unchanged."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from commutator.contract.disagg import HandoverRequest
from commutator.contract.request import FinishReason, GenerateRequest, SamplingParams, TokenDelta
from commutator.contract.worker import EngineInfo, WorkerRecord
from commutator.engine.protocol import Codec, unpack_delta
from commutator.errors import EngineHandoverError
from commutator_trtllm.handover import WHOLE, ContextFirst, handover_info, request_number
from commutator_trtllm.messages import DeltaReader, request_body

INT64 = st.integers(-(1 << 63), (1 << 64) - 1)
NUMBERS = st.integers((1 << 53) + 1, (1 << 63) - 1)
REQUEST = GenerateRequest(
    request_id="r", token_ids=[1, 2, 3], sampling=SamplingParams(max_tokens=5)
)

values = st.recursive(
    st.none() | st.booleans() | INT64 | st.text(max_size=9) | st.floats(allow_nan=False,
                                                                       allow_infinity=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner,
                                                                 max_size=3),
    max_leaves=8,
)  # fmt: skip
params = st.fixed_dictionaries(
    {
        "request_type": st.just("context_only"),
        "first_gen_tokens": st.lists(st.integers(0, 1 << 18), max_size=2),
        "ctx_request_id": NUMBERS,
        "disagg_request_id": NUMBERS,
        "encoded_opaque_state": st.binary(max_size=40).map(lambda state: state.hex()),
    },
    optional={"of_tomorrow": values, "first_gen_log_probs": values, "ctx_dp_rank": INT64},
)


def worker(name: str) -> WorkerRecord:
    info = EngineInfo(
        kind="trtllm",
        version="1",
        model="m",
        max_model_len=2048,
        block_size=32,
        kv_capacity_blocks=9,
        handover=handover_info("m", "1", 32),
    )
    return WorkerRecord(
        worker_id=name, engine="trtllm", kind="trtllm", model="m", address="http://h:1", info=info
    )


HANDOVER = HandoverRequest(
    handover_id="try-1", request=REQUEST, prefill=worker("p"), decode=worker("d")
)


def answer(words: dict[str, Any], reason: str = "not_finished") -> bytes:
    choice = {"index": 0, "token_ids": [7], "finish_reason": reason, "disaggregated_params": words}
    return msgspec.json.encode({"choices": [choice], "prompt_token_ids": [1, 2, 3]})


def hop(request: GenerateRequest) -> GenerateRequest:
    """Between two of our processes."""
    packed = msgspec.msgpack.decode(msgspec.msgpack.encode(request))
    return msgspec.convert(packed, GenerateRequest)


@given(params)
def test_what_the_context_server_says_reaches_the_generation_server(words: dict[str, Any]) -> None:
    (last,) = DeltaReader().whole(answer(words))
    _, ids, extras = msgspec.msgpack.decode(msgspec.msgpack.encode(Codec().pack_delta(1, last)))
    handed = unpack_delta(ids, extras).handover
    leg = hop(ContextFirst().decode_request(HANDOVER, handed))
    body = msgspec.json.decode(msgspec.json.encode(request_body(leg, "m")))
    sent = body["disaggregated_params"]
    number = request_number(HANDOVER.handover_id)
    expected = {**words, "request_type": "generation_only", "disagg_request_id": number}
    assert sent == expected
    assert all(type(sent[name]) is type(expected[name]) for name in expected)


@given(st.text(max_size=40))
def test_the_request_number_is_a_large_positive_int64(handover_id: str) -> None:
    handover = evolve(HANDOVER, handover_id=handover_id)
    leg = hop(ContextFirst().prefill_request(handover))
    body = msgspec.json.decode(msgspec.json.encode(request_body(leg, "m")))
    number = body["disaggregated_params"]["disagg_request_id"]
    assert number == request_number(handover_id)
    assert 1 << 62 <= number < 1 << 63
    assert body["stream"] is False


def test_numbers_of_several_tries_differ() -> None:
    assert len({request_number(f"try-{each}") for each in range(1000)}) == 1000


def test_the_legs_are_the_request() -> None:
    """The context server stops after one token by itself, so both get the same limits."""
    style = ContextFirst()
    first = style.prefill_request(HANDOVER)
    assert evolve(first, handover=None) == REQUEST
    second = style.decode_request(HANDOVER, {"request_type": "context_only", "ctx_request_id": 5})
    assert evolve(second, handover=None) == REQUEST
    with pytest.raises(EngineHandoverError, match="p answered without disaggregated_params"):
        style.decode_request(HANDOVER, None)


def test_an_answer_that_is_complete_is_not_handed_over() -> None:
    """The first token was the last: the decode worker serves the whole request."""
    (last,) = DeltaReader().whole(answer({"ctx_request_id": 1}, reason="stop"))
    assert last == TokenDelta(token_ids=(7,), finish_reason=FinishReason.STOP, handover=WHOLE)
    assert ContextFirst().decode_request(HANDOVER, dict(WHOLE)) == REQUEST


def test_what_must_be_the_same() -> None:
    style, info = ContextFirst(), handover_info("m", "1.2", 32)
    assert style.mismatch(info, info) is None
    for other in (("m", "1.3", 32), ("n", "1.2", 32), ("m", "1.2", 64)):
        assert style.mismatch(info, handover_info(*other)) is not None
