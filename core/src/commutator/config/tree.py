"""Configuration values with their origins. Every operation returns a new tree."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from attrs import frozen

DEFAULT = "default"
_PATH = re.compile(r"[^.\[\]]+(?:\[\d+\]|\.[^.\[\]]+)*")
_STEP = re.compile(r"[^.\[\]]+")


@frozen
class Node:
    """One value: a mapping of nodes, a list of nodes, or a scalar."""

    value: Any
    origin: str
    """Where it was set: "FILE:line", "env NAME", "--set ...", "default"."""
    resets: bool = False
    """Written as ``!reset VALUE``: earlier sources' value is forgotten, not merged."""

    @property
    def removes(self) -> bool:
        """Written as ``!reset`` alone: what earlier sources set is removed."""
        return self.resets and self.value is None


def from_plain(value: Any, origin: str) -> Node:
    """Plain data as a tree whose nodes all have ``origin``."""
    if isinstance(value, Mapping):
        return Node({key: from_plain(item, origin) for key, item in value.items()}, origin)
    if isinstance(value, list | tuple):
        return Node([from_plain(item, origin) for item in value], origin)
    return Node(value, origin)


def plain(node: Node) -> Any:
    """The values without their origins."""
    if isinstance(node.value, dict):
        return {key: plain(item) for key, item in node.value.items()}
    return [plain(item) for item in node.value] if isinstance(node.value, list) else node.value


def merge(base: Node, over: Node) -> Node:
    """``base`` overridden by ``over``: mappings merge; lists and scalars are replaced.

    Resets in ``over`` are carried out; the result has none.
    """
    if over.resets or not (isinstance(base.value, dict) and isinstance(over.value, dict)):
        return _settled(over)
    merged = dict(base.value)
    for key, item in over.value.items():
        if item.removes:
            merged.pop(key, None)
        else:
            merged[key] = merge(merged[key], item) if key in merged else _settled(item)
    return Node(merged, over.origin)


def _settled(node: Node) -> Node:
    """``node`` where there was nothing before: its resets have nothing to forget."""
    if isinstance(node.value, dict):
        items = {key: _settled(item) for key, item in node.value.items() if not item.removes}
        return Node(items, node.origin)
    if isinstance(node.value, list):
        return Node([_settled(item) for item in node.value], node.origin)
    return Node(node.value, node.origin) if node.resets else node


def idle_resets(
    base: Node | None, over: Node, steps: tuple[str | int, ...] = ()
) -> Iterator[tuple[tuple[str | int, ...], Node]]:
    """Path and node of each ``!reset`` in ``over`` that removes nothing from ``base``."""
    if over.removes and base is None:
        yield steps, over
    below = base.value if base is not None and not over.resets else None
    if isinstance(over.value, dict):
        for key, item in over.value.items():
            old = below.get(key) if isinstance(below, dict) else None
            yield from idle_resets(old, item, (*steps, key))
    elif isinstance(over.value, list):
        for index, item in enumerate(over.value):
            yield from idle_resets(None, item, (*steps, index))


def put(base: Node | None, steps: Sequence[str], new: Node) -> Node:
    """``base`` with ``new`` merged in at ``steps``; numbers are indices into lists.

    Missing mappings and lists are created. A ``new`` that removes takes away the key of a mapping.
    Raises ValueError when a step does not fit a list, or an entry of a list were removed.
    """
    if not steps:
        return _settled(new) if base is None else merge(base, new)
    step, rest = steps[0], steps[1:]
    inside = None if base is None else base.value
    origin = new.origin if base is None else base.origin
    if isinstance(inside, list) or (step.isdecimal() and not isinstance(inside, dict)):
        if new.removes and not rest:
            raise ValueError("an entry of a list cannot be reset; set the whole list")
        items = list(inside) if isinstance(inside, list) else []
        index = _index(step, len(items))
        old = items[index] if index < len(items) else None
        items[index : index + 1] = [put(old, rest, new)]
        return Node(items, origin)
    entries = inside if isinstance(inside, dict) else {}
    if new.removes and not rest:
        return Node({key: item for key, item in entries.items() if key != step}, origin)
    return Node(entries | {step: put(entries.get(step), rest, new)}, origin)


def _index(step: str, length: int) -> int:
    """The next free index is allowed: it appends."""
    if not step.isdecimal():
        raise ValueError(f'a list takes an index, not "{step}"')
    if int(step) > length:
        raise ValueError(f"index {int(step)} leaves a gap: the list's next index is {length}")
    return int(step)


def find(node: Node, steps: Iterable[str | int]) -> Node | None:
    """The node at ``steps``, or None."""
    for step in steps:
        if isinstance(node.value, dict) and step in node.value:
            node = node.value[step]
        elif isinstance(node.value, list) and str(step).isdecimal():
            if int(step) >= len(node.value):
                return None
            node = node.value[int(step)]
        else:
            return None
    return node


def origin_of(node: Node, steps: Sequence[str | int]) -> str | None:
    """Where the value at ``steps`` was set, or else the innermost value around it that was.

    None when only the whole file remains.
    """
    for length in range(len(steps), 0, -1):
        part = find(node, steps[:length])
        if part is not None and part.origin != DEFAULT:
            return part.origin
    return None


def path_steps(text: str) -> list[str]:
    """``engines[0].replicas`` or ``engines.0.replicas`` as steps. Raises ValueError."""
    if not _PATH.fullmatch(text):
        raise ValueError(f'"{text}" is not a path such as engines[0].replicas')
    return _STEP.findall(text)


def path_text(steps: Iterable[str | int]) -> str:
    """Steps in the spelling of error messages: ``engines[0].replicas``."""
    text = ""
    for step in steps:
        text += f"[{step}]" if isinstance(step, int) else f".{step}" if text else step
    return text
