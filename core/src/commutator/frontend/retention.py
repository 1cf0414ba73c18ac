"""What clients may ask about how long a prompt's KV blocks are kept, and what it means."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import cattrs
from attrs import frozen

from commutator.frontend.fields import OneOf, Special
from commutator.schema import Bounds, Mismatch, setting
from commutator.types import KvRetention

__all__ = ["CacheControl", "retention_of"]

_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_LONGEST_S = 30 * 86_400
_TEXT = rf"([1-9][0-9]{{0,6}})([{''.join(_UNITS_S)}])"
_EPHEMERAL_PRIORITY = 1


@frozen(eq=False)
class Lifetime(Special):
    """A time such as "5m", as seconds."""

    def hook(self, inner: Any, converter: cattrs.Converter) -> Callable[[Any], float]:
        return self._parse

    def schema(self, inner: Any) -> dict[str, Any]:
        return {"type": "string", "pattern": f"^{_TEXT}$"}

    def _parse(self, value: Any) -> float:
        match = re.fullmatch(_TEXT, value) if isinstance(value, str) else None
        seconds = int(match[1]) * _UNITS_S[match[2]] if match is not None else 0
        if not 0 < seconds <= _LONGEST_S:
            raise Mismatch('a time of at most 30 days, such as "30s", "5m", "1h" or "7d"', value)
        return float(seconds)


@frozen(kw_only=True)
class CacheControl:
    """How long the KV blocks of a prompt, or of its beginning, are worth keeping in `tiers`."""

    type: Annotated[str, OneOf(("ephemeral", "persistent"), {})] = setting(
        "ephemeral: evicted after blocks for which nothing was asked. persistent: not evicted to "
        "make room, as long as such blocks fill at most half of a tier."
    )
    ttl: Annotated[float, Lifetime()] = setting(
        'So long after the last use; then they are the first to go. "5m" by default.', 300.0
    )
    priority: Annotated[int, Bounds(minimum=-10, maximum=10)] | None = setting(
        "Blocks of a lower priority are evicted first; 1 by default, 0 without cache_control.", None
    )


def retention_of(
    marks: Sequence[tuple[CacheControl | None, int | None]],
) -> tuple[KvRetention, ...]:
    """For each mark and the number of tokens that it is about; None: the whole prompt."""
    return tuple(
        KvRetention(
            priority=_EPHEMERAL_PRIORITY if mark.priority is None else mark.priority,
            ttl_s=mark.ttl,
            pinned=mark.type == "persistent",
            tokens=tokens,
        )
        for mark, tokens in marks
        if mark is not None
    )
