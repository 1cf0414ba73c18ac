"""See ``torchvision``."""

from __future__ import annotations

from typing import Any

from torchvision import placeholder
from torchvision.transforms.functional import InterpolationMode as InterpolationMode


def __getattr__(name: str) -> Any:
    return placeholder(__name__, name)
