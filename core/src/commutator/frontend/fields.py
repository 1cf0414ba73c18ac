"""Kinds of request fields that are not plain types: what they accept, and how they are told.

Each is a marker inside ``Annotated``: ``Annotated[tuple[str, ...], Items(1, 16)]``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Annotated, Any, get_args, get_origin

import cattrs
from attrs import frozen

from commutator.schema import Bounds, Mismatch, build_converter, json_schema

__all__ = [
    "MAX_INT",
    "Items",
    "Off",
    "OneOf",
    "PromptList",
    "Special",
    "TokenId",
    "TokenIds",
    "build_request_converter",
    "request_schema",
    "special_of",
]

MAX_INT = 2**31 - 1
TokenId = Annotated[int, Bounds(minimum=0, maximum=MAX_INT)]

Hook = Callable[[Any], Any]


class Special(ABC):
    """A marker that structures and describes its field itself."""

    @abstractmethod
    def hook(self, inner: Any, converter: cattrs.Converter) -> Hook:
        """What turns a plain value into the field's, or raises ValueError."""

    @abstractmethod
    def schema(self, inner: Any) -> dict[str, Any]:
        """JSON Schema of the field."""


# Markers are compared by identity: annotations are dictionary keys in cattrs.
@frozen(eq=False)
class Off(Special):
    """A parameter that is known, but not served.

    Values that mean "off" pass; every other one is refused, never ignored.
    """

    why: str
    allowed: tuple[Any, ...] = (None,)

    def hook(self, inner: Any, converter: cattrs.Converter) -> Hook:
        return self._check

    def schema(self, inner: Any) -> dict[str, Any]:
        return {"enum": list(self.allowed)}

    def _check(self, value: Any) -> Any:
        # True == 1 in Python, so types are compared as well.
        if any(value == off and type(value) is type(off) for off in self.allowed):
            return value
        raise ValueError(f"not supported: {self.why}; leave it out")


@frozen(eq=False)
class OneOf(Special):
    """One of a few words; of some others it is known why they are not served."""

    allowed: tuple[str, ...]
    refused: Mapping[str, str]
    """Word to reason."""

    def hook(self, inner: Any, converter: cattrs.Converter) -> Hook:
        return self._check

    def schema(self, inner: Any) -> dict[str, Any]:
        return {"enum": list(self.allowed)}

    def _check(self, value: Any) -> str:
        if isinstance(value, str):
            if value in self.allowed:
                return value
            if why := self.refused.get(value):
                raise ValueError(f"not supported: {value}, because {why}")
        raise Mismatch("one of " + ", ".join(f'"{word}"' for word in self.allowed), value)


@frozen(eq=False)
class Items(Special):
    """Limits the length of a list or mapping, before anything in it is looked at."""

    minimum: int
    maximum: int | None = None

    def hook(self, inner: Any, converter: cattrs.Converter) -> Hook:
        structure = converter.get_structure_hook(inner)

        def check(value: Any) -> Any:
            if isinstance(value, list | dict):
                self._check_length(len(value))
            return structure(value, inner)

        return check

    def schema(self, inner: Any) -> dict[str, Any]:
        schema = request_schema(inner)
        what = "Properties" if schema["type"] == "object" else "Items"
        schema[f"min{what}"] = self.minimum
        return schema if self.maximum is None else schema | {f"max{what}": self.maximum}

    def _check_length(self, length: int) -> None:
        if length < self.minimum:
            raise ValueError(f"expected a length of at least {self.minimum}, got {length}")
        if self.maximum is not None and length > self.maximum:
            raise ValueError(f"expected a length of at most {self.maximum}, got {length}")


@frozen(eq=False)
class TokenIds(Special):
    """A list of token ids. It is long, so it is checked as a whole."""

    def hook(self, inner: Any, converter: cattrs.Converter) -> Hook:
        def check(value: Any) -> list[int]:
            if value == [] or _are_token_ids(value):
                ids: list[int] = value
                return ids
            raise Mismatch(f"a list of integers from 0 to {MAX_INT}", value)

        return check

    def schema(self, inner: Any) -> dict[str, Any]:
        return {"type": "array", "items": json_schema(TokenId)}


@frozen(eq=False)
class PromptList(Special):
    """One prompt or several, each a text or a list of token ids; always becomes a tuple."""

    def hook(self, inner: Any, converter: cattrs.Converter) -> Hook:
        return self._check

    def schema(self, inner: Any) -> dict[str, Any]:
        texts = {"type": "array", "minItems": 1, "items": {"type": "string"}}
        ids = texts | {"items": json_schema(TokenId)}
        return {"anyOf": [{"type": "string"}, texts, ids, texts | {"items": ids}]}

    @staticmethod
    def _check(value: Any) -> tuple[str | list[int], ...]:
        if isinstance(value, str) or _are_token_ids(value):
            return (value,)
        if isinstance(value, list) and value:
            all_texts = all(isinstance(item, str) for item in value)
            if all_texts or all(map(_are_token_ids, value)):
                return tuple(value)
        raise Mismatch(
            "a string, a list of strings, a list of token ids, or a list of such lists", value
        )


def _are_token_ids(value: Any) -> bool:
    return (
        isinstance(value, list)
        and set(map(type, value)) == {int}
        and min(value) >= 0
        and max(value) <= MAX_INT
    )


def special_of(kind: Any) -> Special | None:
    """The marker of an annotation, if it has one."""
    if get_origin(kind) is not Annotated:
        return None
    return next((extra for extra in get_args(kind)[1:] if isinstance(extra, Special)), None)


def build_request_converter(*, detailed: bool) -> cattrs.Converter:
    """The strict converter of ``commutator.schema`` that also knows the kinds above."""
    converter = build_converter(detailed=detailed)

    def factory(kind: Any) -> Callable[[Any, Any], Any]:
        special = special_of(kind)
        assert special is not None
        hook = special.hook(get_args(kind)[0], converter)
        return lambda value, _: hook(value)

    converter.register_structure_hook_factory(lambda kind: special_of(kind) is not None, factory)
    return converter


def request_schema(cls: Any) -> dict[str, Any]:
    """JSON Schema of a request class."""

    def special_schema(kind: Any) -> dict[str, Any] | None:
        special = special_of(kind)
        return None if special is None else special.schema(get_args(kind)[0])

    return json_schema(cls, special_schema)
