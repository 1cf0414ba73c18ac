"""What must agree between parts of a configuration, checked on plain data of any shape."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from commutator.config.tree import DEFAULT, Node, from_plain, plain, put
from commutator.schema.structure import nearest, show

__all__ = ["cross_problems", "fill_in"]

_WORKER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def fill_in(tree: Node) -> Node:
    """An engine is named after its kind and serves the only model unless it says otherwise."""
    data = plain(tree)
    models = [model.get("name") for _, model in _entries(data, "models")]
    for index, engine in _entries(data, "engines"):
        if engine.get("name") is None and isinstance(engine.get("kind"), str):
            tree = _put(tree, index, "name", engine["kind"])
        if engine.get("model") is None and len(models) == 1 and isinstance(models[0], str):
            tree = _put(tree, index, "model", models[0])
    return tree


def cross_problems(data: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(path, message) for each disagreement. ``data`` is filled in but not yet validated."""
    yield from _duplicates(data, "models")
    yield from _duplicates(data, "engines")
    for section in ("models", "engines"):
        if data.get(section) == []:
            yield section, "expected at least one entry"
    models = [model.get("name") for _, model in _entries(data, "models")]
    for index, engine in _entries(data, "engines"):
        yield from _engine_problems(f"engines[{index}]", engine, models)


def _engine_problems(
    path: str, engine: Mapping[str, Any], models: list[Any]
) -> Iterator[tuple[str, str]]:
    name, model = engine.get("name"), engine.get("model")
    if isinstance(name, str) and not _WORKER_NAME.fullmatch(name):
        yield f"{path}.name", f"expected letters, digits, '.', '_' and '-', got {show(name)}"
    if model is None and len(models) > 1:
        yield f"{path}.model", f"required, because there are {len(models)} models"
    if isinstance(model, str) and models and model not in models:
        known = nearest(model, sorted({str(name) for name in models})).replace(
            "known keys", "known models"
        )
        yield f"{path}.model", f'no model is named "{model}"; {known}'


def _duplicates(data: Mapping[str, Any], section: str) -> Iterator[tuple[str, str]]:
    first: dict[str, int] = {}
    for index, entry in _entries(data, section):
        name = entry.get("name")
        if isinstance(name, str):
            if name in first:
                yield (
                    f"{section}[{index}].name",
                    f'"{name}" is the name of {section}[{first[name]}] already; give it another',
                )
            first.setdefault(name, index)


def _entries(data: Any, section: str) -> list[tuple[int, Mapping[str, Any]]]:
    """The entries of a list section that are mappings at all, with their indices."""
    entries = data.get(section) if isinstance(data, Mapping) else None
    if not isinstance(entries, list):
        return []
    return [(i, entry) for i, entry in enumerate(entries) if isinstance(entry, Mapping)]


def _put(tree: Node, index: int, key: str, value: Any) -> Node:
    return put(tree, ("engines", str(index), key), from_plain(value, DEFAULT))
