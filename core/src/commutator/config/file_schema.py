"""JSON Schema of the whole configuration file, with the options of every installed plugin."""

from __future__ import annotations

from typing import Any

from commutator.config.model import (
    Config,
    DisaggregationConfig,
    EngineConfig,
    EvictionConfig,
    RouterConfig,
    TierConfig,
)
from commutator.config.secret import Secret
from commutator.plugins import PluginHost, Register
from commutator.routing.stages import Filter, Picker, Scorer
from commutator.schema import json_schema

__all__ = ["file_schema"]


def file_schema(host: PluginHost) -> dict[str, Any]:
    """Editors complete and check a file against this; it says nothing of values set elsewhere."""
    registers: dict[Any, Register[Any]] = {
        EngineConfig: host.engines,
        RouterConfig: host.routers,
        DisaggregationConfig: host.disaggs,
        TierConfig: host.tiers,
        EvictionConfig: host.evictions,
        Filter: host.stages,
        Scorer: host.stages,
        Picker: host.stages,
    }

    def special(cls: Any) -> dict[str, Any] | None:
        register = registers.get(cls)
        kinds = {} if register is None else register.kinds
        fitting = {  # filters, scorers and pickers share one register
            name: kind for name, kind in kinds.items() if issubclass(kind.config_class, cls)
        }
        if not fitting:
            return _secret(cls)
        return {
            "oneOf": [
                _of_kind(own(kind.config_class), name) for name, kind in sorted(fitting.items())
            ]
        }

    def own(cls: Any) -> dict[str, Any]:
        """Of one kind's class, which is the base itself where a kind has no options of its own."""
        return json_schema(cls, lambda inner: None if inner is cls else special(inner))

    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Commutator configuration",
    } | json_schema(Config, special)


def _of_kind(schema: dict[str, Any], name: str) -> dict[str, Any]:
    kind = {key: value for key, value in schema["properties"]["kind"].items() if key != "type"}
    return schema | {"properties": schema["properties"] | {"kind": kind | {"const": name}}}


def _secret(cls: Any) -> dict[str, Any] | None:
    if cls is not Secret:
        return None
    plain = json_schema(Secret)
    return {
        "oneOf": [
            plain | {"properties": {name: plain["properties"][name]}, "required": [name]}
            for name in ("env", "file")
        ]
    }
