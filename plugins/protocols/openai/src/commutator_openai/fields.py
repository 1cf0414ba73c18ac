"""Kinds of request fields that are not plain types: what they accept, and their JSON Schema.

Each is a marker inside ``Annotated``: ``Annotated[tuple[str, ...], Items(1, 16)]``.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import cache
from operator import attrgetter
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import attrs
import cattrs
from attrs import frozen

from commutator import Bounds, KvRetention, setting
from commutator.schema import Mismatch, build_converter, json_schema
from commutator_openai.values import METADATA, TOOL_NAME, TOOL_NAMES, is_metadata

MAX_INT = 2**31 - 1
MAX_LABEL = 256
"""Characters of a name that is kept, logged or compared."""
TokenId = Annotated[int, Bounds(minimum=0, maximum=MAX_INT)]


class Special(ABC):
    """A marker that converts and describes its field itself."""

    def hook(self, inner: Any, converter: cattrs.Converter) -> Callable[[Any], Any]:
        """The conversion of a plain value to the field's; ``inner`` is the annotated type."""
        return self.convert

    @abstractmethod
    def convert(self, value: Any) -> Any:
        """The field's value. Raises ValueError."""

    @abstractmethod
    def schema(self, inner: Any) -> dict[str, Any]:
        """JSON Schema of the field."""


def _is_one_of(allowed: tuple[Any, ...], value: Any) -> bool:
    # True == 1 in Python, so types are compared as well.
    return any(value == one and type(value) is type(one) for one in allowed)


# Markers are compared by identity: annotations are dictionary keys in cattrs.
@frozen(eq=False)
class Off(Special):
    """A parameter that is known, but not served.

    Values that mean "off" pass; every other one is refused, never ignored.
    """

    why: str
    allowed: tuple[Any, ...] = (None,)

    def convert(self, value: Any) -> Any:
        if _is_one_of(self.allowed, value):
            return value
        raise ValueError(f"not supported: {self.why}; remove it")

    def schema(self, inner: Any) -> dict[str, Any]:
        return {"enum": list(self.allowed)}


@frozen(eq=False)
class Hint(Special):
    """A parameter that has no effect here, and whose loss does not make an answer wrong.

    Values that mean "off" are as good as none; others are ignored or refused, as configured.
    """

    why: str
    """Completes "NAME is not supported, because ..."."""
    allowed: tuple[Any, ...] = (None,)
    for_engines: bool = False
    """Whether an engine that takes clients' requests unchanged may know it."""
    words: tuple[str, ...] = ()
    """The values that it can have; empty: any."""

    def is_off(self, value: Any) -> bool:
        return _is_one_of(self.allowed, value)

    def convert(self, value: Any) -> Any:
        if self.words and value is not None and value not in self.words:
            raise Mismatch("one of " + ", ".join(f'"{word}"' for word in self.words), value)
        return value

    def schema(self, inner: Any) -> dict[str, Any]:
        return {"enum": [*self.words, None]} if self.words else {}


@frozen(eq=False)
class Metadata(Hint):
    """Texts by name, of the client's own choice."""

    def convert(self, value: Any) -> Any:
        if value is not None and not is_metadata(value):
            raise Mismatch(METADATA, value)
        return value


@frozen(eq=False)
class OneOf(Special):
    """One of a few words; of some others it is known why they are not served."""

    allowed: tuple[str, ...]
    refused: Mapping[str, str]
    """Word to reason."""

    def convert(self, value: Any) -> str:
        if isinstance(value, str):
            if value in self.allowed:
                return value
            if why := self.refused.get(value):
                raise ValueError(f"not supported: {value}, because {why}")
        raise Mismatch("one of " + ", ".join(f'"{word}"' for word in self.allowed), value)

    def schema(self, inner: Any) -> dict[str, Any]:
        return {"enum": list(self.allowed)}


