"""Reads YAML into a tree that knows the line of every value. Duplicate keys are refused.

The line of a value in a mapping is that of its key. A file whose name ends in .json is read as
JSON, a hundred times as fast; its values have the file as their origin, without a line. With
``resets``, the tag ``!reset`` is read as `Node.resets`; tags that are not YAML's own are refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from commutator.config.tree import Node, from_plain
from commutator.errors import ConfigError


def read_file(path: str | Path, *, resets: bool = False) -> Node:
    """The file's tree; an empty file is an empty mapping. Raises ConfigError."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ConfigError([f"cannot be read: {reason}"], str(path)) from error
    problems: list[str] = []
    try:
        if Path(path).suffix == ".json":
            value = json.loads(text, object_pairs_hook=_different_keys)
            if "\\u" in text:
                _joined(json.dumps(value, ensure_ascii=False))
            node = from_plain(value, str(path))
        else:
            node = _parse(text, lambda line: f"{path}:{line}", problems, resets)
    except (ValueError, RecursionError) as error:
        raise ConfigError([str(error)], str(path)) from error
    if node.value is None:
        node = Node({}, node.origin)
    if not isinstance(node.value, dict):
        found = "a list" if isinstance(node.value, list) else "a single value"
        problems.append(
            f"{path}:1: the top level must be a mapping, with keys such as `models:` and "
            f"`engines:`; it is {found}"
        )
    if problems:
        raise ConfigError(problems, str(path))
    return node


def _different_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"duplicate key {json.dumps(twice)}")
    return found


def parse_value(text: str, origin: str, *, resets: bool = False) -> Node:
    """One YAML value from an environment variable or an option. Raises ValueError."""
    problems: list[str] = []
    node = _parse(text, lambda _: origin, problems, resets)
    if problems:
        raise ValueError("; ".join(problems))
    return node


def _parse(text: str, origin: Callable[[int], str], problems: list[str], resets: bool) -> Node:
    """Raises ValueError for wrong syntax; other findings are appended to ``problems``."""
    try:
        loader = Loader(text)
        try:
            root = loader.get_single_node()
            if root is None:
                return Node(None, origin(1))
            return _Builder(loader, origin, problems, resets)(root)
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        what = " ".join(part for part in (error.context, error.problem) if part)
        if "expected <block end>" in what:
            what += "; is the indentation right?"
        elif r"'\t'" in what:
            what += "; indent with spaces, not with tabs"
        raise ValueError(f"{origin(mark.line + 1 if mark else 1)}: not YAML: {what}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ValueError(f"{origin(1)}: not YAML: {error}") from error


_RESET = "!reset"
_COLLECTIONS = ("tag:yaml.org,2002:map", "tag:yaml.org,2002:seq")


class Loader(yaml.SafeLoader):
    """Builds plain data only."""


class _Builder:
    """Converts PyYAML's nodes, which know their lines, to ``Node``."""

    def __init__(
        self, loader: Loader, origin: Callable[[int], str], problems: list[str], resets: bool
    ) -> None:
        self._loader = loader
        self._origin = origin
        self._problems = problems
        self._resets = resets
        self._checked: set[int] = set()

    def __call__(self, node: yaml.Node, key: yaml.Node | None = None) -> Node:
        origin = self._origin((key or node).start_mark.line + 1)
        resets = self._resets and node.tag == _RESET
        if isinstance(node, yaml.ScalarNode):
            if resets:  # a value behind the tag is read as if it had none
                plain = (True, False) if node.style is None else (False, True)
                tag = self._loader.resolve(  # type: ignore[no-untyped-call]
                    yaml.ScalarNode, node.value, plain
                )
                node = yaml.ScalarNode(tag, node.value, node.start_mark, node.end_mark)
            value = self._loader.construct_object(node)
            return Node(self._text(node, value), origin, resets)
        if not resets and node.tag not in _COLLECTIONS:
            self._problem(node, f"unknown tag {node.tag}")
        if isinstance(node, yaml.MappingNode):
            return Node(self._mapping(node), origin, resets)
        return Node([self(item) for item in node.value], origin, resets)

    def _mapping(self, node: yaml.MappingNode) -> dict[str, Node]:
        self._refuse_duplicates(node)
        self._loader.flatten_mapping(node)  # resolves `<<: *anchor`
        items: dict[str, Node] = {}
        for key_node, value_node in node.value:
            key = self._loader.construct_object(key_node, deep=True)
            if not isinstance(key, str):
                shown = json.dumps(key, default=str)
                self._problem(key_node, f"the key {shown} is not a string; put it in quotes")
            items[str(self._text(key_node, key))] = self(value_node, key_node)
        return items

    def _text(self, node: yaml.Node, value: Any) -> Any:
        try:
            return _joined(value) if isinstance(value, str) else value
        except ValueError as error:
            self._problem(node, str(error))
            return ""

    def _refuse_duplicates(self, node: yaml.MappingNode) -> None:
        if id(node) in self._checked:
            return  # an alias; after flattening, a key that overrides a merged one occurs twice
        self._checked.add(id(node))
        lines: dict[Any, int] = {}
        for key_node, _ in node.value:
            if isinstance(key_node, yaml.ScalarNode):
                if (first := lines.get(key_node.value)) is not None:
                    self._problem(
                        key_node, f'duplicate key "{key_node.value}"; it is first on line {first}'
                    )
                lines[key_node.value] = key_node.start_mark.line + 1

    def _problem(self, node: yaml.Node, text: str) -> None:
        self._problems.append(f"{self._origin(node.start_mark.line + 1)}: {text}")


def _joined(text: str) -> str:
    """``text`` with each pair of surrogates, as JSON's escapes write an emoji, as one character.

    Raises ValueError for half of a pair, which is no character.
    """
    if text.isascii():
        return text
    try:
        return text.encode("utf-16", "surrogatepass").decode("utf-16")
    except UnicodeDecodeError:
        half = next(char for char in text if "\ud800" <= char <= "\udfff")
        raise ValueError(
            f"\\u{ord(half):x} is half of a character; write both halves, or the character itself"
        ) from None


_FLOAT = "tag:yaml.org,2002:float"
_WITH_EXPONENT = re.compile(r"[-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)[eE][-+]?[0-9]+\Z")


class Dumper(yaml.SafeDumper):
    """Writes what ``Loader`` reads to exactly the same values."""

    def ignore_aliases(self, data: Any) -> bool:
        """A value in two places is written twice, for readers."""
        del data
        return True


for _class in (Loader, Dumper):  # the dumper then quotes text that would be read as a number
    _class.add_implicit_resolver(_FLOAT, _WITH_EXPONENT, list("-+0123456789."))


def to_yaml(values: Any) -> str:
    """Plain data as ASCII text that ``read_file`` reads as equal data."""
    text: str = yaml.dump(values, Dumper=Dumper, sort_keys=False, width=float("inf"))
    return text
