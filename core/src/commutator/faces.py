"""Faces: packages that load the modules behind their names on first use.

A plugin is listed before its engine is installed, so its imports must not load what it will need.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any


def face(package: str, file: str) -> Callable[[str], Any]:
    """The ``__getattr__`` of a package, whose ``__init__`` is ``file``.

    What that imports below ``if TYPE_CHECKING`` are its names; the module of each is loaded when
    the name is first asked for.
    """
    homes: dict[str, str] = {}

    def find(name: str) -> Any:
        if not homes:
            homes.update(_imports(file))
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(homes[name]), name)

    return find


def _imports(file: str) -> dict[str, str]:
    """The names that a file imports for type checkers only, each with its module."""
    import ast  # here, as `import commutator` alone has to be quick; pathlib likewise

    with open(file, encoding="utf-8") as source:  # noqa: PTH123
        tree = ast.parse(source.read())
    return {
        alias.name: node.module
        for block in tree.body
        if isinstance(block, ast.If)
        for node in block.body
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }
