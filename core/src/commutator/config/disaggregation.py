"""What must agree between the roles of workers and how prefill and decode are apart."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from commutator.config.tree import DEFAULT, Node, from_plain, plain, put
from commutator.engine.contract import EngineConnector
from commutator.plugins import PluginHost

__all__ = ["disaggregation_problems", "fill_in_disaggregation"]

_PREFILLS_AT_ONCE = 4
"""Enough to keep a prefill worker busy; whoever waits, waits where priorities count."""


def fill_in_disaggregation(tree: Node) -> Node:
    """Prefill workers are chosen as others are, and have a queue, unless the file says otherwise.

    ``tree`` may have any shape.
    """
    data = plain(tree)
    section = data.get("disaggregation") if isinstance(data, Mapping) else None
    if not isinstance(section, Mapping):
        return tree
    router = section.get("router")
    if router is None and isinstance(data.get("router"), Mapping):
        router = {key: value for key, value in data["router"].items() if key != "busy"}
        tree = put(tree, ("disaggregation", "router"), from_plain(router, DEFAULT))
    if isinstance(router, Mapping) and router.get("busy") is None:
        busy = from_plain({"max_active_requests": _PREFILLS_AT_ONCE}, DEFAULT)
        tree = put(tree, ("disaggregation", "router", "busy"), busy)
    return tree


def disaggregation_problems(data: Mapping[str, Any], host: PluginHost) -> Iterator[tuple[str, str]]:
    """(path, message) for each disagreement; kinds that are not known are told of elsewhere."""
    engines = data.get("engines")
    if not isinstance(engines, list):
        return
    entries = [(i, engine) for i, engine in enumerate(engines) if isinstance(engine, Mapping)]
    for index, engine in entries:
        role, path = engine.get("role", "both"), f"engines[{index}].role"
        kind = host.engines.kinds.get(engine.get("kind", ""))
        if role == "prefill" and not data.get("disaggregation"):
            yield (
                path,
                (
                    "a prefill worker gets nothing to do without the section `disaggregation`; "
                    "add it, such as disaggregation: {kind: conditional}"
                ),
            )
        if role in {"prefill", "decode"} and kind is not None:
            style = type(kind.thing).handover_style
            if style is EngineConnector.handover_style:
                yield path, f'engine "{kind.name}" hands no KV over, so its role can only be both'
    for model in {engine.get("model") for _, engine in entries}:
        its = [(i, engine) for i, engine in entries if engine.get("model") == model]
        if all(engine.get("role") == "prefill" for _, engine in its):
            yield (
                f"engines[{its[0][0]}].role",
                (f'model "{model}" has only prefill workers; one at least must be both or decode'),
            )
