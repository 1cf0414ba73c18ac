"""Rerank, score, classify, pool and Cohere's embed: what is asked of workers, and the answers."""

from __future__ import annotations

import base64
import math
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.front_door import MODEL, FakeDispatcher, FrontDoor, engine_info, front_door
from tests.support.tiny_encoders import write_tokenizer

from commutator import FinishReason, GenerateRequest, TokenDelta
from commutator.tokenizer import TextModel, load_text_model
from commutator_openai.protocol import OpenAiConfig
from commutator_pooling.endpoints import cosine, pairs_of, ranked
from commutator_pooling.protocol import PoolingConfig

PROTOCOLS = (OpenAiConfig(kind="openai"), PoolingConfig(kind="pooling"))
WORDS = 55


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    folder: Path = tmp_path_factory.mktemp("words")
    write_tokenizer(folder)
    (folder / "config.json").write_text('{"max_position_embeddings": 12}')
    return load_text_model(folder)


def one_hot(ids: Sequence[int]) -> list[float]:
    """How often each word is in an input."""
    return [float(ids.count(5 + word)) for word in range(WORDS)]


def answer(request: GenerateRequest) -> Sequence[TokenDelta | Exception]:
    """Vectors count words; a score is the share of the second text's words in the first."""
    pooling = request.pooling
    assert pooling is not None
    at, rows = 0, list[list[float]]()
    for number, length in enumerate(pooling.lengths):
        ids = [*request.token_ids[at : at + length]]
        at += length
        match pooling.operation:
            case "embed":
                rows.append(one_hot(ids)[: pooling.dimensions])
            case "token_embed":
                rows += [[float(token), 1.0] for token in ids]
            case "score":
                first = pooling.firsts[number]
                words = [token for token in ids[first:] if token >= 5]
                rows.append([sum(token in ids[:first] for token in words) / len(words)])
            case "classify":
                rows.append([0.25, 0.75] if pooling.activation else [-1.0, 1.0])
    data = b"".join(struct.pack(f"<{len(row)}f", *row) for row in rows)
    return [TokenDelta(finish_reason=FinishReason.STOP, vectors=data)]


def dispatcher_of(*operations: str) -> FakeDispatcher:
    labels = ("bad", "good") if "classify" in operations else ()
    return FakeDispatcher(
        script=answer, workers=[engine_info(operations=operations, labels=labels)]
    )


def door_of(text: TextModel, *operations: str) -> Any:
    return front_door(dispatcher_of(*operations), {MODEL: text}, protocols=PROTOCOLS)


QUERY, DOCUMENTS = "w1 w2", ["w9", {"text": "w1 w2"}, "w1 w8"]


@pytest.mark.parametrize("operation", ["score", "embed"])
@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
async def test_rerank(text: TextModel, path: str, operation: str) -> None:
    async with door_of(text, operation) as door:
        asked = {"query": QUERY, "documents": DOCUMENTS, "top_n": 2}
        status, body = await door.post(path, asked)
        assert status == 200
        scores = [one["relevance_score"] for one in body["results"]]
        assert [one["index"] for one in body["results"]] == [1, 2]
        assert scores == pytest.approx([1.0, 0.5])
        if path == "/v2/rerank":
            assert all("document" not in one for one in body["results"])
            assert body["meta"]["billed_units"] == {"search_units": 1}
        else:
            assert [one["document"]["text"] for one in body["results"]] == ["w1 w2", "w1 w8"]
            assert body["usage"]["total_tokens"] == body["usage"]["prompt_tokens"] > 0
        status, body = await door.post(path, {**asked, "top_n": None})
        assert (status, len(body["results"])) == (200, 3)


async def test_texts_are_left_out_where_asked(text: TextModel) -> None:
    async with door_of(text, "score") as door:
        asked = {"query": QUERY, "documents": DOCUMENTS, "return_documents": False}
        _, body = await door.post("/v1/rerank", asked)
        assert all("document" not in one for one in body["results"])


@pytest.mark.parametrize("operation", ["score", "embed"])
async def test_documents_are_cut_as_cohere_does_and_said_so(
    text: TextModel, operation: str
) -> None:
    long = " ".join(["w1"] * 40)
    async with door_of(text, operation) as door:
        asked = {"query": "w1", "documents": [long, "w1"]}
        status, body = await door.post("/v1/rerank", asked)
        assert (status, body["error"]["param"]) == (400, "documents")
        for path, more in [("/v2/rerank", {}), ("/v1/rerank", {"max_tokens_per_doc": 5})]:
            sent = {"model": MODEL, **asked, **more}
            async with door.session.post(door.url + path, json=sent) as answered:
                assert answered.status == 200
                assert answered.headers["X-Commutator-Truncated"] == "1"
        pooling = door.dispatcher.requests[-1].pooling
        assert max(pooling.lengths) == (5 + 1 + 3 if operation == "score" else 5)


