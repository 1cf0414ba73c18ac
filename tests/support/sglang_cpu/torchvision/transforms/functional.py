"""See ``torchvision``. Only the names of the ways to interpolate are read by SGLang."""

from __future__ import annotations

from enum import Enum
from typing import Any

from torchvision import placeholder


class InterpolationMode(Enum):
    """As torchvision spells them."""

    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


def __getattr__(name: str) -> Any:
    return placeholder(__name__, name)
