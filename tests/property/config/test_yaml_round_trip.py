"""What the supervisor hands on to the front doors is read as exactly what was written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from commutator.config.tree import plain
from commutator.config.yaml_file import parse_value, read_file, to_yaml

ODD = (  # what is no text without its quotes
    *("1e-5", "1E9", "5e-05", "0x1F", "1:30", "yes", "null", "~", ".inf", "=", "<<", "- a", "a: b"),
    *("/models/with space/ü", "C:\\models", "smol-😀", "2024-01-01", "[/INST]", "%x", "#", "\x85"),
)
TEXTS = st.text() | st.sampled_from(ODD)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXTS
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3)
)


@given(VALUES)
@example(0.00005)
@example(1e300)
@example(5e-324)
@example(-0.0)
@example(float("inf"))
@example({"name": "smol-😀", "ratio": 0.00005, "deep": [{"paths": ["/a b", "~/é"]}]})
@example({"k" * 500: "v" * 500})
def test_what_is_written_is_read_again(value: Any) -> None:
    text = to_yaml(value)
    assert text.isascii(), "whatever the machine's encoding is"
    assert repr(plain(parse_value(text, "x"))) == repr(value), "types and signs count, too"


def test_halves_of_a_pair_are_read_as_their_character() -> None:
    """As JSON has it, which YAML 1.2 holds."""
    assert plain(parse_value(to_yaml("\ud83d\ude00"), "x")) == "😀"
    assert plain(parse_value('"\\ud83d\\ude00"', "x")) == "😀"


def test_a_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    shared = ["a"]
    file = tmp_path / "c.yaml"
    file.write_text(to_yaml({"name": "smol-😀", "one": shared, "two": shared, "small": 5e-05}))
    assert plain(read_file(file)) == {
        "name": "smol-😀",
        "one": ["a"],
        "two": ["a"],
        "small": 0.00005,
    }
    assert "&" not in file.read_text()


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-5", 1e-5),
        ("1E+9", 1e9),
        ("-2.5e3", -2500.0),
        (".5e1", 5.0),
        ("3.e2", 300.0),
        ("1e", "1e"),
        ("e5", "e5"),
        ("1e5x", "1e5x"),
        ('"1e5"', "1e5"),
        ("15", 15),
    ],
)
def test_numbers_may_have_an_exponent(text: str, value: Any) -> None:
    assert repr(plain(parse_value(text, "x"))) == repr(value)
