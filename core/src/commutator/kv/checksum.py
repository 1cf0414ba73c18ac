"""One checksum for every stored byte."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import xxhash

__all__ = ["checksum"]

checksum: Callable[[Any], int] = xxhash.xxh3_64_intdigest
"""xxh3_64 of a bytes-like object, as an unsigned integer."""
