"""The effective configuration, its origins, and the schema of the file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from attrs import frozen

import commutator_http.plugin
import commutator_openai.plugin
from commutator.config.kinds import file_schema
from commutator.config.load import DEFAULTS, build_config
from commutator.config.show import effective, show_config
from commutator.config.tree import DEFAULT, from_plain, merge
from commutator.config.yaml_file import parse_value, read_file
from commutator.contract.disagg import DisaggregationConfig
from commutator.contract.door import DoorConfig
from commutator.contract.engine import EngineClient, EngineConfig, EngineConnector, LaunchContext
from commutator.contract.routing import Candidate, Filter, RouterConfig, RouteRequest, Scorer
from commutator.contract.settings import PositiveInt, setting
from commutator.errors import ConfigError
from commutator.hookspecs import hookimpl
from commutator.plugins import Installed, PluginHost, load_plugins
from commutator_http.plugin import HttpDoor


@frozen(kw_only=True)
class SteamConfig(EngineConfig):
    pressure_bar: float = setting("Boiler pressure.", 10.0)
    valves: tuple[str, ...] = setting("Names of valves.", ())
    fireman: str = setting("Never shown.", "joe", secret=True)


@frozen(kw_only=True)
class Whistle(Filter):
    pitch: PositiveInt = setting("How high.", 1)

    def keep(self, request: RouteRequest, candidates: Sequence[Candidate]) -> Sequence[Candidate]:
        return candidates


@frozen(kw_only=True)
class Loudness(Scorer):
    decibels: float = setting("How loud.", 1.0)

    def score(self, request: RouteRequest, candidates: Sequence[Candidate]) -> Mapping[str, float]:
        return {}


@frozen(kw_only=True)
class StagedConfig(RouterConfig):
    filters: tuple[Filter, ...] = setting("Filters.", ())
    scorers: tuple[Scorer, ...] = setting("Scorers.", ())


class NullConnector(EngineConnector[SteamConfig]):
    def launch_plan(self, config: SteamConfig, context: LaunchContext) -> None:
        return None

    def connect(self, config: SteamConfig, address: str) -> EngineClient:
        raise NotImplementedError


class Plugin:
    @hookimpl
    def engine_register(self, register: Any) -> None:
        register("steam", SteamConfig, NullConnector())

    @hookimpl
    def router_register(self, register: Any) -> None:
        register("round_robin", RouterConfig, lambda config: config)
        register("staged", StagedConfig, lambda config: config)

    @hookimpl
    def route_stage_register(self, register: Any) -> None:
        register("whistle", Whistle)
        register("loudness", Loudness)

    @hookimpl
    def disagg_register(self, register: Any) -> None:
        register("conditional", DisaggregationConfig, lambda config: config)


def make_host() -> PluginHost:
    host = load_plugins(found=[])
    host.add(Plugin(), Installed("steam", "dist-steam", "1"))
    host.add(commutator_http.plugin, Installed("http", "commutator-http", "1"))
    host.add(commutator_openai.plugin, Installed("openai", "commutator-openai", "1"))
    return host


TEXT = """
models: [{name: "yes", source: "a: b"}]
engines:
  - kind: steam
    valves: [left, "null"]
  - kind: steam
    name: second
router: {kind: round_robin}
frontend:
  api_keys: [{env: KEY}, {file: /keys}]
  kind: http