@frozen(eq=False)
class Items(Special):
    """Limits the length of a list or mapping, before its items are converted."""

    minimum: int
    maximum: int | None = None

    def hook(self, inner: Any, converter: cattrs.Converter) -> Callable[[Any], Any]:
        structure = converter.get_structure_hook(inner)
        return lambda value: structure(self.convert(value), inner)

    def convert(self, value: Any) -> Any:
        length = len(value) if isinstance(value, list | dict) else self.minimum
        if length < self.minimum:
            raise ValueError(f"expected a length of at least {self.minimum}, got {length}")
        if self.maximum is not None and length > self.maximum:
            raise ValueError(f"expected a length of at most {self.maximum}, got {length}")
        return value

    def schema(self, inner: Any) -> dict[str, Any]:
        schema = request_schema(inner)
        what = "Properties" if schema["type"] == "object" else "Items"
        schema[f"min{what}"] = self.minimum
        return schema if self.maximum is None else schema | {f"max{what}": self.maximum}


@frozen(eq=False)
class Label(Special):
    """A name that is kept, logged or compared, and so has a limit."""

    maximum: int = MAX_LABEL
    """In characters."""
    minimum: int = 0
    """In characters."""

    def convert(self, value: Any) -> str:
        if not isinstance(value, str):
            raise Mismatch("a string", value)
        if len(value) > self.maximum:
            raise ValueError(f"expected at most {self.maximum} characters, got {len(value)}")
        if len(value) < self.minimum:
            raise ValueError(f"expected at least {self.minimum} characters, got {len(value)}")
        return value

    def schema(self, inner: Any) -> dict[str, Any]:
        least = {"minLength": self.minimum} if self.minimum else {}
        return {"type": "string", **least, "maxLength": self.maximum}


_ROLE = r"[A-Za-z][A-Za-z0-9_\-]{0,63}"
_IS_ROLE = re.compile(_ROLE).fullmatch


@frozen(eq=False)
class Role(Special):
    """Who speaks: a known word, or another that the model's chat template may know."""

    refused: Mapping[str, str]
    """Word to why it is not served."""

    def convert(self, value: Any) -> str:
        if isinstance(value, str):
            if why := self.refused.get(value):
                raise ValueError(f"not supported: {value}, because {why}")
            if _IS_ROLE(value):
                return value
        raise Mismatch("system, developer, user, assistant, tool or another word", value)

    def schema(self, inner: Any) -> dict[str, Any]:
        return {"type": "string", "pattern": f"^{_ROLE}$"}


@frozen(eq=False)
class FunctionType(Special):
    """The type of a tool or a call: only functions are served."""

    def convert(self, value: Any) -> str:
        if value == "function":
            return "function"
        if not isinstance(value, str):
            raise Mismatch('"function"', value)
        raise ValueError(f"not supported: tools of type {value[:40]!r}, only functions are served")

    def schema(self, inner: Any) -> dict[str, Any]:
        return {"enum": ["function"]}


@frozen(eq=False)
class Tools(Items):
    """A list of tools. Those of other types have other fields, so their types come first."""

    def convert(self, value: Any) -> Any:
        for one in value if isinstance(value, list) else ():
            kind = one.get("type") if isinstance(one, dict) else None
            if isinstance(kind, str) and kind != "function":
                raise ValueError(
                    f"not supported: tools of type {kind[:40]!r}, only functions are served"
                )
        return super().convert(value)


@frozen(eq=False)
class ToolName(Special):
    """The name of a tool."""

    def convert(self, value: Any) -> str:
        if isinstance(value, str) and re.fullmatch(TOOL_NAME, value):
            return value
        raise Mismatch(TOOL_NAMES, value)

    def schema(self, inner: Any) -> dict[str, Any]:
        return {"type": "string", "pattern": f"^{TOOL_NAME}$"}