async def test_score(text: TextModel) -> None:
    async with door_of(text, "score") as door:
        for path in ("/score", "/v1/score"):
            for asked, expected in [
                ({"text_1": "w1", "text_2": "w1"}, [1.0]),
                ({"text_1": "w1", "text_2": ["w1", "w2"]}, [1.0, 0.0]),
                ({"queries": ["w1", "w2"], "documents": ["w1", "w1"]}, [1.0, 0.0]),
            ]:
                status, body = await door.post(path, asked)
                assert status == 200
                assert [one["score"] for one in body["data"]] == expected
                assert {one["object"] for one in body["data"]} == {"score"}
        for wrong, param in [
            ({"text_1": ["w1", "w2"], "text_2": ["w1"]}, "text_1"),
            ({"text_1": "w1"}, "text_2"),
            ({"text_1": "w1", "queries": "w1", "text_2": "w1"}, "text_1"),
            ({"text_1": "w1", "text_2": [{"image": "x"}]}, "text_2"),
        ]:
            status, body = await door.post("/score", wrong)
            assert (status, body["error"]["param"]) == (400, param)


async def test_classify(text: TextModel) -> None:
    async with door_of(text, "classify") as door:
        status, body = await door.post("/classify", {"input": ["w1", "w2"]})
        assert status == 200
        classes = {"label": "good", "probs": [0.25, 0.75], "num_classes": 2}
        assert body["data"] == [{"index": 0, **classes}, {"index": 1, **classes}]
        _, body = await door.post("/classify", {"input": "w1", "use_activation": False})
        assert body["data"][0]["probs"] == [-1.0, 1.0]


async def test_pooling(text: TextModel) -> None:
    async with door_of(text, "embed", "token_embed") as door:
        _, body = await door.post("/pooling", {"input": "w1 w3"})
        vector = body["data"][0]["data"]
        assert [word for word, count in enumerate(vector) if count] == [1, 3]
        _, body = await door.post("/pooling", {"input": ["w1", "w2 w3"], "task": "token_embed"})
        assert [one["data"] for one in body["data"]] == [
            [[2.0, 1.0], [6.0, 1.0], [3.0, 1.0]],
            [[2.0, 1.0], [7.0, 1.0], [8.0, 1.0], [3.0, 1.0]],
        ]
        _, body = await door.post("/pooling", {"input": "w1", "encoding_format": "base64"})
        data = base64.b64decode(body["data"][0]["data"])
        assert struct.unpack(f"<{WORDS}f", data)[1] == 1.0


async def test_the_embed_of_cohere(text: TextModel) -> None:
    async with door_of(text, "embed") as door:
        asked = {"texts": ["w1", "w2"], "input_type": "search_query"}
        sent = {"model": MODEL, **asked, "embedding_types": ["float", "base64"]}
        async with door.session.post(f"{door.url}/v2/embed", json=sent) as answered:
            assert answered.headers["X-Commutator-Ignored"] == "input_type"
            body = await answered.json()
        assert [one.index(1.0) for one in body["embeddings"]["float"]] == [1, 2]
        assert len(body["embeddings"]["base64"]) == 2
        tokens = body["meta"]["billed_units"]["input_tokens"]
        assert (tokens, body["texts"]) == (6, ["w1", "w2"])
        long = {"texts": [" ".join(f"w{n}" for n in range(20))]}
        for truncate, words in [("END", range(10)), ("START", range(10, 20)), (None, range(10))]:
            _, body = await door.post("/v2/embed", {**long, "truncate": truncate})
            vector = body["embeddings"]["float"][0]
            assert [word for word, count in enumerate(vector) if count] == [*words]
        status, body = await door.post("/v2/embed", {**long, "truncate": "NONE"})
        assert (status, body["error"]["param"]) == (400, "texts")
        status, body = await door.post("/v2/embed", {"images": ["data:"]})
        assert status == 400


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("/classify", {"input": "w1"}),
        ("/v2/rerank", {"query": "w1", "documents": ["w1"]}),
        ("/v2/embed", {"texts": ["w1"]}),
    ],
)
async def test_models_that_cannot_say_what_they_do(
    text: TextModel, path: str, asked: dict[str, Any]
) -> None:
    async with door_of(text, "generate") as door:
        status, body = await door.post(path, asked)
        assert (status, body["error"]["code"]) == (400, "unsupported_endpoint")
        assert body["error"]["message"].endswith("they generate")


async def test_bounds(text: TextModel) -> None:
    async with door_of(text, "embed") as door:
        status, _ = await post(door, "/v2/rerank", query="w1", documents=["w1"] * 10_001)
        assert status == 400
        status, _ = await post(door, "/v2/rerank", query="w1", documents=[])
        assert status == 400


async def post(door: FrontDoor, path: str, **body: Any) -> tuple[int, Any]:
    return await door.post(path, body)


finite = st.floats(-1e6, 1e6)


@given(st.lists(finite, max_size=30), st.integers(1, 40) | st.none())
def test_the_best_come_first_and_equal_ones_in_their_order(
    scores: list[float], top: int | None
) -> None:
    best = ranked(scores, top)
    expected = sorted(range(len(scores)), key=lambda place: (-scores[place], place))
    assert best == expected[: len(scores) if top is None else top]


@given(st.lists(finite, min_size=3, max_size=3), st.lists(finite, min_size=3, max_size=3))
def test_cosines_are_symmetric_and_bounded(one: list[float], other: list[float]) -> None:
    found = cosine(one, other)
    assert math.isclose(found, cosine(other, one), abs_tol=1e-9)
    assert abs(found) <= 1 + 1e-9
    if math.hypot(*one) > 1e-3:
        assert math.isclose(cosine(one, one), 1)


def test_pairs() -> None:
    assert pairs_of(["a"], ["b", "c"]) == [("a", "b"), ("a", "c")]
    assert pairs_of(["a", "b"], ["c", "d"]) == [("a", "c"), ("b", "d")]