registry: {kind: memory}
"""


def test_what_is_shown_loads_to_the_same_configuration(tmp_path: Path) -> None:
    host = make_host()
    file = tmp_path / "c.yaml"
    file.write_text(TEXT)
    loaded = build_config(read_file(file), host, [file])
    shown = show_config(loaded.config, loaded.tree).replace("<hidden>", "joe")
    again = build_config(parse_value(shown, "shown"), host, ["shown"])
    assert again.config == loaded.config
    plain = build_config(from_plain(effective(loaded.config), "effective"), host, ["effective"])
    assert plain.config == loaded.config


def test_each_value_says_where_it_came_from(tmp_path: Path) -> None:
    host = make_host()
    file = tmp_path / "c.yaml"
    file.write_text(TEXT)
    tree = merge(read_file(file), from_plain({"frontend": {"port": 1}}, "--port"))
    loaded = build_config(tree, host, [file])
    lines = {
        text.strip(): origin.replace(f"{tmp_path}/", "")
        for line in show_config(loaded.config, loaded.tree).splitlines()
        if "  # " in line
        for text, origin in [line.split("  # ")]
    }
    assert lines["- left"] == "c.yaml:5"
    assert lines["name: steam"] == lines["pressure_bar: 10.0"] == "default"
    assert lines["name: second"] == "c.yaml:7"
    assert lines["port: 1"] == "--port"
    assert lines["- env: KEY"] == "c.yaml:10"


def test_secret_fields_are_hidden(tmp_path: Path) -> None:
    loaded = build_config(parse_value(TEXT, "t"), make_host(), ["t"])
    shown = show_config(loaded.config, loaded.tree)
    assert "joe" not in shown
    assert "fireman: <hidden>" in shown


GOOD: dict[str, Any] = {
    "models": [{"name": "m", "source": "package:m"}],
    "engines": [{"kind": "steam", "pressure_bar": 3}],
    "frontend": {"api_keys": [{"env": "KEY"}], "tls": None},
}


def test_the_schema_accepts_a_good_file() -> None:
    schema = file_schema(make_host())
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(GOOD, schema)
    assert schema["title"] == "Commutator configuration"


@pytest.mark.parametrize(
    "wrong",
    [
        {"engines": [{"kind": "warp"}]},
        {"engines": [{"kind": "steam", "presure_bar": 3}]},
        {"engines": [{"kind": "steam", "replicas": 0}]},
        {"router": {"kind": "round_robin", "pressure_bar": 1}},
        {"router": {"kind": "staged", "scorers": [{"kind": "whistle"}]}},
        {"router": {"kind": "staged", "scorers": [{"kind": "loudness", "weigth": 2}]}},
        {"router": {"kind": "staged", "filters": [{"kind": "loudness"}]}},
        {"router": {"kind": "staged", "filters": [{"kind": "whistle", "pitch": 0}]}},
        {"frontend": {"api_keys": ["raw"]}},
        {"frontend": {"api_keys": [{"env": "A", "file": "B"}]}},
        {"extra": 1},
    ],
)
def test_the_schema_refuses_what_loading_refuses(wrong: dict[str, Any]) -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(GOOD | wrong, file_schema(make_host()))


def test_the_schema_knows_the_options_of_each_stage() -> None:
    filters = [{"kind": "whistle", "pitch": 3}, {"kind": "whistle"}]
    scorers = [{"kind": "loudness", "decibels": 3.5, "weight": 2}]
    router = {"kind": "staged", "filters": filters, "scorers": scorers}
    for config in (
        GOOD | {"router": router},
        GOOD | {"disaggregation": {"kind": "conditional", "router": router}},
    ):
        jsonschema.validate(config, file_schema(make_host()))


@frozen(kw_only=True)
class TelegraphConfig(DoorConfig):
    wire: str = setting("Which wire.", "copper")


class Telegraph:
    @hookimpl
    def door_register(self, register: Any) -> None:
        register("telegraph", TelegraphConfig, HttpDoor())


@pytest.mark.parametrize(
    ("part", "good"),
    [
        ({}, True),
        ({"frontend": {}}, True),
        ({"frontend": {"port": 1}}, True),
        ({"frontend": {"kind": "http", "cors_origins": []}}, True),
        ({"frontend": {"cors_origins": []}}, True),
        ({"frontend": {"kind": "telegraph", "wire": "iron"}}, True),
        ({"frontend": {"kind": "telegraph"}}, True),
        ({"frontend": {"wire": "iron"}}, False),
        ({"frontend": {"kind": "telegraph", "cors_origins": []}}, False),
        ({"frontend": {"kind": "pigeon"}}, False),
        ({"frontend": {"kind": None}}, False),
        ({"frontend": None}, False),
        ({"frontend": {"api_keys": [{"env": "A", "file": None}]}}, True),
        ({"frontend": {"api_keys": [{"env": None}]}}, False),
        ({"router": {"block_size": 32}}, True),
        ({"router": {"kind": "staged"}}, True),
        ({"router": {"scorers": []}}, False),
        ({"registry": {}}, True),
        ({"launcher": {"kind": "process"}}, True),
        ({"launcher": {"kind": "memory"}}, False),
        ({"disaggregation": {"kind": "conditional", "router": {"block_size": 32}}}, False),
        ({"disaggregation": {}}, False),
        ({"engines": [{"pressure_bar": 1}]}, False),
        ({"engines": []}, False),
        ({"models": []}, False),
        ({"tiers": []}, True),
        ({"tiers": [{"kind": "dram"}]}, False),
    ],
)
def test_the_schema_agrees_with_loading_also_with_two_front_doors(
    part: dict[str, Any], good: bool
) -> None:
    host = make_host()
    host.add(Telegraph(), Installed("telegraph", "dist-telegraph", "1"))
    schema = file_schema(host)
    jsonschema.Draft202012Validator.check_schema(schema)
    data = GOOD | part
    assert jsonschema.Draft202012Validator(schema).is_valid(data) is good
    tree = merge(from_plain(DEFAULTS, DEFAULT), from_plain(data, "file:1"))
    if good:
        build_config(tree, host, ["file"])
    else:
        with pytest.raises(ConfigError):
            build_config(tree, host, ["file"])


def test_without_the_default_kind_the_section_is_required() -> None:
    host = load_plugins(found=[])
    host.add(Plugin(), Installed("steam", "dist-steam", "1"))
    host.add(Telegraph(), Installed("telegraph", "dist-telegraph", "1"))
    valid = jsonschema.Draft202012Validator(file_schema(host)).is_valid
    config = {key: value for key, value in GOOD.items() if key != "frontend"}
    assert not valid(config)
    assert not valid(config | {"frontend": {"port": 1}})
    assert valid(config | {"frontend": {"kind": "telegraph"}})


def test_the_schema_is_plain_data() -> None:
    assert yaml.safe_load(yaml.safe_dump(file_schema(make_host())))
