"""Two vLLM servers behind a front door for most tests: each start takes half a minute of CPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
import yaml
from tests.e2e.vllm.cluster import CONNECTION, server_urls, wait_for_workers
from tests.support.vllm_server import need_vllm

from commutator.trust import adopt
from commutator_engine_kit.launching import api_key_at
from commutator_scaffold.local_cluster import LocalCluster


@pytest.fixture(scope="session")
def two_servers(root: Path) -> Iterator[LocalCluster]:
    """examples/vllm.yaml, with the servers' development endpoints."""
    need_vllm()
    env = {"VLLM_SERVER_DEV_MODE": "1"}
    patient = ("--set", "runtime.lease_s=60")  # a busy machine makes no worker a lost one
    config = yaml.safe_load((root / "examples" / "vllm.yaml").read_text())
    config["engines"][0]["connection"] = CONNECTION
    with LocalCluster(
        config,
        arguments=patient,
        env=env,
        start_timeout_s=600,
        joins=False,
    ) as running:
        wait_for_workers(running, 2)
        yield running


@pytest.fixture(scope="module")
def cluster(two_servers: LocalCluster) -> Iterator[LocalCluster]:
    with adopt(two_servers.secret):
        yield two_servers


@pytest.fixture
def vllm_url(pair: LocalCluster) -> str:
    """One of the two servers itself."""
    return server_urls(pair)["vllm-1"]


@pytest.fixture
def direct(vllm_url: str) -> Iterator[openai.OpenAI]:
    """The same questions to one vLLM itself."""
    key = api_key_at(vllm_url) or ""
    with openai.OpenAI(base_url=f"{vllm_url}/v1", api_key=key, max_retries=0) as made:
        yield made
