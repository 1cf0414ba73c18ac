"""Faces: packages that load the modules behind their names on first use.

A plugin is listed before its engine is installed, so its imports must not load what it will need.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from importlib import import_module
from typing import Any

__all__ = ["face"]


def face(package: str, names: Collection[str], homes: Collection[str]) -> Callable[[str], Any]:
    """The ``__getattr__`` of a package whose public ``names`` are in the modules ``homes``."""

    def find(name: str) -> Any:
        if name in names:
            for home in map(import_module, homes):
                if name in home.__all__:
                    return getattr(home, name)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return find
