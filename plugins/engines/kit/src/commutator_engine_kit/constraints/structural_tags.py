"""Structural tags: text that is free until a trigger, after which JSON of a schema follows."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from attrs import evolve, frozen

from commutator.contract.request import Constraint

_MOST = 512
"""Tags in one grammar."""

Enforced = Callable[[Any], tuple[dict[str, Any], dict[str, Any]]]
"""A schema as it can be enforced, and options of how it is written."""


@frozen
class _Tag:
    begin: str
    schema: Any
    end: str


def lark_of_tags(given: Any, specials: Mapping[str, int], enforced: Enforced) -> str:
    """A grammar in llguidance's notation. Raises ValueError for what is no structural tag.

    ``given`` is vLLM's and SGLang's form, {"structures": [{begin, schema, end}], "triggers":
    [...]}, or xgrammar's, {"format": {"type": "triggered_tags", ...}}, also "or" of one "tag" and
    "json_schema" or more, of which the answer is one. ``specials`` are the ids of the special
    tokens, by their texts: where a trigger is one, only the token counts.
    """
    if (alternatives := _alternatives(given)) is not None:
        writer = _Writer(specials, ())
        bodies = (writer.body(tag, tag.begin, enforced) for tag in alternatives)
        return f"start: {' | '.join(bodies)}"
    tags, triggers, required, only_one = _read(given)
    writer = _Writer(specials, triggers)
    owners = [_trigger_of(one, triggers) for one in tags]
    groups = []
    for trigger in triggers:
        own = [tag for tag, owner in zip(tags, owners, strict=True) if owner == trigger]
        if own:
            groups.append(writer.group(trigger, own, enforced))
    some = f"({' | '.join(groups)})"
    if only_one:  # and nothing after it
        start = some if required else f"{some} | free"
    else:
        start = f"{some}{'+' if required else '*'} free"
    return "\n".join([f"start: {start}", *writer.lines])


ADDED_TOKENS = "added_tokens"
"""The key beside the tags under which front doors give the ids of the model's added tokens."""


def added_tokens(given: Any) -> dict[str, int]:
    """The ids of the model's added tokens, by their texts, where they are told."""
    found = given.get(ADDED_TOKENS) if isinstance(given, dict) else None
    return found if isinstance(found, dict) else {}


def without_added_tokens(constraint: Constraint) -> Constraint:
    """A structural tag as the client wrote it."""
    given = json.loads(str(constraint.value)) if constraint.kind == "structural_tag" else None
    if not isinstance(given, dict) or ADDED_TOKENS not in given:
        return constraint
    own = {key: value for key, value in given.items() if key != ADDED_TOKENS}
    return evolve(constraint, value=json.dumps(own))


def _read(given: Any) -> tuple[list[_Tag], list[str], bool, bool]:
    """(tags, triggers, whether one has to come, whether the answer ends with the first)."""
    problem = ValueError('expected {"structures": [{begin, schema, end}], "triggers": [...]}')
    if not isinstance(given, dict):
        raise problem
    shape, read = given.get("format"), _of_structure
    tags, required, only_one = given.get("structures"), False, False
    if isinstance(shape, dict):
        if shape.get("type") != "triggered_tags":
            raise ValueError(f"format: {shape.get('type')} is not known here, only triggered_tags")
        given, tags, read = shape, shape.get("tags"), _of_content
        required, only_one = bool(shape.get("at_least_one")), bool(shape.get("stop_after_first"))
    triggers = given.get("triggers")
    if not isinstance(tags, list) or not tags or not isinstance(triggers, list):
        raise problem
    if not all(map(_is_text, triggers)):
        raise problem
    if len(tags) > _MOST:
        raise ValueError(f"expected at most {_MOST} tags, got {len(tags)}")
    return [read(one) for one in tags], [*dict.fromkeys(triggers)], required, only_one


def _alternatives(given: Any) -> list[_Tag] | None:
    """Of which the whole answer is one; JSON by itself is a tag without marks. None: no such."""
    shape = given.get("format") if isinstance(given, dict) else None
    if not isinstance(shape, dict) or shape.get("type") != "or":
        return None
    elements = shape.get("elements")
    if not isinstance(elements, list) or not elements or len(elements) > _MOST:
        raise ValueError(f"or: expected elements, 1 to {_MOST}")
    return [_alternative(one) for one in elements]


def _alternative(one: Any) -> _Tag:
    match one:
        case {"type": "json_schema"}:
            return _Tag("", one.get("json_schema", {}), "")
        case {"type": "tag"}:
            return _of_content(one)
    raise ValueError("or: expected elements of the types json_schema and tag")


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


