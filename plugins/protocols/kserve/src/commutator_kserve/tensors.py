"""Tensors of requests and answers, in the forms in which they travel.

Values travel typed in the message (or as JSON), or raw: little-endian numbers one after another,
and before each string its length in four bytes.
"""

from __future__ import annotations

import math
import struct
import sys
from array import array
from collections.abc import Callable, Sequence
from typing import Any

from attrs import frozen

from commutator.errors import RequestError

_LENGTH = struct.Struct("<I")
_CODES = {"INT32": "i", "INT64": "q", "UINT32": "I", "UINT64": "Q"}
"""The whole numbers that are read, as ``array`` calls them."""
_FIELDS = {
    "BOOL": "bool_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "UINT32": "uint_contents",
    "UINT64": "uint64_contents",
    "BYTES": "bytes_contents",
}
_MAX_VALUES = 1 << 20
_MAX_DIMENSIONS = 8
_MAX_NAME = 100


@frozen
class Tensor:
    """One named tensor."""

    name: str
    datatype: str
    """In the protocol's words: "BYTES", "BOOL", "INT32", "FP32", ..."""
    shape: Sequence[int]
    values: Sequence[Any]
    """Flat: bytes for "BYTES", numbers, or bools. As many as the product of ``shape``."""


def from_raw(name: str, datatype: str, shape: Sequence[int], data: bytes) -> Tensor:
    """Of raw bytes. Raises RequestError."""
    count = _count(name, shape)
    values: Sequence[Any]
    if datatype == "BYTES":
        values = _strings(name, data)
    elif datatype == "BOOL":
        values = [byte != 0 for byte in data]
    elif datatype in _CODES:
        numbers = array(_CODES[datatype])
        if len(data) % numbers.itemsize:
            raise _wrong(name, f"{len(data)} bytes are no {datatype} numbers")
        numbers.frombytes(data)
        if sys.byteorder == "big":
            numbers.byteswap()
        values = numbers.tolist()
    else:
        raise _of_no_use(name, datatype)
    return _checked(name, datatype, shape, values, count)


def from_typed(
    name: str, datatype: str, shape: Sequence[int], values: Callable[[str], Sequence[Any]]
) -> Tensor:
    """Of typed values; ``values`` gets the message's field that has them. Raises RequestError."""
    count = _count(name, shape)
    if datatype not in _FIELDS:
        raise _of_no_use(name, datatype)
    return _checked(name, datatype, shape, values(_FIELDS[datatype]), count)


def raw_of(tensor: Tensor) -> bytes:
    """The values as they travel raw."""
    if tensor.datatype == "BYTES":
        return b"".join(_LENGTH.pack(len(one)) + one for one in tensor.values)
    if tensor.datatype == "FP32":  # rows that are packed already
        return b"".join(tensor.values)
    numbers = array(_CODES[tensor.datatype], tensor.values)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tobytes()


def text_of(tensor: Tensor) -> list[str]:
    """The strings of a tensor of type BYTES. Raises RequestError."""
    if tensor.datatype != "BYTES":
        raise _wrong(tensor.name, f"expected the datatype BYTES, got {tensor.datatype[:20]}")
    try:
        return [one.decode() for one in tensor.values]
    except UnicodeDecodeError as error:
        raise _wrong(tensor.name, f"expected UTF-8: {error}") from None


def _count(name: str, shape: Sequence[int]) -> int:
    if len(shape) > _MAX_DIMENSIONS or any(one < 0 for one in shape):
        raise _wrong(name, f"expected a shape of at most {_MAX_DIMENSIONS} sizes of at least 0")
    count = math.prod(shape)
    if count > _MAX_VALUES:
        raise _wrong(name, f"expected at most {_MAX_VALUES} values, the shape has {count}")
    return count


def _checked(
    name: str, datatype: str, shape: Sequence[int], values: Sequence[Any], count: int
) -> Tensor:
    if len(values) != count:
        text = f"the shape {list(shape)} has {count} values, and {len(values)} were sent"
        raise _wrong(name, text)
    return Tensor(name, datatype, tuple(shape), values)


def _strings(name: str, data: bytes) -> list[bytes]:
    found, at, end = list[bytes](), 0, len(data)
    while at < end:
        if at + _LENGTH.size > end:
            raise _wrong(name, "a string's length is cut off")
        (size,) = _LENGTH.unpack_from(data, at)
        at += _LENGTH.size
        if at + size > end:
            raise _wrong(name, f"a string of {size} bytes is cut off")
        if len(found) >= _MAX_VALUES:
            raise _wrong(name, f"expected at most {_MAX_VALUES} values")
        found.append(data[at : at + size])
        at += size
    return found


def _of_no_use(name: str, datatype: str) -> RequestError:
    expected = ", ".join(_FIELDS)
    return _wrong(name, f"expected a datatype of {expected}, got {datatype[:20]!r}")


def _wrong(name: str, text: str) -> RequestError:
    name = name[:_MAX_NAME]
    return RequestError(f"{name}: {text}", name, "invalid_value")


def _flat(name: str, value: Any) -> list[Any]:
    """The values of JSON's nested lists, in their order. Raises RequestError."""
    found, stack, seen = list[Any](), [value], 0
    while stack:
        one = stack.pop()
        seen += 1
        if seen > _MAX_VALUES:
            raise _wrong(name, f"expected at most {_MAX_VALUES} values")
        if isinstance(one, list):
            stack.extend(reversed(one))
        else:
            found.append(one)
    return found


def json_values(name: str, datatype: str, value: Any) -> Callable[[str], Sequence[Any]]:
    """What ``from_typed`` gets of JSON's values. Raises RequestError."""

    def values(_: str) -> Sequence[Any]:
        found = _flat(name, value)
        kind: type = {"BYTES": str, "BOOL": bool}.get(datatype, int)
        for one in found:
            if type(one) is not kind:
                raise _wrong(name, f"expected {datatype}, got {str(one)[:40]!r}")
        return [one.encode() for one in found] if kind is str else found

    return values
