"""Where values come from, which one wins, and how mistakes are reported."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, cast

import pytest
import yaml
from attrs import frozen

import commutator_http.plugin
import commutator_openai.plugin
from commutator.config.kinds import unknown_kind
from commutator.config.load import Loaded, load_config
from commutator.contract.engine import EngineClient, EngineConfig, EngineConnector, LaunchContext
from commutator.contract.registration import Catalog
from commutator.contract.routing import RouterConfig
from commutator.contract.settings import PositiveInt, setting
from commutator.errors import ConfigError
from commutator.hookspecs import hookimpl
from commutator.plugins import load_plugins
from commutator_http.config import HttpConfig


@frozen(kw_only=True)
class DieselConfig(EngineConfig):
    cylinders: PositiveInt = setting("How many.", 4)


class Diesel(EngineConnector[DieselConfig]):
    def launch_plan(self, config: DieselConfig, context: LaunchContext) -> None:
        return None

    def connect(self, config: DieselConfig, address: str) -> EngineClient:
        raise NotImplementedError


class Engines:
    @hookimpl
    def engine_register(self, register: Any) -> None:
        register("diesel", DieselConfig, Diesel())


class Routers:
    @hookimpl
    def router_register(self, register: Any) -> None:
        register("round_robin", RouterConfig, lambda config: config)


BROKEN = object()


@frozen
class Point:
    """What the loader needs of an entry point."""

    name: str
    plugin: Any
    group: str = "commutator"
    value: str = "test"
    dist: None = None

    def load(self) -> Any:
        if self.plugin is BROKEN:
            raise ImportError("No module named 'warp_drive'")
        return self.plugin


POINTS = cast(
    Iterable[EntryPoint],
    [
        Point("motors", Engines()),
        Point("turns", Routers()),
        Point("doors", commutator_http.plugin),
        Point("protocols", commutator_openai.plugin),
        Point("warp", BROKEN),
    ],
)

MINIMAL = """
models:
  - {name: m, source: package:m}
engines:
  - kind: diesel
"""


def load(tmp_path: Path, *texts: str, **options: Any) -> Loaded:
    files = []
    for number, text in enumerate(texts):
        files.append(tmp_path / f"{number}.yaml")
        files[-1].write_text(text)
    return load_config(files, **({"environ": {}, "found": POINTS} | options))


def problems(tmp_path: Path, *texts: str, **options: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, *texts, **options)
    return [line.replace(f"{tmp_path}/", "") for line in caught.value.problems]


def test_a_minimal_file_is_filled_in(tmp_path: Path) -> None:
    config = load(tmp_path, MINIMAL).config
    (engine,) = config.engines
    assert isinstance(engine, DieselConfig)
    assert (engine.name, engine.model, engine.cylinders) == ("diesel", "m", 4)
    assert config.router.kind == "round_robin"
    assert config.frontend.door.port == 8000


def test_later_sources_win(tmp_path: Path) -> None:
    second = "frontend: {port: 1111, host: 0.0.0.0, replicas: 2}"
    environ = {"COMMUTATOR__FRONTEND__PORT": "2222", "COMMUTATOR__FRONTEND__REPLICAS": "3"}
    config = load(
        tmp_path, MINIMAL, second, environ=environ, sets=["frontend.port=3333"]
    ).config.frontend
    assert (config.door.host, config.replicas, config.door.port) == ("0.0.0.0", 3, 3333)
    assert load(tmp_path, MINIMAL, second, port=0).config.frontend.door.port == 0


def test_lists_are_replaced_by_later_files(tmp_path: Path) -> None:
    second = "engines: [{kind: diesel, name: only}]"
    assert [e.name for e in load(tmp_path, MINIMAL, second).config.engines] == ["only"]


@pytest.mark.parametrize("path", ["engines.0.cylinders", "engines[0].cylinders"])
def test_set_reaches_into_lists(tmp_path: Path, path: str) -> None:
    (engine,) = load(tmp_path, MINIMAL, sets=[f"{path}=8"]).config.engines
    assert isinstance(engine, DieselConfig)
    assert engine.cylinders == 8


def test_a_whole_configuration_from_the_environment() -> None:
    environ = {
        "COMMUTATOR__MODELS": "[{name: m, source: package:m}]",
        "COMMUTATOR__ENGINES__0__KIND": "diesel",
        "COMMUTATOR__ENGINES__1": "{kind: diesel, name: second}",
        "COMMUTATOR__FRONTEND__API_KEYS__0__ENV": "KEY",
        "COMMUTATOR_TRACE_HOOKS": "1",
    }
    config = load_config([], environ=environ, found=POINTS).config
    assert [engine.name for engine in config.engines] == ["diesel", "second"]
    assert isinstance(config.frontend.door, HttpConfig)
    assert config.frontend.door.api_keys[0].env == "KEY"


def test_every_mistake_is_reported_at_once_with_its_line_and_path(tmp_path: Path) -> None:
    text = """
