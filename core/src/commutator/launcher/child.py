"""Set-up of our processes: log level, memory, open files; why one could not start."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import json
import logging
import os
import re
import resource
import signal
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

from attrs import asdict, frozen

__all__ = [
    "GROUP",
    "LOG_LEVEL",
    "StartFailure",
    "calm_garbage_collector",
    "log_to_stderr",
    "raise_descriptor_limit",
    "report_start_failure",
    "run_with_fast_loop",
    "take_start_failure",
    "told_to_stop",
    "use_huge_pages",
]

T = TypeVar("T")

LOG_LEVEL = "COMMUTATOR_LOG_LEVEL"
"""The environment variable by which the supervisor passes `log.level`."""

GROUP = "group.json"
"""A file in the folder of an agent that runs one rank of several: the fields of a ``NodeGroup``."""

_NEW_OBJECTS = 10_000
"""New objects until the next garbage collection."""
_YOUNG_COLLECTIONS, _OLDER_COLLECTIONS = 5, 40
"""How many collections of one generation until the next older one is collected, too. With few of
the first, none of the second looks at so many objects that it takes 50 ms."""


_START_FAILURE = "start-failure.json"
"""A file in the process's own folder."""


@frozen(kw_only=True)
class StartFailure:
    """Why a process could not start."""

    problems: Sequence[str]
    """Each in one line."""
    is_permanent: bool
    """No further try with the same configuration can succeed."""


def report_start_failure(folder: Path, failure: StartFailure) -> None:
    """Leave ``failure`` for the supervisor in the process's folder. Raises OSError."""
    (folder / _START_FAILURE).write_text(json.dumps(asdict(failure)), encoding="utf-8")


def take_start_failure(folder: Path) -> StartFailure | None:
    """What a process that has ended left in its folder, once; None if it left nothing."""
    file = folder / _START_FAILURE
    try:
        failure = StartFailure(**json.loads(file.read_text(encoding="utf-8")))
        file.unlink()
    except (OSError, ValueError, TypeError):  # nothing there, or not written to the end
        return None
    return failure


def log_to_stderr() -> None:
    """Log at the level that the supervisor passed."""
    level = os.environ.get(LOG_LEVEL, "INFO")
    logging.basicConfig(level=level, format="%(levelname)s %(name)s: %(message)s")


def told_to_stop() -> asyncio.Event:
    """An event that SIGTERM or SIGINT sets. Called in the event loop."""
    told = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, told.set)
    return told


def run_with_fast_loop(main: Coroutine[Any, Any, T]) -> T:
    """``asyncio.run``, on uvloop where it is installed."""
    factory = None
    if find_spec("uvloop") is not None:
        import uvloop

        factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(main)


def calm_garbage_collector() -> None:
    """Exclude objects that live as long as the process, such as vocabularies; collect less often.

    A request makes hundreds of objects; reference counting frees nearly all of them.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_NEW_OBJECTS, _YOUNG_COLLECTIONS, _OLDER_COLLECTIONS)


_HUGE_PAGE_BYTES = 2 << 20
_MADV_COLLAPSE = 25
_MEMORY_MAPS = Path("/proc/self/maps")
_HEAP = re.compile(r"([0-9a-f]+)-([0-9a-f]+) rw-p [0-9a-f]+ \S+ 0 *(\[heap\])?")
"""A line about private memory that is not of a file."""


def use_huge_pages() -> int:
    """Move the heap, as it is now, to pages of 2 MiB; returns the bytes that were moved.

    A request needs objects from all over some tens of MiB, and with pages of 4 KiB a tenth of its
    time goes to finding where they are. Call it once all lasting objects exist. Memory between
    them comes into use, so a process that reserves much more than it uses must not call it.

    Linux 6.1 and later move the pages even where processes have to ask for huge ones; elsewhere,
    and where there is too little memory, nothing happens.
    """
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return sum(
        _HUGE_PAGE_BYTES
        for address in _whole_huge_pages()
        if madvise(address, _HUGE_PAGE_BYTES, _MADV_COLLAPSE) == 0
    )


def _whole_huge_pages() -> Iterator[int]:
    """The address of each piece of the heap that a huge page could hold."""
    try:
        lines = _MEMORY_MAPS.read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        return
    for line in lines:
        if (found := _HEAP.fullmatch(line)) is not None:
            first = -(-int(found[1], 16) // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES
            last = int(found[2], 16) - _HUGE_PAGE_BYTES
            yield from range(first, last + 1, _HUGE_PAGE_BYTES)


def raise_descriptor_limit() -> None:
    """Let this process, and those that it starts, open as many files as the system allows.

    Shells and services usually start with 1,024, which a few hundred clients use up.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):  # some systems allow less than they say
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
