"""Pictures of the docs: where they go, and how they stay small."""

from __future__ import annotations

import io
import os
from pathlib import Path

from PIL import Image

__all__ = ["folder_of_pictures", "save"]

_MOST_BYTES = 150_000
_ROOT = Path(__file__).resolve().parents[2]


def folder_of_pictures(otherwise: Path) -> Path:
    """``docs/pictures`` for `make pictures`; other runs do not keep what they made."""
    return _ROOT / "docs" / "pictures" if os.environ.get("PICTURES") else otherwise


def save(png: bytes, name: str, folder: Path) -> None:
    """With a palette, as it has few colours; that is a third of the bytes."""
    picture = Image.open(io.BytesIO(png)).convert("RGB")
    colours = picture.quantize(256, method=Image.Quantize.MAXCOVERAGE, kmeans=1)
    colours.save(folder / name, optimize=True)
    assert (folder / name).stat().st_size < _MOST_BYTES