models: [{name: m, source: package:m}, {name: m, source: package:n}]
engines:
  - {kind: diesel, model: m, replicas: two}
  - {kind: deisel, model: m}
  - {kind: diesel, model: x, cylindres: 3}
frontend: {port: 99999}
tiers: [{kind: dram}]
"""
    assert problems(tmp_path, text) == [
        '0.yaml:4: engines[0].replicas: expected an integer from 1 to 10000, got "two"',
        (
            '0.yaml:5: engines[1].kind: no installed plugin offers the engine "deisel"; '
            'did you mean "diesel"?; '
            "not loaded: warp (test): cannot be imported: ImportError: No module named 'warp_drive'"
        ),
        '0.yaml:6: engines[2].cylindres: unknown key; did you mean "cylinders"?',
        (
            '0.yaml:8: tiers[0].kind: no installed plugin offers the tier "dram"; '
            "not loaded: warp (test): cannot be imported: ImportError: No module named 'warp_drive'"
            "; pip install commutator-dram, in a checkout `make tiers`"
        ),
        "0.yaml:7: frontend.port: expected an integer from 0 to 65535, got 99999",
        '0.yaml:2: models[1].name: "m" is already the name of models[0]; choose another',
        '0.yaml:6: engines[2].name: "diesel" is already the name of engines[0]; choose another',
        '0.yaml:6: engines[2].model: no model is named "x"; known models: m',
        (
            "0.yaml:8: tiers: no configured engine supports storage tiers; "
            "engines that do: none is installed"
        ),
    ]


def test_a_mistake_from_outside_the_file_names_its_source(tmp_path: Path) -> None:
    assert problems(
        tmp_path,
        MINIMAL,
        environ={"COMMUTATOR__ENGINES__0__REPLICAS": "two", "COMMUTATOR__LOG__LEVEL": "[loud"},
        sets=["runtime.lease_s=0", "frontend", "engines.x.replicas=1"],
    ) == [
        "--set frontend: expected PATH=VALUE, such as engines[0].replicas=3",
        (
            "log.level: not YAML: while parsing a flow sequence expected ',' or ']', but got "
            "'<stream end>' (from env COMMUTATOR__LOG__LEVEL)"
        ),
        'engines.x.replicas: a list takes an index, not "x" (from --set engines.x.replicas)',
        (
            'engines[0].replicas: expected an integer from 1 to 10000, got "two" '
            "(from env COMMUTATOR__ENGINES__0__REPLICAS)"
        ),
        "runtime.lease_s: expected a number above 0, got 0 (from --set runtime.lease_s)",
    ]


def test_with_several_files_a_mistake_names_the_one_that_won(tmp_path: Path) -> None:
    second = "\nfrontend:\n  port: x\n  host: y\n"
    assert problems(tmp_path, MINIMAL + "frontend: {port: y, replicas: z}", second) == [
        '1.yaml:3: frontend.port: expected an integer from 0 to 65535, got "x"',
        '0.yaml:6: frontend.replicas: expected an integer from 1 to 1000, got "z"',
    ]


def test_what_is_missing_has_the_line_of_what_it_is_missing_in(tmp_path: Path) -> None:
    assert problems(tmp_path, "engines:\n  - kind: diesel\n  -\n    model: m\n") == [
        "models: required, but missing",
        "0.yaml:4: engines[1].kind: required, but missing",
    ]


def test_a_kind_under_another_key_is_recognised(tmp_path: Path) -> None:
    text = "models: [{name: m, source: package:m}]\nengines:\n  - type: diesel\n"
    assert problems(tmp_path, text) == [
        (
            "0.yaml:3: engines[0].kind: required, but missing; "
            'did you mean "kind: diesel" instead of "type: diesel"?'
        ),
    ]


def test_a_misspelt_section_of_models_hides_no_mistake_in_engines(tmp_path: Path) -> None:
    text = "model: [{name: m, source: package:m}]\nengines: [{kind: diesel, model: n}]\n"
    assert problems(tmp_path, text) == [
        "models: required, but missing",
        '0.yaml:1: model: unknown key; did you mean "models"?',
        '0.yaml:2: engines[0].model: no model is named "n"; known models: m',
    ]


def test_an_option_of_a_kind_that_a_later_file_changes_names_that_kind(tmp_path: Path) -> None:
    first = MINIMAL + "router:\n  kind: least_loaded\n  temperature: 2\n"
    assert problems(tmp_path, first, "router: {kind: round_robin}") == [
        (
            '0.yaml:8: router.temperature: unknown key for the kind "round_robin", which '
            "1.yaml:1 sets; remove it there with `temperature: !reset`; known keys: "
            "block_size, busy, kind, router_replica_sync, router_ttl_s, use_kv_events"
        )
    ]


def test_what_earlier_sources_set_can_be_reset(tmp_path: Path) -> None:
    first = MINIMAL + "router: {kind: least_loaded, temperature: 2, block_size: 32}\n"
    second = "router: {kind: round_robin, temperature: !reset }"
    assert load(tmp_path, first, second).config.router.block_size == 32, "it stays"
    whole = load(tmp_path, first, "router: !reset {kind: round_robin}").config.router
    assert (whole.kind, whole.block_size) == ("round_robin", 16)
    default = load(tmp_path, first, sets=["router=!reset"]).config.router
    assert (default.kind, default.block_size) == ("round_robin", 16)
    sets = ["router.kind=round_robin", "router.temperature=!reset"]
    assert load(tmp_path, first, sets=sets).config.router.kind == "round_robin"
    environ = {"COMMUTATOR__ENGINES__0__REPLICAS": "!reset"}
    engine = MINIMAL + "    replicas: 3\n"
    assert load(tmp_path, engine, environ=environ).config.engines[0].replicas == 1


def test_a_reset_that_removes_nothing_is_a_mistake(tmp_path: Path) -> None:
    first = MINIMAL + "router: {kind: round_robin, block_size: 32}\n"
    assert problems(
        tmp_path,
        first,
        "router:\n  temprature: !reset\nlog: !reset {level: !reset }",
        sets=["frontend.port=!reset", "engines[0]=!reset", "engines[7]=!reset"],
    ) == [
        "1.yaml:2: router.temprature: there is nothing to reset: no earlier source sets it",
        "1.yaml:3: log.level: there is nothing to reset: no earlier source sets it",
        (
            "frontend.port: there is nothing to reset: no earlier source sets it "
            "(from --set frontend.port)"
        ),
        (
            "engines.0: an entry of a list cannot be reset; set the whole list "
            "(from --set engines[0])"
        ),
        ("engines.7: there is nothing to reset: no earlier source sets it (from --set engines[7])"),
    ]


@pytest.mark.parametrize(
    ("sources", "hint"),
    [
        ({"sets": ["router.kind=round_robin"]}, "remove it with --set 'router.temperature=!reset'"),
        (
            {"environ": {"COMMUTATOR__ROUTER__KIND": "round_robin"}},
            "remove it with --set 'router.temperature=!reset'",
        ),
    ],
)
def test_a_key_of_an_earlier_kind_is_removed_by_the_option_that_the_error_names(
    tmp_path: Path, sources: dict[str, Any], hint: str
) -> None:
    first = MINIMAL + "router: {kind: least_loaded, temperature: 2}\n"
    (problem,) = problems(tmp_path, first, **sources)
    assert hint in problem
    again = [*sources.get("sets", []), "router.temperature=!reset"]
    assert load(tmp_path, first, **(sources | {"sets": again})).config.router.kind == "round_robin"


def test_a_wrong_key_after_its_kind_is_not_to_be_reset(tmp_path: Path) -> None:
    first = MINIMAL + "router: {kind: round_robin}\n"
    (problem,) = problems(tmp_path, first, "router: {temperature: 2}")
    assert "0.yaml:6 sets; known keys" in problem


def test_the_line_is_that_of_the_key(tmp_path: Path) -> None:
    assert problems(tmp_path, MINIMAL, "fronted:\n\n  port: 1\nlog:\n  level:\n    - info\n") == [
        '1.yaml:5: log.level: expected one of "debug", "info", "warning", "error", got ["info"]',
        '1.yaml:1: fronted: unknown key; did you mean "frontend"?',
    ]


def test_values_of_an_anchor_have_its_lines(tmp_path: Path) -> None:
    text = """
