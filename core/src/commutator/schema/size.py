"""Sizes of memory and files, in bytes or with a unit: 4294967296, "4GiB", "500MB"."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Annotated, Any

from attrs import frozen

__all__ = ["ByteSize", "Size"]

_UNITS = {"B": 1, "kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12} | {
    f"{letter}iB": 1 << (10 * power) for power, letter in enumerate("KMGT", start=1)
}
_TEXT = rf"([0-9]+(?:\.[0-9]+)?) ?({'|'.join(_UNITS)})"


@frozen
class ByteSize:
    """Lets an integer of bytes be written with a unit, too; used inside ``Annotated[int, ...]``."""

    minimum: int = 1

    pattern = f"^{_TEXT}$"
    """What a text looks like, as a regular expression; also for JSON Schema."""

    def parse(self, value: Any) -> int | None:
        """Bytes; None for what is no size, or too small. Parts of a byte are left out."""
        if isinstance(value, str):
            match = re.fullmatch(_TEXT, value)
            if match is None:
                return None
            value = int(Decimal(match[1]) * _UNITS[match[2]])
        whole = isinstance(value, int) and not isinstance(value, bool)
        return value if whole and value >= self.minimum else None

    def describe(self) -> str:
        least = "" if self.minimum <= 1 else f" of at least {self.minimum} bytes"
        return f'a size{least} such as 4294967296, "4GiB" or "500MB"'


Size = Annotated[int, ByteSize()]
"""At least one byte."""
