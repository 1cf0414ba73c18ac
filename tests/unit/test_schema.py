"""Strict structuring: nothing is converted silently; every mistake is reported with its path."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import pytest
from attrs import Attribute, frozen
from jsonschema import Draft202012Validator

from commutator.contract.settings import Bounds, ByteSize, PositiveInt, Size, setting
from commutator.schema import StructureError, build_converter, json_schema, structure


@frozen(kw_only=True)
class Inner:
    count: PositiveInt = setting("How many.")
    colour: Literal["red", "blue"] = setting("Which.", "red")


@frozen(kw_only=True)
class Outer:
    inner: Inner = setting("One.")
    many: tuple[Inner, ...] = setting("More.", ())
    share: Annotated[float, Bounds(above=0, maximum=1)] = setting("Part.", 0.5)
    length_m: float | None = setting("How long.", None)
    label: str | None = setting("Name.", None)
    either: str | list[str] = setting("One or several.", "a")
    table: dict[str, int] = setting("Numbers by name.", factory=dict)


def problems(data: object) -> dict[str, str]:
    with pytest.raises(StructureError) as caught:
        structure(build_converter(), data, Outer)
    return dict(caught.value.problems)


def test_good_data() -> None:
    data = {"inner": {"count": 2}, "many": [{"count": 1, "colour": "blue"}], "share": 1}
    outer = structure(build_converter(), data, Outer)
    assert outer == Outer(inner=Inner(count=2), many=(Inner(count=1, colour="blue"),), share=1.0)
    assert isinstance(outer.share, float)


@pytest.mark.parametrize(
    ("data", "path", "text"),
    [
        ({}, "inner", "required, but missing"),
        ({"inner": 3}, "inner", "expected a mapping, got 3"),
        ({"inner": {"count": "2"}}, "inner.count", 'expected an integer of at least 1, got "2"'),
        ({"inner": {"count": True}}, "inner.count", "expected an integer of at least 1, got true"),
        ({"inner": {"count": 1.0}}, "inner.count", "expected an integer of at least 1, got 1.0"),
        ({"inner": {"cuont": 1, "count": 1}}, "inner.cuont", 'unknown key; did you mean "count"?'),
        (
            {"inner": {"count": 1, "colour": "green"}},
            "inner.colour",
            'expected one of "red", "blue", got "green"',
        ),
        (
            {"inner": {"count": 1}, "share": 0},
            "share",
            "expected a number above 0 and at most 1, got 0",
        ),
        (
            {"inner": {"count": 1}, "length_m": float("inf")},
            "length_m",
            "expected a number, got Infinity, which is not finite",
        ),
        (
            {"inner": {"count": 1}, "length_m": float("nan")},
            "length_m",
            "expected a number, got NaN, which is not finite",
        ),
        (
            {"inner": {"count": 1}, "length_m": 10**400},
            "length_m",
            f"expected a number, got 1{'0' * 58}…",
        ),
        ({"inner": {"count": 1}, "label": 4}, "label", "expected a string, got 4"),
        ({"inner": {"count": 1}, "either": ["a", 2]}, "either[1]", "expected a string, got 2"),
        ({"inner": {"count": 1}, "table": {"x": "y"}}, "table.x", 'expected an integer, got "y"'),
        ([], "", "expected a mapping, got []"),
    ],
)
def test_each_mistake_is_named(data: object, path: str, text: str) -> None:
    assert problems(data) == {path: text}


def test_all_mistakes_at_once() -> None:
    found = problems({"inner": {"count": 0}, "many": [{"count": 1}, {"count": -1}, 7], "shar": 1})
    assert set(found) == {"inner.count", "many[1].count", "many[2]", "shar"}


def _even(_: Span, field: Attribute[Any], value: int) -> None:
    if value % 2:
        raise ValueError(f"{field.name}: expected an even number, got {value}")


def _short(_: Span, _field: Attribute[Any], value: str) -> None:
    if len(value) > 1:
        raise ValueError("expected one letter")


@frozen(kw_only=True)
class Span:
    width: int = setting("A validator that says its field's name.", 2, validator=_even)
    letter: str = setting("And one that does not.", "a", validator=_short)

    def __attrs_post_init__(self) -> None:
        if self.width == 0 and self.letter != "a":
            raise ValueError("width: 0 goes with no letter but a")


@frozen(kw_only=True)
class Spans:
    all: tuple[Span, ...] = setting("Some.")


def test_what_validators_find_has_the_path_of_the_field() -> None:
    data = {"all": [{"width": 2}, {"width": 3}, {"letter": "ab"}, {"width": 0, "letter": "b"}]}
    with pytest.raises(StructureError) as caught:
        structure(build_converter(), data, Spans)
    assert caught.value.problems == (
        ("all[1].width", "expected an even number, got 3"),
        ("all[2].letter", "expected one letter"),
        ("all[3]", "width: 0 goes with no letter but a"),
    )
    with pytest.raises(ValueError, match=r"^width: expected an even number, got 1"):
        Span(width=1)


def test_quick_converter_agrees() -> None:
    quick = build_converter(detailed=False)
    assert structure(quick, {"inner": {"count": 2}}, Outer) == Outer(inner=Inner(count=2))
    with pytest.raises(StructureError, match="at least 1"):
        structure(quick, {"inner": {"count": 0}}, Outer)


def test_json_schema_says_the_same() -> None:
    schema = json_schema(Outer)
    assert schema["required"] == ["inner"]
    assert schema["additionalProperties"] is False
    inner = schema["properties"]["inner"]
    assert inner["properties"]["count"] == {
        "type": "integer",
        "minimum": 1,
        "description": "How many.",
    }
    assert inner["properties"]["colour"]["enum"] == ["red", "blue"]
    assert schema["properties"]["share"]["exclusiveMinimum"] == 0
    assert schema["properties"]["label"]["anyOf"] == [{"type": "string"}, {"type": "null"}]


@frozen(kw_only=True)
class Store:
    capacity: Size = setting("How much.")
    spare: Size | None = setting("Left free.", None)
    segment: Annotated[int, ByteSize(minimum=4096)] = setting("Of one file.", 1 << 20)


@pytest.mark.parametrize(
    ("given", "size_bytes"),
    [
        (1, 1),
        (4 << 30, 4 << 30),
        ("4GiB", 4 << 30),
        ("500MB", 500_000_000),
        ("1.5 KiB", 1536),
        ("2kB", 2000),
        ("7 B", 7),
        ("0.25TiB", 1 << 38),
    ],
)
@pytest.mark.parametrize("detailed", [True, False])
def test_sizes_may_have_units(given: object, size_bytes: int, detailed: bool) -> None:
    data = {"capacity": given, "spare": given}
    store = structure(build_converter(detailed=detailed), data, Store)
    assert store == Store(capacity=size_bytes, spare=size_bytes)


@pytest.mark.parametrize(
    "given", [0, -1, 1.0, True, None, "", "4", "GiB", "4gib", "-4GiB", "4 GiB!", "0MB", "4GiB\n"]
)
def test_what_is_no_size(given: object) -> None:
    with pytest.raises(StructureError) as caught:
        structure(build_converter(), {"capacity": given}, Store)
    ((path, text),) = caught.value.problems
    assert path == "capacity"
    assert text.startswith('expected a size such as 4294967296, "4GiB" or "500MB", got ')


def test_a_size_that_is_too_small() -> None:
    with pytest.raises(StructureError, match="a size of at least 4096 bytes such as"):
        structure(build_converter(), {"capacity": 1, "segment": "1KiB"}, Store)


def test_json_schema_of_a_size() -> None:
    validator = Draft202012Validator(json_schema(Store))
    for good in (1, "4GiB", "1.5 KiB"):
        assert validator.is_valid({"capacity": good})
    for bad in (0, "4", "4gib", 1.5, True, "x 4GiB"):
        assert not validator.is_valid({"capacity": bad})