models: [{name: m, source: package:m}]
engines:
  - &first
    kind: diesel
    replicas: x
  - <<: *first
    name: b
frontend: &door
  port: x
"""
    assert problems(tmp_path, text) == [
        '0.yaml:6: engines[0].replicas: expected an integer from 1 to 10000, got "x"',
        '0.yaml:6: engines[1].replicas: expected an integer from 1 to 10000, got "x"',
        '0.yaml:10: frontend.port: expected an integer from 0 to 65535, got "x"',
    ]


def test_a_key_that_is_no_step_of_a_path_is_reported_all_the_same(tmp_path: Path) -> None:
    (line,) = problems(tmp_path, MINIMAL, '"[": 1')
    assert line.startswith("[: unknown key")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("models: [", "0.yaml:1: not YAML: while parsing a flow node expected the node content"),
        ("log: {level: info}\nlog: {}", '0.yaml:2: duplicate key "log"; it is first on line 1'),
        (
            "- models: []",
            (
                "0.yaml:1: the top level must be a mapping, with keys such as `models:` and "
                "`engines:`; it is a list"
            ),
        ),
        ("x", "0.yaml:1: the top level must be a mapping, with keys such as `models:`"),
        ("log: {on: 1}", "0.yaml:1: the key true is not a string; put it in quotes"),
        (
            "log:\n  level: info\n format: text",
            "0.yaml:3: not YAML: while parsing a block mapping expected <block end>",
        ),
        ("log: !rest {level: info}", "0.yaml:1: unknown tag !rest"),
        ("log: {level: !rest info}", "0.yaml:1: not YAML: could not determine a constructor"),
        (
            "log:\n\t- level",
            (
                "0.yaml:2: not YAML: while scanning for the next token found character '\\t' that "
                "cannot start any token; indent with spaces, not with tabs"
            ),
        ),
        ("a: &x [*x]", "0.yaml:1: not YAML: maximum recursion depth exceeded"),
    ],
)
def test_yaml_mistakes_have_file_and_line(tmp_path: Path, text: str, expected: str) -> None:
    (line,) = problems(tmp_path, text)
    assert line.startswith(expected)


def test_the_indentation_is_often_wrong(tmp_path: Path) -> None:
    (line,) = problems(tmp_path, "log:\n  level: info\n format: text")
    assert line.endswith("; is the indentation right?")


def test_without_a_tier_plugin_the_command_that_installs_some_is_named(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(MINIMAL + "\ntiers: [{kind: dram}]\n")
    installed = [point for point in POINTS if point.name != "warp"]
    with pytest.raises(
        ConfigError,
        match='offers the tier "dram"; pip install commutator-dram, in a checkout `make tiers`',
    ):
        load_config([tmp_path / "c.yaml"], environ={}, found=installed)


def test_without_a_front_door_the_package_to_install_is_named(tmp_path: Path) -> None:
    installed = [point for point in POINTS if point.name not in {"doors", "warp"}]
    (line,) = problems(tmp_path, MINIMAL, found=installed)
    assert line == (
        'frontend.kind: no installed plugin offers the door "http"; pip install commutator-http'
    )


def test_a_missing_file_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.yaml: cannot be read: No such file"):
        load_config([tmp_path / "absent.yaml"], environ={}, found=POINTS)


def test_anchors_and_merge_keys_are_understood(tmp_path: Path) -> None:
    text = """
