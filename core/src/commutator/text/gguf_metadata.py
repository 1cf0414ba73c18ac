"""Reads the key-value header of a GGUF file: the part that describes the model and its tokenizer.

The `gguf` package makes one array view an element, which takes seconds for a vocabulary; this
reader walks the header once. Layout: magic, u32 version, u64 tensor count, u64 pair count, then
the pairs: string key, u32 value type, value. Strings are a u64 length and UTF-8 bytes.
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import Any

from commutator.errors import ConfigError

__all__ = ["read_gguf_metadata"]

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
# value type number -> struct code
_SCALARS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}
_U64 = struct.Struct("<Q")


def read_gguf_metadata(path: Path) -> dict[str, Any]:
    """Every metadata pair of the file; arrays come as lists. Raises ConfigError when damaged."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Walk(data).pairs()
    except (struct.error, ValueError, KeyError, IndexError) as error:
        problem = f"not a readable GGUF file: {error}; was it downloaded to the end?"
        raise ConfigError([problem], str(path)) from error


class _Walk:
    """A position in the header, and how to read each kind of value from there."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._at = 0

    def pairs(self) -> dict[str, Any]:
        if self._data[:4] != _MAGIC:
            raise ValueError("it does not begin with GGUF")
        self._at = 4
        version = self._scalar("I")
        if version not in _VERSIONS:
            raise ValueError(f"version {version} (little-endian 2 and 3 are supported)")
        self._scalar("Q")  # tensor count
        count = self._scalar("Q")
        return {self._string(): self._value(self._scalar("I")) for _ in range(count)}

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            return self._scalar(_SCALARS[kind])
        item_kind, count = self._scalar("I"), self._scalar("Q")
        if item_kind == _STRING:
            return self._strings(count)
        if item_kind == _ARRAY:
            return [self._value(_ARRAY) for _ in range(count)]
        layout = struct.Struct(f"<{count}{_SCALARS[item_kind]}")
        values = list(layout.unpack_from(self._data, self._at))
        self._at += layout.size
        return values

    def _scalar(self, code: str) -> Any:
        layout = struct.Struct("<" + code)
        (value,) = layout.unpack_from(self._data, self._at)
        self._at += layout.size
        return value

    def _string(self) -> str:
        return self._strings(1)[0]

    def _strings(self, count: int) -> list[str]:
        data, at, length_of = self._data, self._at, _U64.unpack_from
        values = []
        for _ in range(count):
            start = at + 8
            at = start + length_of(data, at)[0]
            values.append(str(data[start:at], "utf-8"))
        self._at = at
        return values
