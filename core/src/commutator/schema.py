"""Types, validation, error messages and JSON Schema (2020-12) from one description of a value.

Plain data becomes attrs classes strictly, and every mistake is reported with its path. Strict
means: no silent conversion ("2" is not 2, true is not 1, 1.0 is not 1), no unknown keys.
"""

from __future__ import annotations

import difflib
import json
import math
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from functools import partial
from itertools import islice, takewhile
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import attrs
import cattrs
from cattrs.errors import (
    AttributeValidationNote,
    BaseValidationError,
    ForbiddenExtraKeysError,
    IterableValidationError,
    IterableValidationNote,
)
from cattrs.gen import make_dict_structure_fn

from commutator.contract.settings import Bounds, ByteSize, Count, Port, SettingNote

__all__ = [
    "ByteSize",
    "Count",
    "Mismatch",
    "Port",
    "StructureError",
    "build_converter",
    "json_schema",
    "structure",
]

T = TypeVar("T")

# Per list or mapping; a request with a million wrong items must not take a minute.
_MAX_PROBLEMS = 20

_NAMES: Mapping[Any, str] = {
    int: "an integer",
    float: "a number",
    str: "a string",
    bool: "true or false",
    dict: "a mapping",
    list: "a list",
    type(None): "null",
}


class Mismatch(ValueError):  # noqa: N818 - it is a finding about a value, not an error of ours
    """One value is not what its field accepts. ``expected`` is a noun phrase."""

    def __init__(self, expected: str, got: Any) -> None:
        self.expected = expected
        hint = ", which is not finite" if isinstance(got, float) and not math.isfinite(got) else ""
        super().__init__(f"expected {expected}, got {show(got)}{hint}")


class StructureError(ValueError):
    """Everything wrong with one piece of data, as (path, message) pairs in document order."""

    def __init__(self, problems: Sequence[tuple[str, str]]) -> None:
        self.problems = tuple(problems)
        super().__init__("; ".join(f"{path}: {text}" if path else text for path, text in problems))


