"""Adapters by name: what the table makes of them, and every protocol serves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from attrs import evolve
from tests.support.front_door import TEXT, FakeDispatcher, engine_info, front_door
from tests.support.principals import gate_of, key_of
from tests.support.traffic_checks import deployment_of

from commutator import FinishReason, TokenDelta
from commutator.contract.principal import Principal
from commutator.errors import EngineUnavailableError
from commutator_anthropic.protocol import AnthropicConfig
from commutator_engine_kit.model_identity import adapter_digest
from commutator_kserve.protocol import KserveConfig
from commutator_openai.protocol import OpenAiConfig
from commutator_responses.protocol import ResponsesConfig
from commutator_testing.traffic import TrafficContract
from commutator_traffic.config import AdapterConfig, AliasConfig, TableConfig
from commutator_traffic.table import Table

MESSAGES = [{"role": "user", "content": "Hi"}]
PROTOCOLS = (
    OpenAiConfig(kind="openai"),
    AnthropicConfig(kind="anthropic"),
    ResponsesConfig(kind="responses"),
    KserveConfig(kind="kserve"),
)


def write(folder: Path, weights: bytes = b"some") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text("{}")
    (folder / "adapter_model.safetensors").write_bytes(weights)
    return folder


def config_of(folder: Path, model: str = "v1", **more: Any) -> TableConfig:
    adapters = {"sql": AdapterConfig(model=model, source=str(folder)), "old": None}
    return TableConfig(adapters=adapters, **more)


def test_a_name_means_a_model_with_what_is_in_the_folder(tmp_path: Path) -> None:
    table = Table(config_of(write(tmp_path / "sql")))
    assert table.aliases == {"sql": ("v1",)}
    assert table.chosen("sql", "any", ["v2", "v1"]) == "v1"
    assert table.chosen("sql", "any", ["v2"]) is None
    found = table.adapter("sql", "v1")
    assert found is not None
    assert (found.name, found.source) == ("sql", str(tmp_path / "sql"))
    assert found.digest == adapter_digest(tmp_path / "sql")
    assert table.adapter("sql", "v2") is None
    assert table.adapter("old", "v1") is None
    assert table.after("sql", ["v1"], EngineUnavailableError("lost"), ["v1", "v2"]) is None


def test_other_content_is_another_adapter(tmp_path: Path) -> None:
    one = Table(config_of(write(tmp_path / "sql"))).adapter("sql", "v1")
    same = Table(config_of(write(tmp_path / "copy"))).adapter("sql", "v1")
    other = Table(config_of(write(tmp_path / "sql", b"others"))).adapter("sql", "v1")
    assert one == same != other
    (tmp_path / "sql" / "adapter_config.json").unlink()
    (tmp_path / "sql" / "adapter_model.safetensors").unlink()
    (tmp_path / "sql").rmdir()
    gone = Table(config_of(tmp_path / "sql", aliases={"both": AliasConfig(models={"v1": 1})}))
    assert gone.aliases == {"both": ("v1",)}, "the rest is served"


def test_what_is_wrong_is_said_where_it_stands(tmp_path: Path) -> None:
    folder = write(tmp_path / "sql")
    deployment = deployment_of("v1", "sql2")

    def problems(config: TableConfig) -> list[tuple[str, str]]:
        return list(config.problems(deployment))

    assert problems(config_of(folder)) == []
    ((path, text),) = problems(config_of(folder, model="v9"))
    assert (path, "known models: sql2, v1" in text) == ("adapters.sql.model", True)
    assert [*config_of(folder).missing()] == []
    ((path, text),) = config_of(tmp_path / "none").missing()
    assert (path, "no folder" in text) == ("adapters.sql.source", True)
    (folder / "adapter_model.safetensors").unlink()
    ((_, text),) = config_of(folder).missing()
    assert text.endswith("has no adapter_model.safetensors")
    write(folder)
    ((path, text),) = problems(config_of(folder, aliases={"sql": AliasConfig(models={"v1": 1})}))
    assert (path, text) == ("adapters.sql", "an alias has this name already")
    taken = TableConfig(adapters={"sql2": AdapterConfig(model="v1", source=str(folder))})
    ((path, text),) = problems(taken)
    assert (path, text) == ("adapters.sql2", "a model has this name already")


class TestTableWithAdapters(TrafficContract):
    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path_factory: pytest.TempPathFactory) -> None:
        self.folder = write(tmp_path_factory.mktemp("adapters") / "sql")

    def make_traffic(self) -> Table:
        return Table(
            config_of(self.folder, aliases={"both": AliasConfig(models={"v1": 1, "v2": 1})})
        )


def requests(model: str) -> list[tuple[str, dict[str, Any], str]]:
    """(path, body, where the answer names the model) of every protocol that generates."""
    tensor = {"name": "text_input", "shape": [1], "datatype": "BYTES", "data": ["Hi"]}
    return [
        ("/v1/chat/completions", {"model": model, "messages": MESSAGES}, "model"),
        ("/v1/completions", {"model": model, "prompt": "Hi"}, "model"),
        ("/v1/responses", {"model": model, "input": "Hi"}, "model"),
        ("/v1/messages", {"model": model, "messages": MESSAGES, "max_tokens": 9}, "model"),
        (f"/v2/models/{model}/infer", {"inputs": [tensor]}, "model_name"),
    ]


async def test_every_protocol_asks_for_it_and_names_it(tmp_path: Path) -> None:
    write(tmp_path / "sql")
    dispatcher = FakeDispatcher()
    async with front_door(dispatcher, {"v1": TEXT}, protocols=PROTOCOLS) as door:
        table = door.services.traffic = Table(config_of(tmp_path / "sql"))
        for name, adapter in (("sql", table.adapter("sql", "v1")), ("v1", None)):
            for path, body, place in requests(name):
                async with door.session.post(door.url + path, json=body) as response:
                    said = await response.json()
                    assert (response.status, said[place]) == (200, name), path
                assert dispatcher.requests[-1].adapter == adapter
                # Blocks are told apart by the adapter, whose hashes are not those of the text.
                assert dispatcher.hashes[-1] is None or adapter is None
        async with door.session.get(door.url + "/v1/models") as response:
            cards = {one["id"]: one["parent"] for one in (await response.json())["data"]}
        assert cards == {"v1": None, "sql": "v1"}
        metrics = door.services.metrics.render().decode()
        assert 'commutator_alias_requests_total{alias="sql",model="v1"} 5.0' in metrics
        for path, body, _ in requests("old"):
            async with door.session.post(door.url + path, json=body) as response:
                assert response.status == 404


async def test_vectors_are_not_made_without_it(tmp_path: Path) -> None:
    write(tmp_path / "sql")
    delta = TokenDelta(finish_reason=FinishReason.STOP, vectors=bytes(12))
    dispatcher = FakeDispatcher(
        workers=[evolve(engine_info(), operations=("embed",))], script=lambda _: [delta]
    )
    async with front_door(dispatcher, {"v1": TEXT}, protocols=PROTOCOLS) as door:
        door.services.traffic = Table(config_of(tmp_path / "sql"))
        body = {"model": "sql", "input": "Hi"}
        async with door.session.post(door.url + "/v1/embeddings", json=body) as response:
            error = (await response.json())["error"]
            assert (response.status, error["param"]) == (400, "model")
        assert not dispatcher.requests


async def test_who_may_use_the_model_may_use_its_adapters(tmp_path: Path) -> None:
    write(tmp_path / "sql")
    ada, bob = (
        Principal(name=name, models=frozenset({model}))
        for name, model in (("ada", "v1"), ("bob", "v2"))
    )
    models = {"v1": TEXT, "v2": TEXT}
    gate = gate_of(ada, bob)
    async with front_door(FakeDispatcher(), models, protocols=PROTOCOLS, gate=gate) as door:
        door.services.traffic = Table(config_of(tmp_path / "sql"))
        path, body, _ = requests("sql")[0]
        for name, status in (("ada", 200), ("bob", 404)):
            async with door.session.post(
                door.url + path, json=body, headers=key_of(name)
            ) as response:
                assert response.status == status