models: [{name: m, source: package:m}]
engines:
  - &first {kind: diesel, name: a, cylinders: 6}
  - {<<: *first, name: b}
"""
    first, second = load(tmp_path, text).config.engines
    assert isinstance(second, DieselConfig)
    assert (first.name, second.name, second.cylinders) == ("a", "b", 6)


def test_a_raw_secret_is_refused_without_repeating_it(tmp_path: Path) -> None:
    (line,) = problems(tmp_path, MINIMAL, "frontend: {api_keys: [sk-1234]}")
    assert "frontend.api_keys[0]: expected {env: NAME} or {file: PATH}" in line
    assert "sk-1234" not in line


def test_a_raw_secret_in_place_of_a_list_is_not_repeated_either(tmp_path: Path) -> None:
    (line,) = problems(tmp_path, MINIMAL, "frontend: {api_keys: sk-1234}")
    assert "frontend.api_keys: expected a list of {env: NAME} or {file: PATH}" in line
    assert "sk-1234" not in line


def test_the_model_must_be_said_when_there_are_several(tmp_path: Path) -> None:
    second = "models: [{name: a, source: package:a}, {name: b, source: package:b}]"
    assert problems(tmp_path, MINIMAL, second) == [
        "0.yaml:5: engines[0].model: required, because there are 2 models"
    ]


def test_blocked_plugins_are_not_loaded(tmp_path: Path) -> None:
    blocking = "plugins: {block: [motors]}"
    (line,) = problems(tmp_path, MINIMAL, blocking)
    assert line.startswith(
        '0.yaml:5: engines[0].kind: no installed plugin offers the engine "diesel"'
    )
    assert "motors (test): blocked" in line
    loaded = load(tmp_path, MINIMAL, no_plugins=["warp"])
    assert loaded.config.plugins.block == ("warp",)
    assert {p.name: p.problem for p in loaded.host.installed}["warp"] == "blocked"


def test_a_misspelt_no_plugin_is_an_error(tmp_path: Path) -> None:
    assert problems(tmp_path, MINIMAL, no_plugins=["wrap"]) == [
        (
            "--no-plugin wrap: no such plugin is installed; "
            "installed: builtin, doors, motors, protocols, turns, warp"
        )
    ]


def test_names_that_cannot_name_workers_are_refused(tmp_path: Path) -> None:
    assert problems(tmp_path, MINIMAL, sets=["engines.0.name=a/b"]) == [
        (
            "engines[0].name: expected letters, digits, '.', '_' and '-', got \"a/b\" "
            "(from --set engines.0.name)"
        )
    ]


def test_kinds_and_names_of_any_type_are_reported(tmp_path: Path) -> None:
    text = """
