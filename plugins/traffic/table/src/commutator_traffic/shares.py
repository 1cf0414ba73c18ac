"""Which version serves a session, by weights: a pure function that needs no memory."""

from __future__ import annotations

import math
from collections.abc import Mapping
from hashlib import blake2b

_BITS = 53
"""As many as a float has."""


def choose(weights: Mapping[str, float], key: str) -> str | None:
    """The version that ``key`` gets; None: none has a weight above 0.

    Each version waits for a time that follows from its name and ``key`` alone, exponential with its
    weight as rate, and the first one is chosen. So over all keys each gets its share of the
    weights; front doors agree without asking each other; and when weights change, a key moves from
    A to B only if the weight of B in proportion to that of A has grown. Where one weight changes,
    that is the least that has to move. With several it is at most 2d / (1 + d) of the keys, d being
    the part that would have to: the best that a function without memory can do.
    """
    best, earliest = None, math.inf
    for name, weight in weights.items():
        if weight <= 0:
            continue
        at = -math.log(_uniform(name, key)) / weight
        if best is None or (at, name) < (earliest, best):
            best, earliest = name, at
    return best


def _uniform(name: str, key: str) -> float:
    """A number above 0 and at most 1."""
    data = f"{len(name)}:{name}{key}".encode(errors="surrogatepass")
    number = int.from_bytes(blake2b(data, digest_size=8).digest()) >> (64 - _BITS)
    return (number + 1) / (1 << _BITS)
