"""Every operation of the protocols with a real SGLang: docs/reference/protocols.md."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.support.launched_servers import wait_for_workers
from tests.support.protocol_requests import TOOL_TEMPLATE, Doors, ask, attached_config, cases
from tests.support.sglang_server import MODEL, SglangServer

from commutator_scaffold.local_cluster import LocalCluster

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

CASES = cases("tests/e2e/sglang/test_sglang_protocols.py::test_it_is_served")


@pytest.fixture(scope="module")
def doors() -> Doors:
    return Doors()


@pytest.fixture(scope="module")
def cluster(
    sglang: SglangServer, doors: Doors, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LocalCluster]:
    template = tmp_path_factory.mktemp("template") / "template.jinja"
    template.write_text(TOOL_TEMPLATE)
    config = attached_config(doors, "sglang", sglang.url, MODEL, template)
    with LocalCluster(config, start_timeout_s=600) as running:
        wait_for_workers(running, 1)
        yield running


@pytest.mark.parametrize(("protocol", "operation", "engine"), CASES)
def test_it_is_served(
    cluster: LocalCluster, doors: Doors, protocol: str, operation: str, engine: str
) -> None:
    ask(cluster.url, protocol, operation, MODEL.name, grpc_port=doors.grpc_port)
