"""A file of another server, and which of its fields have been carried over."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from commutator.errors import ConfigError

Path = tuple[str | int, ...]


class Source:
    """A parsed file. What readers carry over is recorded, so that the rest can be named."""

    def __init__(self, content: Any, name: str) -> None:
        """Raises ConfigError when ``content`` is no mapping; ``name`` is that of the file."""
        if not isinstance(content, dict):
            raise ConfigError([f"expected a mapping, got {type(content).__name__}"], name)
        self.content = content
        self.name = name
        self._carried: set[Path] = set()
        self._reasons: dict[Path, str] = {}
        try:
            self.fields()
        except RecursionError:
            raise ConfigError(["an alias stands inside of what it names"], name) from None

    def get(self, *path: str | int) -> Any:
        """What stands at ``path``; None where nothing does."""
        found: Any = self.content
        for step in path:
            if isinstance(found, dict):
                found = found.get(step)
            elif isinstance(found, list) and isinstance(step, int) and step < len(found):
                found = found[step]
            else:
                return None
        return found

    def take(self, *path: str | int) -> Any:
        """As ``get``, and everything below ``path`` counts as carried."""
        found = self.get(*path)
        if found is not None:
            self._carried |= {leaf for leaf, _ in _leaves(found, path)}
        return found

    def entries(self, *path: str | int) -> list[tuple[Path, Any]]:
        """The entries of a list or a mapping, each with its path."""
        found = self.get(*path)
        if isinstance(found, dict):
            return [((*path, key), item) for key, item in found.items()]
        listed = found if isinstance(found, list) else []
        return [((*path, i), item) for i, item in enumerate(listed)]

    def mappings(self, *path: str | int) -> list[tuple[Path, dict[Any, Any]]]:
        """Those ``entries`` that are mappings."""
        return [(place, one) for place, one in self.entries(*path) if isinstance(one, dict)]

    def leave(self, path: Path, reason: str) -> None:
        """Say why what is at ``path`` is not carried."""
        for leaf, _ in _leaves(self.get(*path), path):
            self._carried.discard(leaf)
            self._reasons[leaf] = reason

    def fields(self) -> list[Path]:
        """Every value of the file, but those that only say which format it has."""
        every = [path for path, _ in _leaves(self.content, ())]
        return [path for path in every if path not in (("apiVersion",), ("kind",))]

    def carried(self) -> int:
        """How many of ``fields`` were carried over."""
        return sum(path in self._carried for path in self.fields())

    def left(self) -> list[tuple[Path, Any, str]]:
        """Path, value and, where it is known, the reason of each field that was not."""
        return [
            (path, self.get(*path), self._reasons.get(path, ""))
            for path in self.fields()
            if path not in self._carried
        ]


def _leaves(value: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    """Each value that has none below it; an empty mapping or list is one."""
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from _leaves(item, (*path, key))
    elif isinstance(value, list) and value:
        for index, item in enumerate(value):
            yield from _leaves(item, (*path, index))
    else:
        yield path, value
