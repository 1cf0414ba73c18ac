"""Every operation of the protocols with TensorRT-LLM's stand-in: docs/reference/protocols.md."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.support.launched_servers import wait_for_workers
from tests.support.oracle import SOURCE
from tests.support.protocol_requests import Doors, ask, cases
from tests.support.trtllm.cluster import launched

from commutator_scaffold.local_cluster import LocalCluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

CASES = cases("tests/e2e/test_trtllm_protocols.py::test_it_is_served")


@pytest.fixture(scope="module")
def doors() -> Doors:
    return Doors()


@pytest.fixture(scope="module")
def cluster(doors: Doors) -> Iterator[LocalCluster]:
    config = {
        "models": [{"name": "m", "source": SOURCE, "max_model_len": 1024}],
        "engines": [launched(SOURCE, name="t")],
        "frontend": doors.config,
        "runtime": {"lease_s": 60},  # a busy machine loses no worker
    }
    with LocalCluster(config, start_timeout_s=300) as running:
        wait_for_workers(running, 1)
        yield running


@pytest.mark.parametrize(("protocol", "operation", "engine"), CASES)
def test_it_is_served(
    cluster: LocalCluster, doors: Doors, protocol: str, operation: str, engine: str
) -> None:
    ask(cluster.url, protocol, operation, "m", grpc_port=doors.grpc_port)
