"""The layout of a GGUF file: where its metadata and its tensors are.

The `gguf` package knows the quantization formats, but its reader makes an array view of every
vocabulary entry, which takes seconds; this one steps over them. Layout: magic, u32 version, u64
tensor count, u64 pair count; the pairs (string key, u32 type, value); the tensors (string name,
u32 dimensions, u64 sizes innermost first, u32 type, u64 offset); padding; the data.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from attrs import frozen
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize
from torch import Tensor

from commutator.errors import ConfigError

__all__ = ["GgufFile", "TensorEntry"]

_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
# Value type number -> struct code.
_SCALARS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}
_LONG_ARRAY = 1024
"""Arrays longer than this (vocabularies) are kept as their length."""


@frozen
class TensorEntry:
    """One tensor as the file stores it."""

    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    offset: int
    """Bytes from the beginning of the file."""


class GgufFile:
    """A GGUF file opened for reading. Raises ConfigError when it is damaged."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            with path.open("rb") as file:
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            header = _Header(self._data)
            self.metadata: Mapping[str, Any] = header.metadata
            """Scalars, strings and short arrays; a long array as ``range(length)``."""
            self.tensors: Mapping[str, TensorEntry] = header.tensors
        except (OSError, struct.error, ValueError, KeyError) as error:
            raise ConfigError([f"not a readable GGUF file: {error}"], str(path)) from error

    def tensor(self, name: str) -> Tensor:
        """The tensor as float32, in memory of its own.

        Raises KeyError when there is none, ConfigError when it cannot be read.
        """
        entry = self.tensors[name]
        block_items, block_bytes = GGML_QUANT_SIZES[entry.kind]
        *outer, inner = entry.shape
        row_bytes = inner // block_items * block_bytes
        size_bytes = math.prod(outer) * row_bytes
        if entry.offset + size_bytes > len(self._data):
            raise ConfigError([f'the file ends before the tensor "{name}" does'], str(self._path))
        raw = np.frombuffer(self._data, np.uint8, size_bytes, entry.offset)
        if entry.kind == GGMLQuantizationType.F32:
            values = raw.view(np.float32).reshape(entry.shape)
        elif entry.kind == GGMLQuantizationType.F16:
            values = raw.view(np.float16).reshape(entry.shape).astype(np.float32)
        else:
            values = self._dequantized(raw.reshape(*outer, row_bytes), entry.kind)
        return torch.from_numpy(values if values.flags.writeable else values.copy())

    def _dequantized(
        self, rows: np.ndarray[Any, Any], kind: GGMLQuantizationType
    ) -> np.ndarray[Any, Any]:
        try:
            values: np.ndarray[Any, Any] = dequantize(rows, kind)
        except NotImplementedError:
            message = f"tensors of the type {kind.name} cannot be read; use another quantization"
            raise ConfigError([message], str(self._path)) from None
        return values


class _Header:
    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._at = 4
        if data[:4] != b"GGUF":
            raise ValueError("it does not begin with GGUF")
        version = self._scalar("I")
        if version not in _VERSIONS:
            raise ValueError(f"version {version}; little-endian 2 and 3 are supported")
        tensor_count, pair_count = self._scalar("Q"), self._scalar("Q")
        self.metadata = {self._string(): self._value() for _ in range(pair_count)}
        entries = [self._tensor() for _ in range(tensor_count)]
        alignment = self.metadata.get("general.alignment", 32)
        base = -(-self._at // alignment) * alignment
        self.tensors = {
            name: TensorEntry(shape, kind, base + offset) for name, shape, kind, offset in entries
        }

    def _tensor(self) -> tuple[str, tuple[int, ...], GGMLQuantizationType, int]:
        name = self._string()
        sizes = [self._scalar("Q") for _ in range(self._scalar("I"))]
        kind = GGMLQuantizationType(self._scalar("I"))
        return name, tuple(reversed(sizes)), kind, self._scalar("Q")

    def _value(self) -> Any:
        kind = self._scalar("I")
        if kind != _ARRAY:
            return self._item(kind)
        kind, count = self._scalar("I"), self._scalar("Q")
        if count <= _LONG_ARRAY:
            return [self._item(kind) for _ in range(count)]
        if kind != _STRING:
            self._at += count * struct.calcsize(_SCALARS[kind])
        else:
            for _ in range(count):
                length = self._scalar("Q")
                self._at += length
        return range(count)

    def _item(self, kind: int) -> Any:
        return self._string() if kind == _STRING else self._scalar(_SCALARS[kind])

    def _scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from(f"<{code}", self._data, self._at)
        self._at += struct.calcsize(code)
        return value

    def _string(self) -> str:
        length = self._scalar("Q")
        raw = self._data[self._at : self._at + length]
        self._at += length
        return raw.decode("utf-8")
