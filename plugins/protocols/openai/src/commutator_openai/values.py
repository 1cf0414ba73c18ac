"""Takes values out of JSON that clients sent; what is wrong is refused with its path.

For protocols whose clients send many fields, of which few are read: nothing is said of the others.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from commutator.errors import RequestError
from commutator.frontend import NOT_SERVED

TOOL_NAME = r"[A-Za-z0-9_.:/\-]{1,128}"
"""What a tool may be called, as a regular expression."""
TOOL_NAMES = "1 to 128 letters, digits, '_', '-', '.', ':' and '/'"
"""The same in words."""
_MAX_INT = 2**63 - 1
_SHOWN_CHARACTERS = 60
_MOST_METADATA, _LONGEST_NAME, _LONGEST_TEXT = 16, 64, 512

KindT = TypeVar("KindT")


def without_nulls(body: Mapping[str, Any]) -> dict[str, Any]:
    """What asks for something, which nulls do not."""
    return {name: value for name, value in body.items() if value is not None}


def optional(
    values: Mapping[str, Any], name: str, kind: type[KindT], expected: str, path: str = ""
) -> KindT | None:
    """The value of ``name``; None where it is absent or null. Raises RequestError."""
    value = values.get(name)
    is_right = isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
    if value is not None and not is_right:
        raise wrong(_at(path, name), f"expected {expected}, got {shown(value)}")
    return value


def required(
    values: Mapping[str, Any], name: str, kind: type[KindT], expected: str, path: str = ""
) -> KindT:
    """The value of ``name``. Raises RequestError, also where it is absent or null."""
    value = optional(values, name, kind, expected, path)
    if value is None:
        where = _at(path, name)
        raise RequestError(f"{where}: required, {expected}", where, "missing_required_parameter")
    return value


def tool_name(values: Mapping[str, Any], path: str) -> str:
    """The ``name`` of a tool. Raises RequestError."""
    name = required(values, "name", str, "the tool's name", path)
    if re.fullmatch(TOOL_NAME, name) is None:
        raise wrong(_at(path, "name"), f"expected {TOOL_NAMES}, got {shown(name)}")
    return name


def number(values: Mapping[str, Any], name: str, low: float, high: float) -> float | None:
    """A number from ``low`` to ``high``. Raises RequestError."""
    value = values.get(name)
    if value is None:
        return None
    if not isinstance(value, int | float) or isinstance(value, bool) or not low <= value <= high:
        raise wrong(name, f"expected a number from {low:g} to {high:g}, got {shown(value)}")
    return float(value)


def integer(
    values: Mapping[str, Any], name: str, low: int = -_MAX_INT, high: int = _MAX_INT
) -> int | None:
    """A whole number from ``low`` to ``high``. Raises RequestError."""
    value = values.get(name)
    if value is None:
        return None
    if type(value) is not int or not low <= value <= high:  # True is an int, too
        limits = f" of at least {low}" if high == _MAX_INT and low > -_MAX_INT else ""
        limits = f" from {low} to {high}" if high < _MAX_INT else limits
        raise wrong(name, f"expected an integer{limits}, got {shown(value)}")
    return value


METADATA = "at most 16 strings of at most 512 characters, with names of at most 64"


def is_metadata(value: Any) -> bool:
    """Whether it is what clients may write beside a request, as of ``METADATA``."""
    return (
        isinstance(value, dict)
        and len(value) <= _MOST_METADATA
        and all(len(name) <= _LONGEST_NAME for name in value)
        and all(isinstance(one, str) and len(one) <= _LONGEST_TEXT for one in value.values())
    )


def object_at(value: Any, path: str) -> dict[str, Any]:
    """``value`` as an object. Raises RequestError."""
    if not isinstance(value, dict):
        raise wrong(path, f"expected an object, got {shown(value)}")
    return value


def wrong(path: str, text: str) -> RequestError:
    """A value that is not as the API has it."""
    return RequestError(f"{path}: {text}", path, "invalid_value")


def not_served(path: str, text: str) -> RequestError:
    """What the API has, and this server has not."""
    return RequestError(f"{path}: {text}", path, NOT_SERVED)


def shown(value: Any) -> str:
    """``value`` as JSON, cut to what fits into a line."""
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[: _SHOWN_CHARACTERS - 1]}…"


def _at(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
