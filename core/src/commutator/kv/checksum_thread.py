"""Checksums of many blocks beside the moves of others: two threads do it in the time of the longer.

Both NIXL and the checksum let go of the interpreter while they work.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache

from commutator.kv.arena import bytes_at
from commutator.kv.checksum import checksum
from commutator.transfer.spans import Span

__all__ = ["checksums_of"]

_WORTH_BYTES = 512 << 10
"""Less is summed sooner (in 30 us) than another thread wakes up."""


def checksums_of(spans: Sequence[Span]) -> Callable[[], list[int]]:
    """Begin to add up these; the result waits for the end. Nobody changes the bytes meanwhile."""
    if not _another_cpu() or sum(span.size_bytes for span in spans) < _WORTH_BYTES:
        sums = _sums(spans)
        return lambda: sums
    return _threads().submit(_sums, spans).result


def _sums(spans: Sequence[Span]) -> list[int]:
    return [checksum(bytes_at(span)) for span in spans]


@cache
def _another_cpu() -> bool:
    return len(os.sched_getaffinity(0)) > 1


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(2, thread_name_prefix="kv-checksum")