models: [{name: m, source: "package:m"}]
engines: [{kind: [a], model: {b: 1}, role: []}]
tiers: [{kind: {c: 1}}]
"""
    told = "\n".join(problems(tmp_path, text))
    assert 'engines[0].kind: expected a string, got ["a"]' in told
    assert 'tiers[0].kind: expected a string, got {"c": 1}' in told


def test_a_json_file_is_read_as_one(tmp_path: Path) -> None:
    file = tmp_path / "cluster.json"
    file.write_text(json.dumps({**yaml.safe_load(MINIMAL), "engines": [{"kind": "sim"}]}))
    assert load_config([file], environ={}).config.models
    for text, expected in (
        ("{", "Expecting property name"),
        ('{"log": {}, "log": {}}', 'duplicate key "log"'),
        ("[]", "the top level must be a mapping"),
        ('{"log": {"levle": "info"}}', "log.levle: unknown key"),
    ):
        file.write_text(text)
        with pytest.raises(ConfigError, match=re.escape(expected)) as raised:
            load_config([file], environ={})
        assert "cluster.json" in str(raised.value)


def test_every_kind_that_a_package_of_ours_brings_is_named_with_it() -> None:
    """What `unknown_kind` would say if the package were not installed."""
    host = load_plugins()
    assert not [one for one in host.installed if one.problem]
    bare = load_plugins(found=[])
    seams = [name for name, value in vars(host).items() if isinstance(value, Catalog)]
    told = 0
    for seam in seams:
        for kind, entry in getattr(host, seam).kinds.items():
            if (package := entry.origin.distribution) != "commutator":
                text = unknown_kind(kind, getattr(bare, seam), bare)
                assert f"pip install {package}" in text, text
                told += 1
    assert told > 30
