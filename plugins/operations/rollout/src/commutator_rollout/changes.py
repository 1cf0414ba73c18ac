"""The differences between two configurations, and when each takes effect."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import attrs
from attrs import frozen

from commutator.config.model import Config
from commutator.config.secrets import variables_of_frontends
from commutator.config.show import shown
from commutator.contract.settings import TakesEffect


@frozen(kw_only=True)
class Change:
    """One option that differs."""

    path: str
    """Entries that have names stand by them: engines[sim].block_size."""
    before: Any
    """As plain data with secrets hidden; None: there was nothing."""
    after: Any
    takes_effect: TakesEffect


def changes(before: Config, after: Config) -> list[Change]:
    """Every option that differs, in the order of the classes."""
    return list(_differences(before, after, "", "never"))


def doors_are_replaced(before: Config, after: Config) -> bool:
    """Whether front doors of ``before`` cannot serve by ``after`` as they run."""
    # A running process gets no new variables, and a door asks for keys from its beginning or never.
    lacks = variables_of_frontends(after) - variables_of_frontends(before)
    asks = bool(before.auth) != bool(after.auth)
    return bool(lacks) or asks or any(one.takes_effect == "doors" for one in changes(before, after))


def option_effects(cls: type[Any], takes_effect: TakesEffect) -> dict[str, TakesEffect]:
    """When each option of a class takes effect that is used where ``takes_effect`` holds."""
    fields = attrs.fields(cls)
    return {one.name: one.metadata.get("takes_effect") or takes_effect for one in fields}


def _differences(before: Any, after: Any, path: str, takes_effect: TakesEffect) -> Iterator[Change]:
    if before == after:
        return
    if attrs.has(type(before)) and type(before) is type(after):
        for name, effect in option_effects(type(before), takes_effect).items():
            inner = f"{path}.{name}" if path else name
            yield from _differences(getattr(before, name), getattr(after, name), inner, effect)
        return
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        for name in [*before, *(name for name in after if name not in before)]:
            inner = f"{path}.{name}"
            yield from _differences(before.get(name), after.get(name), inner, takes_effect)
        return
    if isinstance(before, tuple) and isinstance(after, tuple):
        named = _by_name(before), _by_name(after)
        if named[0] is not None and named[1] is not None:
            yield from _entries(named[0], named[1], path, takes_effect)
            return
        if len(before) == len(after) and all(attrs.has(type(one)) for one in (*before, *after)):
            for index, pair in enumerate(zip(before, after, strict=True)):
                yield from _differences(*pair, f"{path}[{index}]", takes_effect)
            return
    yield Change(
        path=path,
        before=shown(before, hide=True),
        after=shown(after, hide=True),
        takes_effect=takes_effect,
    )


def _by_name(entries: tuple[Any, ...]) -> dict[str, Any] | None:
    """The entries by their names, if each has one of its own."""
    names = [getattr(one, "name", None) for one in entries if attrs.has(type(one))]
    if len(names) < len(entries) or not all(names) or len({*names}) < len(names):
        return None
    return dict(zip(map(str, names), entries, strict=True))


def _entries(
    before: Mapping[str, Any], after: Mapping[str, Any], path: str, takes_effect: TakesEffect
) -> Iterator[Change]:
    for name in [*before, *(name for name in after if name not in before)]:
        one, other, inner = before.get(name), after.get(name), f"{path}[{name}]"
        if one is not None and other is not None and type(one) is type(other):
            yield from _differences(one, other, inner, takes_effect)
        elif one is not None and other is not None:
            kinds = getattr(one, "kind", ""), getattr(other, "kind", "")
            yield Change(
                path=f"{inner}.kind", before=kinds[0], after=kinds[1], takes_effect="never"
            )
        else:
            yield Change(
                path=inner,
                before=None if one is None else shown(one, hide=True),
                after=None if other is None else shown(other, hide=True),
                takes_effect=takes_effect,
            )
