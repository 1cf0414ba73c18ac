"""Every name of torchvision can be imported, none can be used; see the README beside it."""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.0.0+commutator"


def placeholder(module: str, name: str) -> Any:
    """A submodule where there is one, otherwise a class that raises when it is used."""
    if name.startswith("__"):
        raise AttributeError(name)
    try:
        return importlib.import_module(f"{module}.{name}")
    except ModuleNotFoundError:
        return type(name, (), {"__init__": _refuse})


def _refuse(self: Any, *_args: Any, **_kwargs: Any) -> None:
    raise RuntimeError(
        f"{type(self).__name__}: this environment has no torchvision; serve a model of text only"
    )


def __getattr__(name: str) -> Any:
    return placeholder(__name__, name)
