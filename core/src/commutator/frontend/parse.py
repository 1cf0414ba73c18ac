"""From the bytes of a body to a request object, or to an error that names the parameter."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from commutator.errors import RequestError
from commutator.frontend.fields import build_request_converter
from commutator.schema import StructureError, structure

__all__ = ["NOT_SERVED", "parse_body", "parse_object"]

NOT_SERVED = "unsupported_parameter"
"""The code of a RequestError for a parameter that is known, but not served here."""

T = TypeVar("T")

_fast = build_request_converter(detailed=False)
_thorough = build_request_converter(detailed=True)
_SHOWN_PROBLEMS = 8
_SHOWN_CHARACTERS = 200


def parse_body(body: bytes, cls: type[T]) -> T:
    """``body`` as ``cls``. Raises RequestError: ``param`` is the first field that is wrong."""
    data = parse_object(body)
    try:
        return _fast.structure(data, cls)
    except Exception:  # noqa: BLE001 - whatever it is, the thorough converter tells it better
        return _parse_thoroughly(data, cls)


def parse_object(body: bytes) -> dict[str, Any]:
    """``body`` as a JSON object. Raises RequestError."""
    try:
        data = msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(f"the body is not JSON: {error}", code="invalid_json") from None
    if not isinstance(data, dict):
        raise RequestError("the body must be a JSON object", code="invalid_json")
    return data


def _parse_thoroughly(data: object, cls: type[T]) -> T:
    try:
        return structure(_thorough, data, cls)
    except StructureError as error:
        problems = error.problems
    shown = [_line(path, text) for path, text in problems[:_SHOWN_PROBLEMS]]
    if len(problems) > _SHOWN_PROBLEMS:
        shown.append(f"and {len(problems) - _SHOWN_PROBLEMS} more")
    # What is not served here may be another's to serve, so that comes first.
    not_served = (p for p in problems if _code(p[1]) == NOT_SERVED)
    path, text = next(not_served, problems[0])
    raise RequestError("; ".join(shown), _shorten(path) or None, _code(text)) from None


def _line(path: str, text: str) -> str:
    return _shorten(f"{path}: {text}" if path else text)


def _code(text: str) -> str:
    by_beginning = {
        "unknown key": "unknown_parameter",
        "required": "missing_required_parameter",
        "not supported": NOT_SERVED,
    }
    found = (code for beginning, code in by_beginning.items() if text.startswith(beginning))
    return next(found, "invalid_value")


def _shorten(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARACTERS else text[: _SHOWN_CHARACTERS - 1] + "…"
