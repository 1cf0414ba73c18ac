"""A real SGLang server that embeds: through the front door, its vectors are its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
from tests.support.protocol_requests import ask, cases
from tests.support.sglang_server import MODEL, running_sglang

from commutator_scaffold.local_cluster import LocalCluster

pytestmark = [pytest.mark.slow, pytest.mark.sglang]

CASES = cases("tests/e2e/sglang/test_sglang_pooling.py::test_it_is_served")
TEXTS = ["Paris is the capital of France.", "bread", "A longer text, " * 12, "<|im_start|> is text"]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """(the URL of SGLang, the URL of a front door before it)."""
    with running_sglang(tmp_path_factory.mktemp("sglang"), "--is-embedding") as server:
        config = {
            "models": [{"name": "smollm2", "source": MODEL.source}],
            "engines": [{"kind": "sglang", "url": server.url}],
            "frontend": {
                "protocols": [{"kind": "openai"}, {"kind": "pooling"}, {"kind": "kserve"}]
            },
        }
        with LocalCluster(config) as cluster:
            yield server.url, cluster.url


def answered(url: str, body: dict[str, Any]) -> Any:
    answer = httpx.post(url, json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    return answer.json()


def vectors(url: str, **asked: Any) -> np.ndarray:
    data = answered(f"{url}/v1/embeddings", {"model": "smollm2", **asked})["data"]
    return np.array([one["embedding"] for one in data], dtype=np.float32)


def test_equal_to_its_own(served: tuple[str, str]) -> None:
    own, ours = served
    for asked in ({"input": TEXTS}, {"input": TEXTS[0]}, {"input": [[504, 2905, 282], [7, 8]]}):
        expected, found = vectors(own, **asked), vectors(ours, **asked)
        assert found.shape == expected.shape
        assert np.abs(found - expected).max() < 1e-5


def test_the_same_by_tensors(served: tuple[str, str]) -> None:
    own, ours = served
    tensor = {"name": "text_input", "datatype": "BYTES", "shape": [len(TEXTS)], "data": TEXTS}
    (output,) = answered(f"{ours}/v2/models/smollm2/infer", {"inputs": [tensor]})["outputs"]
    found = np.array(output["data"], dtype=np.float32).reshape(output["shape"])
    assert np.abs(found - vectors(own, input=TEXTS)).max() < 1e-5


def test_ranks_and_refuses(served: tuple[str, str]) -> None:
    _, ours = served
    asked = {"model": "smollm2", "query": TEXTS[0], "documents": [*TEXTS[1:], TEXTS[0]]}
    body = answered(f"{ours}/v2/rerank", asked)
    assert body["results"][0]["index"] == 3
    prompt = {"model": "smollm2", "prompt": "a"}
    answer = httpx.post(f"{ours}/v1/completions", json=prompt, timeout=60)
    assert answer.status_code == 400
    assert "sglang does not generate" in answer.json()["error"]["message"]


@pytest.mark.parametrize(("protocol", "operation", "engine"), CASES)
def test_it_is_served(served: tuple[str, str], protocol: str, operation: str, engine: str) -> None:
    ask(served[1], protocol, operation, MODEL.name)
