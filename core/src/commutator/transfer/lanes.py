"""How many agents move at a time, and which of them moves what. Pure but for counting CPUs.

Where a CPU copies, as UCX does within a machine, one thread does not use all of memory's bandwidth:
two copied 12 GB/s where one came to 8.
"""

from __future__ import annotations

import os

__all__ = ["lane_names", "lanes_worth", "shares", "tapering"]

_LANES = 2
_WORTH_BYTES = 2 << 20
"""Less is moved sooner than another thread wakes up."""
_MOST_BYTES = 8 << 20
"""More at a time gains nothing."""


def lane_names(agent_name: str) -> list[str]:
    """An agent for each lane, the first of this name; no more of them than there are CPUs."""
    names = [agent_name, *(f"{agent_name}-{lane}" for lane in range(1, _LANES))]
    return names[: len(os.sched_getaffinity(0))]


def lanes_worth(count: int, size_bytes: int, most: int) -> int:
    """In how many lanes ``count`` things of ``size_bytes`` in all are moved: one to ``most``."""
    return max(1, min(most, count, size_bytes // _WORTH_BYTES))


def shares(count: int, parts: int) -> list[range]:
    """``count`` things, neighbours together, in up to ``parts`` of one size but for the last.

    One share at least, if only an empty one.
    """
    each = max(1, -(-count // parts))
    return [range(first, min(first + each, count)) for first in range(0, max(count, 1), each)]


def tapering(count: int, size_bytes: int, lanes: int) -> list[range]:
    """Parts for lanes that take one after another: smaller towards the end.

    So no lane has much left to do when another finds nothing more. ``count`` things of
    ``size_bytes`` in all, neighbours together; one part at least, if only an empty one.
    """
    if lanes == 1 or not size_bytes:
        return [range(count)]
    least, most = (max(1, limit * count // size_bytes) for limit in (_WORTH_BYTES, _MOST_BYTES))
    parts: list[range] = []
    first = 0
    while first < count:
        # Two thirds of an even share of what is left.
        wanted = -(-2 * (count - first) // (3 * lanes))
        end = min(count, first + max(least, min(most, wanted)))
        parts.append(range(first, end))
        first = end
    return parts
