"""What an answer has to follow, in the words of OpenAI's API, of vLLM's and of SGLang's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from commutator.contract.request import Constraint, ConstraintKind
from commutator.errors import RequestError
from commutator_openai.requests import CONSTRAINT_FIELDS, GenerationRequest

_KINDS: dict[str, ConstraintKind] = {
    "json": "json_schema",
    "json_object": "json_object",
    "regex": "regex",
    "choice": "choice",
    "grammar": "grammar",
    "structural_tag": "structural_tag",
}
"""vLLM's names, alone in `structured_outputs`, and after `guided_` in its older versions."""
_SGLANG: dict[str, ConstraintKind] = {
    "regex": "regex",
    "ebnf": "grammar",
    "json_schema": "json_schema",
    "structural_tag": "structural_tag",
}


def constraint_of(body: GenerationRequest) -> Constraint | None:
    """What ``body`` asks for. Raises RequestError that names a field."""
    given = {
        name: value for name in CONSTRAINT_FIELDS if (value := getattr(body, name)) is not None
    }
    return _constraint(given.get) if given else None


def _constraint(given: Callable[[str], Any]) -> Constraint | None:
    whitespace = given("guided_whitespace_pattern")
    found = {
        "response_format": _response_format(given("response_format")),
        "structured_outputs": _structured_outputs(given("structured_outputs")),
    }
    for name, kind in _KINDS.items():
        found[f"guided_{name}"] = _of(f"guided_{name}", kind, given(f"guided_{name}"), whitespace)
    for name, kind in _SGLANG.items():
        found[name] = _of(name, kind, given(name))
    asked = {name: one for name, one in found.items() if one is not None}
    if len(asked) > 1:
        first, second, *_ = asked
        raise RequestError(
            f"{second}: {first} says already what the answer follows; remove one", second
        )
    return next(iter(asked.values()), None)


def _response_format(value: Any) -> Constraint | None:
    """OpenAI's, and vLLM's with a structural tag."""
    name = "response_format"
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise _wrong(name, "expected an object", value)
    match value.get("type"):
        case "text":
            return None
        case "json_object":
            return Constraint(kind="json_object")
        case "json_schema":
            described = value.get("json_schema")
            if not isinstance(described, Mapping):
                raise _wrong(f"{name}.json_schema", "expected an object", described)
            schema = described.get("schema")
            return _of(
                f"{name}.json_schema.schema", "json_schema", {} if schema is None else schema
            )
        case "structural_tag":
            tag = {key: one for key, one in value.items() if key != "type"}
            return _of(name, "structural_tag", tag)
        case other:
            expected = 'expected "text", "json_object", "json_schema" or "structural_tag"'
            raise _wrong(f"{name}.type", expected, other)


def _structured_outputs(value: Any) -> Constraint | None:
    name = "structured_outputs"
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise _wrong(name, "expected an object", value)
    asked = {key: one for key, one in value.items() if one is not None and one is not False}
    whitespace = asked.pop("whitespace_pattern", None)
    for key in ("disable_fallback", "disable_any_whitespace", "disable_additional_properties"):
        if key in asked:
            raise _wrong(f"{name}.{key}", "not served; leave it out", asked[key])
    if len(asked) != 1 or (key := next(iter(asked))) not in _KINDS:
        raise _wrong(name, f"expected one of {', '.join(_KINDS)}", [*asked])
    return _of(f"{name}.{key}", _KINDS[key], asked[key], whitespace)


def _of(name: str, kind: ConstraintKind, value: Any, whitespace: Any = None) -> Constraint | None:
    """None where nothing is asked."""
    if value is None or (kind == "json_object" and value is False):
        return None
    if kind == "json_object":
        value = ""
    elif kind == "choice":
        if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
            raise _wrong(name, "expected a list of strings", value)
        value = tuple(value)
    elif kind in ("json_schema", "structural_tag") and not isinstance(value, str):
        value = msgspec.json.encode(value).decode()
    elif not isinstance(value, str):
        raise _wrong(name, "expected a string", value)
    if whitespace is not None and not isinstance(whitespace, str):
        raise _wrong("whitespace_pattern", "expected a regular expression", whitespace)
    try:
        return Constraint(kind=kind, value=value, whitespace=whitespace)
    except ValueError as error:
        raise RequestError(f"{name}: {error}", name, "invalid_value") from None


def _wrong(name: str, expected: str, value: Any) -> RequestError:
    shown = msgspec.json.encode(value).decode()[:60]
    return RequestError(f"{name}: {expected}, got {shown}", name, "invalid_value")
