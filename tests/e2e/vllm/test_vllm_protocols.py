"""Every operation of the protocols with a real vLLM: docs/reference/protocols.md."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.support.launched_servers import wait_for_workers
from tests.support.protocol_requests import TOOL_TEMPLATE, Doors, ask, attached_config, cases
from tests.support.vllm_server import MODEL, running_vllm

from commutator_scaffold.local_cluster import LocalCluster

pytestmark = [pytest.mark.vllm, pytest.mark.long]

CASES = cases("tests/e2e/vllm/test_vllm_protocols.py::test_it_is_served")


@pytest.fixture(scope="module")
def doors() -> Doors:
    return Doors()


@pytest.fixture(scope="module")
def cluster(doors: Doors, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    folder = tmp_path_factory.mktemp("vllm")
    template = folder / "template.jinja"
    template.write_text(TOOL_TEMPLATE)
    arguments = (
        f"--chat-template={template}",
        "--enable-auto-tool-choice",  # tool calls are the engine's own
        "--tool-call-parser=hermes",
    )
    with running_vllm(folder, *arguments) as url:
        config = attached_config(doors, "vllm", url, MODEL, template)
        with LocalCluster(config, start_timeout_s=600) as running:
            wait_for_workers(running, 1)
            yield running


@pytest.mark.parametrize(("protocol", "operation", "engine"), CASES)
def test_it_is_served(
    cluster: LocalCluster, doors: Doors, protocol: str, operation: str, engine: str
) -> None:
    ask(cluster.url, protocol, operation, MODEL.name, grpc_port=doors.grpc_port)
