"""Set-up of our processes: log level, garbage collector, open files."""

from __future__ import annotations

import gc
import resource
from contextlib import suppress

__all__ = [
    "LOG_LEVEL",
    "calm_garbage_collector",
    "raise_descriptor_limit",
]

LOG_LEVEL = "COMMUTATOR_LOG_LEVEL"
"""The environment variable by which the supervisor passes `log.level`."""

_NEW_OBJECTS = 20_000
"""New objects until the next garbage collection."""


def calm_garbage_collector() -> None:
    """Exclude objects that live as long as the process, such as vocabularies; collect less often.

    A request makes hundreds of objects; reference counting frees nearly all of them.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_NEW_OBJECTS)


def raise_descriptor_limit() -> None:
    """Let this process, and those that it starts, open as many files as the system allows.

    Shells and services usually start with 1,024, which a few hundred clients use up.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):  # some systems allow less than they say
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
