"""Loads a model's text side, whichever form its files have."""

from __future__ import annotations

from pathlib import Path

from commutator.text.gguf import load_gguf
from commutator.text.huggingface import load_huggingface
from commutator.text.model import TextModel
from commutator.text.source import locate_model

__all__ = ["load_text_model"]


def load_text_model(source: str | Path) -> TextModel:
    """``source`` as for ``locate_model``. Raises ConfigError when it cannot be loaded."""
    path = locate_model(str(source))
    return load_gguf(path) if path.is_file() else load_huggingface(path)
