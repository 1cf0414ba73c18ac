"""POST /v1/embeddings: what is asked of workers, and how their vectors are answered."""

from __future__ import annotations

import base64
import struct
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.front_door import MODEL, TEXT, FakeDispatcher, engine_info, front_door

from commutator import FinishReason, GenerateRequest, TokenDelta
from commutator.errors import EngineError, RequestError, RoutingError
from commutator_openai.pooling import Asked, Cut, parts_of, tokenized

EMBEDS = [engine_info(operations=("embed",))]


def row(first_token: int, length: int) -> list[float]:
    """What the worker answers to an input, to know it by."""
    return [float(first_token), float(length), 0.5]


def vectors(request: GenerateRequest) -> Sequence[TokenDelta | Exception]:
    assert request.pooling is not None
    at, rows = 0, b""
    for length in request.pooling.lengths:
        rows += struct.pack("<3f", *row(request.token_ids[at], length))
        at += length
    return [TokenDelta(finish_reason=FinishReason.STOP, vectors=rows)]


def embedding_dispatcher(**values: Any) -> FakeDispatcher:
    return FakeDispatcher(**{"script": vectors, "workers": EMBEDS, **values})


async def test_texts_and_token_ids() -> None:
    dispatcher = embedding_dispatcher()
    async with front_door(dispatcher) as door:
        for given, ids in [
            ("Hello there", [TEXT.encode("Hello there")]),
            (["Hello", "a longer text"], [TEXT.encode("Hello"), TEXT.encode("a longer text")]),
            ([5, 6, 7], [[5, 6, 7]]),
            ([[9, 8], [1]], [[9, 8], [1]]),
        ]:
            status, body = await door.post("/v1/embeddings", {"input": given})
            assert status == 200
            assert [one["embedding"] for one in body["data"]] == [
                row(one[0], len(one)) for one in ids
            ]
            assert [one["index"] for one in body["data"]] == [*range(len(ids))]
            tokens = sum(map(len, ids))
            assert body["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}
            assert (body["object"], body["model"]) == ("list", MODEL)
    assert set(map(tuple, filter(None, dispatcher.hashes))) == set(), "no prefix is looked for"


async def test_base64_has_the_same_numbers() -> None:
    async with front_door(embedding_dispatcher()) as door:
        asked = {"input": [[5, 6]], "encoding_format": "base64"}
        status, body = await door.post("/v1/embeddings", asked)
        assert status == 200
        data = base64.b64decode(body["data"][0]["embedding"])
        assert [*struct.unpack("<3f", data)] == row(5, 2)


async def test_many_inputs_are_divided_and_come_back_in_their_order() -> None:
    dispatcher = embedding_dispatcher(workers=EMBEDS * 4)
    async with front_door(dispatcher) as door:
        inputs = [[number + 1] * (1 + number * 7 % 60) for number in range(2_048)]
        status, body = await door.post("/v1/embeddings", {"input": inputs})
        assert status == 200
        assert [one["embedding"] for one in body["data"]] == [
            row(one[0], len(one)) for one in inputs
        ]
        metrics = await (await door.session.get(f"{door.url}/metrics")).text()
    assert len(dispatcher.requests) > 8, "workers share it"
    assert dispatcher.open == 0
    total = sum(map(len, inputs))
    assert (
        f'commutator_tokens_total{{kind="prompt",model="{MODEL}"}} {total}' in metrics
        or str(total) in metrics
    )


@pytest.mark.parametrize(
    ("asked", "param", "text"),
    [
        ({"input": ""}, "input", "no empty text"),
        ({"input": []}, "input", "expected"),
        ({"input": ["a", ""]}, "input", "no empty text"),
        ({"input": ["a"] * 2_049}, "input", "at most 2048"),
        ({"input": [10**8]}, "input", "out of vocabulary"),
        ({"input": "a", "dimensions": 0}, "dimensions", "expected"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format", "base64"),
        ({"input": "a", "truncation_side": "left"}, "truncation_side", "needs"),
        ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "at least 1"),
        ({"input": "many words " * 50}, "input", "at most 16 are served"),
        ({"messages": [], "input": "a"}, "messages", "only texts"),
    ],
)
async def test_what_is_wrong_is_said(asked: dict[str, Any], param: str, text: str) -> None:
    async with front_door(embedding_dispatcher(longest=16)) as door:
        status, body = await door.post("/v1/embeddings", asked)
        assert (status, body["error"]["param"]) == (400, param)
        assert text in body["error"]["message"]


async def test_inputs_are_cut_only_when_asked_and_never_silently() -> None:
    dispatcher = embedding_dispatcher(longest=16)
    async with front_door(dispatcher) as door:
        ids = [*range(100, 130)]
        cuts: list[tuple[dict[str, Any], list[int]]] = [
            ({"truncate_prompt_tokens": -1}, ids[:16]),
            ({"truncate_prompt_tokens": 5}, ids[:5]),
            ({"truncate_prompt_tokens": 5, "truncation_side": "left"}, ids[-5:]),
        ]
        for more, kept in cuts:
            asked: dict[str, Any] = {"model": MODEL, "input": [ids, [1]], **more}
            async with door.session.post(f"{door.url}/v1/embeddings", json=asked) as answer:
                assert answer.headers["X-Commutator-Truncated"] == "1"
                body = await answer.json()
            assert body["data"][0]["embedding"] == row(kept[0], len(kept))
        asked = {"model": MODEL, "input": [1, 2], "truncate_prompt_tokens": -1}
        async with door.session.post(f"{door.url}/v1/embeddings", json=asked) as answer:
            assert "X-Commutator-Truncated" not in answer.headers


async def test_a_refusal_of_the_worker_names_the_field() -> None:
    def refuse(_: GenerateRequest) -> Sequence[TokenDelta | Exception]:
        return [RequestError("dimensions: vectors have 384 numbers, got 5")]

    async with front_door(embedding_dispatcher(script=refuse)) as door:
        status, body = await door.post("/v1/embeddings", {"input": "a", "dimensions": 5})
        assert (status, body["error"]["param"]) == (400, "dimensions")


@pytest.mark.parametrize(
    ("error", "status"),
    [(EngineError("it broke"), 500), (RoutingError("no worker is ready"), 503)],
)
async def test_failures_end_every_part(error: Exception, status: int) -> None:
    calls = 0

    def some(request: GenerateRequest) -> Sequence[TokenDelta | Exception]:
        nonlocal calls
        calls += 1
        return [error] if calls == 3 else vectors(request)

    dispatcher = embedding_dispatcher(script=some, workers=EMBEDS * 4)
    async with front_door(dispatcher) as door:
        inputs = [[1] * 300 for _ in range(100)]
        got, _ = await door.post("/v1/embeddings", {"input": inputs})
        assert got == status
    assert dispatcher.open == 0


async def test_a_worker_that_sends_too_little_is_an_error() -> None:
    def short(_: GenerateRequest) -> Sequence[TokenDelta | Exception]:
        return [TokenDelta(finish_reason=FinishReason.STOP, vectors=b"1234567")]

    async with front_door(embedding_dispatcher(script=short)) as door:
        status, _ = await door.post("/v1/embeddings", {"input": "a"})
        assert status == 500


async def test_models_that_make_none_say_what_they_do() -> None:
    async with front_door(FakeDispatcher()) as door:
        status, body = await door.post("/v1/embeddings", {"input": "a"})
        assert (status, body["error"]["code"]) == (400, "unsupported_endpoint")
        assert "they generate" in body["error"]["message"]


@given(
    st.lists(st.integers(1, 20_000), min_size=1, max_size=200),
    st.integers(0, 70),
)
def test_parts_have_every_input_once_and_a_bound(lengths: list[int], workers: int) -> None:
    parts = parts_of(lengths, workers)
    assert sorted(number for part in parts for number in part) == [*range(len(lengths))]
    for part in parts:
        assert part
        assert len(part) == 1 or sum(lengths[number] for number in part) <= 8_192


@given(
    st.lists(
        st.one_of(st.text(max_size=60), st.lists(st.integers(0, 49_000), min_size=1, max_size=40)),
        min_size=1,
        max_size=8,
    ),
    st.integers(1, 30),
    st.sampled_from(["left", "right"]),
)
def test_cut_inputs_have_what_was_asked(inputs: list[Any], most: int, side: Any) -> None:
    # The tokenizer of the tests has no token for some control characters.
    inputs = [
        one if not isinstance(one, str) or TEXT.tokenizer.encode(one).ids else "x" for one in inputs
    ]
    cut = Asked(model=None, operation="embed", inputs=inputs, cut=Cut(side=side, tokens=most))
    whole = Asked(model=None, operation="embed", inputs=inputs)
    found = tokenized(TEXT.tokenizer, inputs, cut, 4_096, TEXT.vocab_size)
    for one, full in zip(
        found, tokenized(TEXT.tokenizer, inputs, whole, 4_096, TEXT.vocab_size), strict=True
    ):
        assert len(one.token_ids) == min(most, len(full.token_ids))
        assert one.was_cut == (len(full.token_ids) > most)
        if isinstance(one.token_ids, list) and not one.was_cut:
            assert [*one.token_ids] == [*full.token_ids]
        expected = [*full.token_ids][:most] if side == "right" else [*full.token_ids][-most:]
        assert [*one.token_ids] == expected