def _of_structure(one: Any) -> _Tag:
    if not isinstance(one, dict) or not _is_text(one.get("begin")):
        raise ValueError("structures: expected objects with begin, schema and end")
    return _tag(one, one.get("schema", {}))


def _of_content(one: Any) -> _Tag:
    content = one.get("content") if isinstance(one, dict) else None
    if not isinstance(content, dict) or not _is_text(one.get("begin")):
        raise ValueError("tags: expected objects with begin, content and end")
    if content.get("type") != "json_schema":
        raise ValueError(f"content: {content.get('type')} is not known here, only json_schema")
    return _tag(one, content.get("json_schema", {}))


def _tag(one: Mapping[str, Any], schema: Any) -> _Tag:
    end = one.get("end", "")
    if not isinstance(end, str):
        raise ValueError("end: expected a text")  # noqa: TRY004 - as for every other mistake
    return _Tag(one["begin"], schema, end)


def _trigger_of(tag: _Tag, triggers: Sequence[str]) -> str:
    for one in triggers:
        if tag.begin.startswith(one):
            return one
    raise ValueError(f"no trigger begins {tag.begin!r}")


class _Writer:
    """The rules of one grammar."""

    def __init__(self, specials: Mapping[str, int], triggers: Sequence[str]) -> None:
        self._specials = specials
        firsts = [self._pieces(one)[0] for one in triggers]
        self._texts = [one for one in firsts if one not in specials]
        """The triggers that are text."""
        others = sorted({*specials.values()} - {specials[one] for one in firsts if one in specials})
        between = f"(TEXT? {_tokens(others)})*" if others else ""
        self.lines = [
            f"free: {between} TEXT?",
            f"before: {between}" if others else "",
            f"TEXT: {_text_without(self._texts)}",
        ]
        self._before = "before " if others else ""

    def group(self, trigger: str, tags: Sequence[_Tag], enforced: Enforced) -> str:
        """The name of a rule: free text, the trigger, and what follows it."""
        bodies = [self.body(tag, tag.begin[len(trigger) :], enforced) for tag in tags]
        name = f"tag{len(self.lines)}"
        first, *rest = self._pieces(trigger)
        if first in self._specials:
            opened = f"free {self._literal(trigger)}"
        else:
            others = [one for one in self._texts if one not in first and first not in one]
            self.lines += [
                f"{name.upper()}: {_text_without(others, '*')}",
                f"{name}_opened[suffix={json.dumps(first)}]: {name.upper()}",
            ]
            opened = f"{self._before}{name}_opened {self._literal(''.join(rest))}"
        self.lines.append(f"{name}: {opened} ({' | '.join(bodies)})")
        return name

    def body(self, tag: _Tag, begin: str, enforced: Enforced) -> str:
        """A tag from ``begin`` on, with which it begins, or with what is left of that."""
        schema, options = enforced(tag.schema)
        value = f"%json {json.dumps({**schema, 'x-guidance': options})}"
        return " ".join(filter(None, (self._literal(begin), value, self._literal(tag.end))))

    def _literal(self, text: str) -> str:
        return " ".join(
            _tokens([self._specials[one]]) if one in self._specials else json.dumps(one)
            for one in self._pieces(text)
        )

    def _pieces(self, text: str) -> list[str]:
        known = [one for one in sorted(self._specials, key=len, reverse=True) if one in text]
        found = re.split(f"({'|'.join(map(re.escape, known))})", text) if known else [text]
        return [one for one in found if one]


def _tokens(ids: Sequence[int]) -> str:
    """Any one of ``ids``, which are in order."""
    ranges: list[list[int]] = []
    for one in ids:
        if ranges and ranges[-1][1] == one - 1:
            ranges[-1][1] = one
        else:
            ranges.append([one, one])
    return f"<[{','.join(str(a) if a == b else f'{a}-{b}' for a, b in ranges)}]>"


def _text_without(excluded: Sequence[str], length: str = "+") -> str:
    if not excluded:
        return f"/(?s:.{length})/"
    some = "|".join("".join(map(escaped, one)) for one in excluded)
    return f"/(?s:.{length})/ & ~/(?s:.*({some}).*)/"


def escaped(character: str) -> str:
    """One character for itself in a regular expression of llguidance."""
    if character.isascii() and character.isalnum():
        return character
    code = ord(character)
    return f"\\u{code:04x}" if code < 1 << 16 else f"\\U{code:08x}"
