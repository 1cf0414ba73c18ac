"""Counts the calls that a piece of work makes: a measure of it that no machine changes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

__all__ = ["calls_of"]


def calls_of(work: Callable[[], object]) -> int:
    """How many functions, in Python and in C, ``work`` calls in this thread.

    Tests bound this instead of time: a slow or busy machine makes no difference. What one call in
    C does by itself is not seen.
    """
    calls = 0

    def count(_frame: FrameType, event: str, _arg: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(before)
    return calls
