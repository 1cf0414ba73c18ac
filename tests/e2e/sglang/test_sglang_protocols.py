"""Every operation of the protocols with a real SGLang: docs/reference/protocols.md."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.support.launched_servers import wait_for_workers
from tests.support.protocol_requests import PROTOCOLS, ask, cases
from tests.support.sglang_server import MODEL, SglangServer

from commutator_scaffold.local_cluster import LocalCluster

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

CASES = cases("tests/e2e/sglang/test_sglang_protocols.py::test_it_is_served")


@pytest.fixture(scope="module")
def cluster(sglang: SglangServer) -> Iterator[LocalCluster]:
    config = {
        "models": [{"name": MODEL.name, "source": MODEL.source}],
        "engines": [{"kind": "sglang", "url": sglang.url}],
        "frontend": {"protocols": PROTOCOLS},
        "runtime": {"lease_s": 300},  # a busy machine makes it no lost worker
    }
    with LocalCluster(config, start_timeout_s=600) as running:
        wait_for_workers(running, 1)
        yield running


@pytest.mark.parametrize(("protocol", "operation", "engine"), CASES)
def test_it_is_served(cluster: LocalCluster, protocol: str, operation: str, engine: str) -> None:
    ask(cluster.url, protocol, operation, MODEL.name)
