"""One quick-start cluster for all end-to-end tests that only talk to it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from commutator.testing import LocalCluster

MODEL = "smollm2-135m"


@pytest.fixture(scope="session")
def cluster(root: Path) -> Iterator[LocalCluster]:
    with LocalCluster(root / "examples" / "quickstart.yaml") as running:
        yield running


@pytest.fixture
def client(cluster: LocalCluster) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0) as made:
        yield made
