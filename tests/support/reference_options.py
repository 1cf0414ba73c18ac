"""The options of a reference engine for tests that count its blocks."""

from __future__ import annotations

from typing import Any

from commutator_reference.config import ReferenceConfig

Sized = tuple[ReferenceConfig, int]


def sized(*, num_blocks: int, **options: Any) -> Sized:
    """The second and the third argument of ``ReferenceEngine``."""
    return ReferenceConfig(kind="reference", **options), num_blocks