def show(value: Any, limit: int = 60) -> str:
    """``value`` as the user may have written it, shortened."""
    try:
        text = json.dumps(_beginning(value, limit), ensure_ascii=False)
    except (TypeError, ValueError):
        text = repr(value)
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _beginning(value: Any, limit: int, depth: int = 3) -> Any:
    """``value`` without what is cut off anyway: writing all of a large one takes long."""
    if isinstance(value, str):
        return value[:limit]
    if isinstance(value, Mapping):
        items = islice(value.items(), limit if depth else 0)
        return {str(k)[:limit]: _beginning(v, limit, depth - 1) for k, v in items}
    if isinstance(value, list | tuple):
        shown = islice(value, limit // 2 if depth else 0)
        return [_beginning(item, limit, depth - 1) for item in shown]
    return value


def describe(kind: Any) -> str:
    """A noun phrase for a type annotation: "an integer of at least 1"."""
    origin, args = get_origin(kind), get_args(kind)
    if origin is Annotated:
        if (size := _byte_size(kind)) is not None:
            return size.describe()
        return describe(args[0]) + "".join(b.describe() for b in args[1:] if isinstance(b, Bounds))
    if origin is Literal:
        return "one of " + ", ".join(show(choice) for choice in args)
    if origin in (Union, types.UnionType):
        return " or ".join(describe(arg) for arg in args if arg is not type(None))
    if isinstance(kind, type) and issubclass(kind, Enum):
        return "one of " + ", ".join(show(member.value) for member in kind)
    if origin in (list, tuple):
        if args and (form := secret_form(args[0])) is not None:
            return f"a list of {form}"
        return f"a list ({describe(args[0])} each)" if args else "a list"
    if origin in (dict, Mapping) or attrs.has(kind):
        return secret_form(kind) or "a mapping"
    return _NAMES.get(kind, getattr(kind, "__name__", str(kind)))


def secret_form(kind: Any) -> str | None:
    """How a value of the class ``kind`` is written, if what stands in its place may be a secret.

    Such a class says so by ``WRITTEN_AS``.
    """
    return getattr(kind, "WRITTEN_AS", None)


def mismatch(kind: Any, value: Any) -> ValueError:
    """What to raise for a value of another shape. One that may be a secret is not repeated."""
    if all(secret_form(one) is None for one in (kind, *get_args(kind))):
        return Mismatch(describe(kind), value)
    return ValueError(f"expected {describe(kind)}; a secret must not be written in the file")


def matcher(kind: Any) -> Callable[[Any], bool]:
    """A test whether a plain value has the outer shape of the annotation ``kind``.

    The annotation is inspected once, here, and not for each value.
    """
    origin, args = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _annotated_matcher(kind)
    if origin is Literal:
        return lambda value: any(value == one and type(value) is type(one) for one in args)
    if origin in (Union, types.UnionType):
        members = [matcher(arg) for arg in args]
        return lambda value: any(member(value) for member in members)
    if kind is float:
        return _is_number
    if kind is int:
        return lambda value: isinstance(value, int) and not isinstance(value, bool)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return lambda value: any(value == member.value for member in kind)
    if origin in (list, tuple):
        return lambda value: isinstance(value, (list, tuple))
    if origin in (dict, Mapping) or attrs.has(kind):
        return _is_mapping
    if kind is Any:
        return lambda _: True
    return lambda value: isinstance(value, kind)


def _is_number(value: Any) -> bool:
    """Whether it is a finite number that a float can hold."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer of more than 300 digits
        return False


def _is_mapping(value: Any) -> bool:
    return isinstance(value, (dict, Mapping))  # the abstract class alone is slower


def _annotated_matcher(kind: Any) -> Callable[[Any], bool]:
    base, *extras = get_args(kind)
    if (size := _byte_size(kind)) is not None:
        return lambda value: size.parse(value) is not None
    fits = matcher(base)
    for extra in extras:
        if isinstance(extra, Bounds):
            fits = _within(extra, fits)
    return fits


def _within(bounds: Bounds, fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    lowest = -math.inf if bounds.minimum is None else bounds.minimum
    highest = math.inf if bounds.maximum is None else bounds.maximum
    if (above := bounds.above) is None:
        return lambda value: fits(value) and lowest <= value <= highest
    return lambda value: fits(value) and lowest <= value <= highest and value > above


def build_converter(*, detailed: bool = True, extensions: bool = False) -> cattrs.Converter:
    """A strict converter. With ``detailed=False`` it is faster and stops at the first mistake.

    ``extensions``: keys of objects that begin with "x-" are the author's own, and ignored.
    """
    converter = cattrs.Converter(forbid_extra_keys=True, detailed_validation=detailed)
    for primitive in (int, float, str, bool):  # replaces the hooks of cattrs
        converter.register_structure_hook(primitive, _leaf_hook(primitive, converter))
    converter.register_structure_hook_factory(_is_leaf, _leaf_hook)
    converter.register_structure_hook_factory(_is_union, _union_hook)
    converter.register_structure_hook_factory(_is_container, _container_hook)
    hooks = partial(_class_hook, extensions=extensions)
    converter.register_structure_hook_factory(attrs.has, hooks)
    return converter


def structure(converter: cattrs.Converter, data: Any, cls: type[T]) -> T:
    """``data`` as ``cls``. Raises StructureError with every problem found."""
    try:
        return converter.structure(data, cls)
    except (BaseValidationError, ForbiddenExtraKeysError, ValueError, KeyError) as error:
        raise StructureError(list(_problems(error, ""))) from None


def nearest(word: str, known: Sequence[str]) -> str:
    """A hint for a misspelt key: the nearest known one, or all of them."""
    close = difflib.get_close_matches(word, known, n=3, cutoff=0.6)
    close.sort(key=lambda one: _likeness(word, one), reverse=True)
    return f'did you mean "{close[0]}"?' if close else "known keys: " + ", ".join(sorted(known))


def _likeness(word: str, known: str) -> float:
    """Of words that are about equally close, people mean the one that begins like theirs."""
    common = sum(
        1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(word, known, strict=False))
    )
    return difflib.SequenceMatcher(None, known, word).ratio() + common / 100


def _base(kind: Any) -> Any:
    return get_args(kind)[0] if get_origin(kind) is Annotated else kind


def _is_leaf(kind: Any) -> bool:
    base = _base(kind)
    if base in (int, float, str, bool) or get_origin(base) is Literal:
        return True
    return isinstance(base, type) and issubclass(base, Enum)


def _is_union(kind: Any) -> bool:
    return get_origin(kind) in (Union, types.UnionType)


def _is_container(kind: Any) -> bool:
    return get_origin(kind) in (list, tuple, dict, Mapping) or kind in (list, tuple, dict)


def _byte_size(kind: Any) -> ByteSize | None:
    extras = get_args(kind)[1:] if get_origin(kind) is Annotated else ()
    return next((extra for extra in extras if isinstance(extra, ByteSize)), None)


def _leaf_hook(kind: Any, _: cattrs.Converter) -> Callable[[Any, Any], Any]:
    fits, base, size = matcher(kind), _base(kind), _byte_size(kind)
    is_enum = isinstance(base, type) and issubclass(base, Enum)
    convert = size.parse if size is not None else base if base is float or is_enum else None

    def hook(value: Any, _: Any) -> Any:
        if not fits(value):
            raise Mismatch(describe(kind), value)
        return value if convert is None else convert(value)

    return hook


def _union_hook(kind: Any, converter: cattrs.Converter) -> Callable[[Any, Any], Any]:
    """Uses the first member whose outer shape fits, so that its errors are reported."""
    members = [
        (matcher(member), converter.get_structure_hook(member), member)
        for member in get_args(kind)
        if member is not type(None)
    ]
    optional = type(None) in get_args(kind)
    if optional and len(members) == 1:
        _, structure_only, only = members[0]
        return lambda value, _: None if value is None else structure_only(value, only)

    def hook(value: Any, _: Any) -> Any:
        if value is None and optional:
            return None
        for fits, structure_member, member in members:
            if fits(value):
                return structure_member(value, member)
        raise Mismatch(describe(kind), value)

    return hook


def _container_hook(kind: Any, converter: cattrs.Converter) -> Callable[[Any, Any], Any]:
    origin, args = get_origin(kind) or kind, get_args(kind)
    into = dict if origin in (dict, Mapping) else origin
    item = (args[-1] if into is dict else args[0]) if args else Any
    key = args[0] if args and into is dict else Any
    item_hook, fits = converter.get_structure_hook(item), matcher(kind)
    detailed = converter.detailed_validation

    def hook(value: Any, _: Any) -> Any:
        if not fits(value):
            raise mismatch(kind, value)
        if into is dict:
            keys = [converter.structure(k, key) for k in value]
            return dict(zip(keys, _items(value.items(), item_hook, item, detailed), strict=True))
        return into(_items(enumerate(value), item_hook, item, detailed))

    return hook


def _items(
    pairs: Iterable[tuple[Any, Any]], hook: Callable[[Any, Any], Any], kind: Any, detailed: bool
) -> list[Any]:
    if not detailed:
        return [hook(value, kind) for _, value in pairs]
    done: list[Any] = []
    errors: list[Exception] = []
    for index, value in pairs:
        try:
            done.append(hook(value, kind))
        except Exception as error:  # noqa: BLE001 - collected, and raised together below
            note = f"@ item {index!r}"
            error.add_note(IterableValidationNote(note, index, kind))
            errors.append(error)
            if len(errors) == _MAX_PROBLEMS:
                break
    if errors:
        raise IterableValidationError("wrong items", errors, list)
    return done


def _class_hook(
    cls: Any, converter: cattrs.Converter, *, extensions: bool
) -> Callable[[Any, Any], Any]:
    inner = make_dict_structure_fn(cls, converter)

    def hook(value: Any, _: Any) -> Any:
        if isinstance(value, cls):
            return value
        if not _is_mapping(value):
            raise mismatch(cls, value)
        if extensions and any(str(key).startswith("x-") for key in value):
            value = {key: item for key, item in value.items() if not str(key).startswith("x-")}
        return inner(value, cls)

    return hook


def _problems(error: BaseException, path: str) -> Iterable[tuple[str, str]]:
    if not isinstance(error, BaseValidationError):
        yield from _leaf_problems(error, path)
        return
    for inner in error.exceptions:
        yield from _problems(inner, path + _step(inner, path))


def _step(error: BaseException, path: str) -> str:
    """The last piece of the path: cattrs leaves it as a note on the exception."""
    for note in reversed(getattr(error, "__notes__", [])):
        if isinstance(note, IterableValidationNote):
            index = note.index
            return f"[{index}]" if isinstance(index, int) else f".{index}" if path else str(index)
        if isinstance(note, (AttributeValidationNote, SettingNote)):
            return f".{note.name}" if path else note.name
    return ""


def _leaf_problems(error: BaseException, path: str) -> Iterable[tuple[str, str]]:
    if isinstance(error, ForbiddenExtraKeysError):
        known = [attribute.name for attribute in attrs.fields(error.cl)]
        for key in sorted(map(str, error.extra_fields))[:_MAX_PROBLEMS]:
            yield (f"{path}.{key}" if path else key), f"unknown key; {nearest(key[:64], known)}"
    elif isinstance(error, KeyError):
        yield path, "required, but missing"
    else:
        name = path.rpartition(".")[2]  # some validators include the name
        yield path, str(error).removeprefix(f"{name}: ")


_SIMPLE = {
    int: {"type": "integer"},
    float: {"type": "number"},
    str: {"type": "string"},
    bool: {"type": "boolean"},
    type(None): {"type": "null"},
}

Special = Callable[[Any], dict[str, Any] | None]


def json_schema(kind: Any, special: Special | None = None) -> dict[str, Any]:
    """The schema of an annotation or attrs class.

    ``special`` may answer first for classes that need a schema of their own (plugin unions);
    None lets the general rule decide.
    """
    if special is not None and (found := special(kind)) is not None:
        return found
    origin, args = get_origin(kind), get_args(kind)
    if origin is Annotated:
        if (size := _byte_size(kind)) is not None:
            whole = {"type": "integer", "minimum": size.minimum}
            return {"anyOf": [whole, {"type": "string", "pattern": size.pattern}]}
        return json_schema(args[0], special) | _limits(args[1:])
    if origin is Literal:
        return {"enum": list(args)}
    if origin in (Union, types.UnionType):
        return {"anyOf": [json_schema(arg, special) for arg in args]}
    if isinstance(kind, type) and issubclass(kind, Enum):
        return {"enum": [member.value for member in kind]}
    if origin in (list, tuple) or kind in (list, tuple):
        return {"type": "array", "items": json_schema(args[0], special) if args else {}}
    if origin in (dict, Mapping) or kind in (dict, Mapping):
        values = json_schema(args[1], special) if args else {}
        return {"type": "object", "additionalProperties": values}
    if attrs.has(kind):
        return _class_schema(kind, special)
    return dict(_SIMPLE.get(kind, {}))


def _limits(extras: tuple[Any, ...]) -> dict[str, Any]:
    limits: dict[str, Any] = {}
    for bounds in (extra for extra in extras if isinstance(extra, Bounds)):
        pairs = (
            ("minimum", bounds.minimum),
            ("maximum", bounds.maximum),
            ("exclusiveMinimum", bounds.above),
        )
        limits |= {name: value for name, value in pairs if value is not None}
    return limits


def _class_schema(cls: Any, special: Special | None) -> dict[str, Any]:
    attrs.resolve_types(cls, include_extras=True)
    properties: dict[str, Any] = {}
    required: list[str] = []
    for attribute in attrs.fields(cls):
        schema = json_schema(attribute.type, special)
        if doc := attribute.metadata.get("doc"):
            schema["description"] = doc
        if effect := attribute.metadata.get("takes_effect"):
            schema["x-takes-effect"] = effect
        if attribute.default is attrs.NOTHING:
            required.append(attribute.name)
        elif isinstance(attribute.default, str | int | float | bool):
            schema["default"] = attribute.default
        properties[attribute.name] = schema
    result: dict[str, Any] = {
        "type": "object",
        "properties": properties,
        "additionalProperties": False,
    }
    return result | ({"required": required} if required else {})
