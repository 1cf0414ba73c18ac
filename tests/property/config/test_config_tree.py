"""Laws of merging and setting configuration values."""

from __future__ import annotations

from typing import Any

from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from commutator.config.tree import (
    DEFAULT,
    Node,
    find,
    from_plain,
    idle_resets,
    merge,
    origin_of,
    path_steps,
    path_text,
    plain,
    put,
)

KEYS = st.text("abcde_", min_size=1, max_size=3)
SCALARS = st.none() | st.booleans() | st.integers() | st.text(max_size=3)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3)
)
MAPPINGS = st.dictionaries(KEYS, VALUES, max_size=4)


def merged(*parts: Any) -> Any:
    tree = from_plain(parts[0], "0")
    for number, part in enumerate(parts[1:], 1):
        tree = merge(tree, from_plain(part, str(number)))
    return plain(tree)


def model_merge(base: Any, over: Any) -> Any:
    if isinstance(base, dict) and isinstance(over, dict):
        return {
            key: model_merge(base[key], over[key])
            if key in base and key in over
            else over.get(key, base.get(key))
            for key in base | over
        }
    return over


@given(VALUES)
def test_plain_undoes_from_plain(value: Any) -> None:
    assert plain(from_plain(value, "x")) == value


@given(MAPPINGS, MAPPINGS)
def test_merging_follows_the_model(a: Any, b: Any) -> None:
    assert merged(a, b) == model_merge(a, b)


@given(MAPPINGS, MAPPINGS, MAPPINGS)
def test_each_file_goes_over_all_before_it(a: Any, b: Any, c: Any) -> None:
    # The order matters: a value that is no mapping forgets the mapping below it.
    assert merged(a, b, c) == merged(merged(a, b), c) == model_merge(model_merge(a, b), c)


class Reset:
    """A value behind the tag ``!reset``; None removes."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __repr__(self) -> str:
        return f"!reset {self.value!r}"


WITH_RESETS = st.dictionaries(
    KEYS,
    st.recursive(
        SCALARS | VALUES.map(Reset),
        lambda inner: st.dictionaries(KEYS, inner | inner.map(Reset), max_size=3),
    ),
    max_size=4,
)


def tagged(value: Any) -> Node:
    if isinstance(value, Reset):
        return evolve(tagged(value.value), resets=True)
    if isinstance(value, dict):
        return Node({key: tagged(item) for key, item in value.items()}, "over")
    return from_plain(value, "over")


def model_reset(base: Any, over: Any) -> Any:
    """``...`` stands for nothing."""
    if isinstance(over, Reset):
        while isinstance(over, Reset):
            over = over.value
        return ... if over is None else model_reset(..., over)
    if not isinstance(over, dict):
        return over
    below = base if isinstance(base, dict) else {}
    every = {
        key: model_reset(below.get(key, ...), over[key]) if key in over else below[key]
        for key in below | over
    }
    return {key: value for key, value in every.items() if value is not ...}


@given(MAPPINGS, WITH_RESETS)
def test_resets_forget_what_was_there(a: Any, b: Any) -> None:
    base, over = from_plain(a, "base"), tagged(b)
    result = merge(base, over)
    assert plain(result) == model_reset(a, b)
    assert plain(base) == a
    assert not any(node.resets for node in nodes(result))
    for steps, node in idle_resets(base, over):
        assert node.removes
        assert find(over, steps) is node


def nodes(node: Node) -> list[Node]:
    inside = node.value
    children = inside.values() if isinstance(inside, dict) else inside
    if not isinstance(inside, dict | list):
        return [node]
    return [node, *(below for child in children for below in nodes(child))]


@given(MAPPINGS, MAPPINGS)
def test_the_input_is_left_alone_and_each_leaf_keeps_its_origin(a: Any, b: Any) -> None:
    base, over = from_plain(a, "base"), from_plain(b, "over")
    result = merge(base, over)
    assert (plain(base), plain(over)) == (a, b)
    for steps, leaf in leaves(result):
        written = find(over, steps)
        if written is not None and not isinstance(written.value, dict):
            assert leaf.origin == "over"
        else:
            assert leaf.origin == ("base" if written is None else "over")


@given(MAPPINGS, st.lists(KEYS | st.integers(0, 2).map(str), min_size=1, max_size=4), SCALARS)
def test_what_is_put_is_found_and_nothing_else_changes(tree: Any, path: Any, value: Any) -> None:
    before = from_plain(tree, "before")
    try:
        after = put(before, path, Node(value, "after"))
    except ValueError:
        return  # a gap in a list, or a name where an index belongs
    assert plain(before) == tree
    found = find(after, path)
    assert found == Node(value, "after")
    for steps, leaf in leaves(before):
        step_texts = [str(step) for step in steps]
        beside = step_texts[: len(path)] != path and path[: len(steps)] != step_texts
        if beside:
            assert find(after, steps) == leaf


@given(st.lists(KEYS | st.integers(0, 99), min_size=1, max_size=5))
def test_a_path_survives_its_text(path: list[str | int]) -> None:
    if isinstance(path[0], int):
        path = ["top", *path]
    assert path_steps(path_text(path)) == [str(step) for step in path]


@given(MAPPINGS, st.lists(KEYS | st.integers(0, 2).map(str), min_size=1, max_size=4), SCALARS)
def test_what_was_not_written_has_the_origin_of_what_is_around_it(
    tree: Any, path: Any, value: Any
) -> None:
    below = [*path, "deeper", "7"]
    try:
        after = put(from_plain(tree, DEFAULT), path, Node(value, "file:3"))
    except ValueError:
        return
    assert origin_of(after, path) == origin_of(after, below) == "file:3"
    assert origin_of(from_plain(tree, DEFAULT), below) is None
    if tree:
        name = next(iter(tree))
        written = from_plain(tree, "file:1")
        assert origin_of(written, [name]) == origin_of(written, [name, "zz", "9"]) == "file:1"
    assert origin_of(from_plain(tree, "file:1"), ["none such"]) is None


def leaves(node: Node, steps: tuple[str | int, ...] = ()) -> list[tuple[Any, Node]]:
    children: list[tuple[str | int, Node]] = []
    if isinstance(node.value, dict):
        children = list(node.value.items())
    elif isinstance(node.value, list):
        children = list(enumerate(node.value))
    if not children:
        return [(steps, node)]
    return [leaf for key, child in children for leaf in leaves(child, (*steps, key))]