@frozen(eq=False)
class WhichTools(Special):
    """What is to be called: always becomes (mode, the named or allowed tools), or None."""

    def convert(self, value: Any) -> tuple[str, tuple[str, ...]] | None:
        if value is None:
            return None
        if value in ("none", "auto", "required"):
            return value, ()
        match value:
            case {"type": "function", "function": {"name": str(name)}}:
                return "named", (name,)
            case {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": list(tools)}}:
                names = [tool.get("function", tool).get("name") for tool in tools]
                if mode in ("auto", "required") and all(isinstance(one, str) for one in names):
                    return mode, tuple(names)
            case {"type": "custom"}:
                raise ValueError("not supported: custom tools, only functions are served")
        raise Mismatch(
            '"none", "auto", "required", {"type": "function", "function": {"name": NAME}} or a '
            "choice of allowed tools",
            value,
        )

    def schema(self, inner: Any) -> dict[str, Any]:
        return {"anyOf": [{"enum": ["none", "auto", "required"]}, {"type": "object"}]}


@frozen(eq=False)
class TokenIds(Special):
    """A list of token ids. It is long, so it is checked as a whole."""

    minimum: int = 0
    maximum: int | None = None

    def convert(self, value: Any) -> list[int]:
        if value != [] and not _are_token_ids(value):
            raise Mismatch(f"a list of integers from 0 to {MAX_INT}", value)
        ids: list[int] = Items(self.minimum, self.maximum).convert(value)
        return ids

    def schema(self, inner: Any) -> dict[str, Any]:
        items = {"type": "array", "items": json_schema(TokenId), "minItems": self.minimum}
        return items if self.maximum is None else items | {"maxItems": self.maximum}


@frozen(eq=False)
class GivenTokens(Special):
    """Of what moves KV blocks, the prompt's tokens alone, which move none."""

    def convert(self, value: Any) -> list[int] | None:
        match value:
            case None:
                return None
            case {"prompt_token_ids": [_, *_] as given} if len(value) == 1:
                if _are_token_ids(given):
                    return [*given]
        raise ValueError("not allowed: only the front door moves KV blocks; leave it out")

    def schema(self, inner: Any) -> dict[str, Any]:
        ids = {"type": "array", "minItems": 1, "items": json_schema(TokenId)}
        return {"type": ["object", "null"], "properties": {"prompt_token_ids": ids}}


@frozen(eq=False)
class PromptList(Special):
    """One prompt or several, each a text or a list of token ids; always becomes a tuple."""

    maximum: int | None = None

    def convert(self, value: Any) -> tuple[str | list[int], ...]:
        if isinstance(value, str) or _are_token_ids(value):
            return (value,)
        if isinstance(value, list) and value:
            Items(1, self.maximum).convert(value)
            all_texts = all(isinstance(item, str) for item in value)
            if all_texts or all(map(_are_token_ids, value)):
                return tuple(value)
        raise Mismatch(
            "a string, a list of strings, a list of token ids, or a list of such lists", value
        )

    def schema(self, inner: Any) -> dict[str, Any]:
        texts = {"type": "array", "minItems": 1, "items": {"type": "string"}}
        ids = texts | {"items": json_schema(TokenId)}
        most = {} if self.maximum is None else {"maxItems": self.maximum}
        return {"anyOf": [{"type": "string"}, texts | most, ids, texts | most | {"items": ids}]}


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


@cache
def _hints(cls: type[Any]) -> tuple[dict[str, Hint], Callable[[Any], Any], Any]:
    """By name; what reads the fields of all of them, and what it reads where none is given."""
    kinds = get_type_hints(cls, include_extras=True)
    markers = ((name, special_of(kind)) for name, kind in kinds.items())
    hints = {name: marker for name, marker in markers if isinstance(marker, Hint)}
    read = attrgetter("__class__", *hints)  # a tuple however many there are
    return hints, read, (cls, *[None] * len(hints))


def hints_given(body: Any) -> dict[str, Hint]:
    """The hints that a request sets to more than "off", by name."""
    hints, read, nothing = _hints(body.__class__)
    if not hints or (given := read(body)) == nothing:  # nearly always
        return {}
    values = zip(hints.items(), given[1:], strict=True)
    return {name: hint for (name, hint), value in values if not hint.is_off(value)}


def build_request_converter(*, detailed: bool) -> cattrs.Converter:
    """The strict converter of ``commutator.schema`` that also knows the kinds above.

    Without ``detailed`` it raises anything for a mistake.
    """
    converter = build_converter(detailed=detailed)
    if not detailed:
        converter.register_structure_hook_factory(attrs.has, _quick_class_hook)

    def factory(kind: Any) -> Callable[[Any, Any], Any]:
        special = special_of(kind)
        assert special is not None
        hook = special.hook(get_args(kind)[0], converter)
        return lambda value, _: hook(value)

    converter.register_structure_hook_factory(lambda kind: special_of(kind) is not None, factory)
    return converter


def _quick_class_hook(cls: Any, converter: cattrs.Converter) -> Callable[[Any, Any], Any]:
    """Costs what is given: an ``__init__`` of eighty arguments takes longer than all the rest.

    ``cls`` has neither slots nor validators.
    """
    kinds, fields = get_type_hints(cls, include_extras=True), attrs.fields_dict(cls)
    hooks = {name: (converter.get_structure_hook(kinds[name]), kinds[name]) for name in fields}
    given = {name: one.default for name, one in fields.items()}
    defaults = {name: value for name, value in given.items() if value is not attrs.NOTHING}
    required = frozenset(hooks.keys() - defaults.keys())
    new = cls.__new__

    def hook(value: Any, _: Any) -> Any:
        if value.__class__ is cls:  # it was read before
            return value
        made = new(cls)
        made.__dict__.update(defaults)
        for name, given in value.items():
            structure, kind = hooks[name]
            made.__dict__[name] = structure(given, kind)
        if not required <= value.keys():
            raise KeyError(*required)
        return made

    return hook


def request_schema(cls: Any) -> dict[str, Any]:
    """JSON Schema of a request class."""

    def special_schema(kind: Any) -> dict[str, Any] | None:
        special = special_of(kind)
        return None if special is None else special.schema(get_args(kind)[0])

    return json_schema(cls, special_schema)


_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_LONGEST_S = 30 * 86_400
_TEXT = rf"([1-9][0-9]{{0,6}})([{''.join(_UNITS_S)}])"
_EPHEMERAL_PRIORITY = 1


@frozen(eq=False)
class Lifetime(Special):
    """A time such as "5m", as seconds."""

    def convert(self, value: Any) -> float:
        match = re.fullmatch(_TEXT, value) if isinstance(value, str) else None
        seconds = int(match[1]) * _UNITS_S[match[2]] if match is not None else 0
        if not 0 < seconds <= _LONGEST_S:
            raise Mismatch('a time of at most 30 days, such as "30s", "5m", "1h" or "7d"', value)
        return float(seconds)

    def schema(self, inner: Any) -> dict[str, Any]:
        return {"type": "string", "pattern": f"^{_TEXT}$"}


@frozen(kw_only=True)
class CacheControl:
    """How long the KV blocks of a prompt, or of its beginning, are worth keeping in `tiers`."""

    type: Annotated[str, OneOf(("ephemeral", "persistent"), {})] = setting(
        "ephemeral: evicted after blocks without cache_control. persistent: not evicted to "
        "make room, as long as such blocks fill at most half of a tier."
    )
    ttl: Annotated[float, Lifetime()] = setting(
        'How long after their last use; then they are evicted first. "5m" by default.', 300.0
    )
    priority: Annotated[int, Bounds(minimum=-10, maximum=10)] | None = setting(
        "Blocks of a lower priority are evicted first; 1 by default, 0 without cache_control.", None
    )


def retention_of(mark: CacheControl) -> KvRetention:
    """What a mark asks for, for the whole prompt or up to its message."""
    return KvRetention(
        priority=_EPHEMERAL_PRIORITY if mark.priority is None else mark.priority,
        ttl_s=mark.ttl,
        pinned=mark.type == "persistent",
    )
