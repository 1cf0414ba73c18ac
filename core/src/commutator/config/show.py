"""Prints the effective configuration as YAML, with the origin of each value."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Any

import attrs
import yaml

from commutator.config.model import Config
from commutator.config.secrets import HIDDEN, hidden_arguments, hidden_values
from commutator.config.tree import DEFAULT, Node, find
from commutator.config.yaml_file import Dumper
from commutator.contract.settings import Secret

_MAX_WIDTH = 60
"""Characters. Longer lines do not move the comments of the others to the right."""


_COMMAND_LINES = ("args", "command")
"""Options that are arguments of a program."""


def effective(config: Config) -> dict[str, Any]:
    """Every value as plain data, in the order of the classes; loading it gives ``config`` again."""
    result: dict[str, Any] = shown(config)
    return result


def show_config(config: Config, tree: Node) -> str:
    """YAML text; each value has a comment with its origin from ``tree``. Secrets are hidden."""
    lines = list(_lines(shown(config, hide=True), tree, (), 0))
    width = max((len(text) for text, _ in lines if len(text) <= _MAX_WIDTH), default=0)
    return "".join(
        f"{text:<{width}}  # {origin}\n" if origin else f"{text}\n" for text, origin in lines
    )


def shown(value: Any, *, hide: bool = False) -> Any:
    """A value of a configuration as plain data; ``hide``: without what may be secret."""
    if isinstance(value, Secret):
        return {"env": value.env} if value.env is not None else {"file": value.file}
    if attrs.has(type(value)):
        return {
            field.name: HIDDEN
            if hide and not field.repr and not isinstance(getattr(value, field.name), Secret)
            else _plain_field(field.name, getattr(value, field.name), hide=hide)
            for field in attrs.fields(type(value))
        }
    if isinstance(value, Mapping):
        plain = {key: shown(item, hide=hide) for key, item in value.items()}
        return hidden_values(plain) if hide else plain
    if isinstance(value, list | tuple):
        return [shown(item, hide=hide) for item in value]
    return value.value if isinstance(value, Enum) else value


def _plain_field(name: str, value: Any, *, hide: bool) -> Any:
    plain = shown(value, hide=hide)
    return hidden_arguments(plain) if hide and name in _COMMAND_LINES else plain


def _lines(
    value: Any, tree: Node, steps: tuple[str | int, ...], depth: int
) -> Iterator[tuple[str, str]]:
    """(text, origin) of each line; the origin is empty on lines that only open a block."""
    indent = "  " * depth
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _entry(f"{indent}{_scalar(key)}:", item, tree, (*steps, key), depth + 1)
    else:
        for index, item in enumerate(value):
            inner = list(_entry(f"{indent}-", item, tree, (*steps, index), depth + 1))
            if isinstance(item, dict | list) and item:
                text, origin = inner[1]  # the first line of a block follows its dash
                inner[:2] = [(f"{indent}- {text.lstrip()}", origin)]
            yield from inner


def _entry(
    start: str, value: Any, tree: Node, steps: tuple[str | int, ...], depth: int
) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict | list) and value:
        yield start, ""
        yield from _lines(value, tree, steps, depth)
    else:
        node = find(tree, steps)
        yield f"{start} {_scalar(value)}", DEFAULT if node is None else node.origin


def _scalar(value: Any) -> str:
    text: str = yaml.dump(
        value, Dumper=Dumper, default_flow_style=True, width=float("inf"), allow_unicode=True
    )
    text = text.removesuffix("\n").removesuffix("\n...")
    if "\n" in text:
        text = yaml.safe_dump(value, default_style='"', width=float("inf")).removesuffix("\n")
    return text
