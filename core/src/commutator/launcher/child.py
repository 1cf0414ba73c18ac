"""Set-up of our child processes: log level and garbage collector."""

from __future__ import annotations

import gc

__all__ = [
    "LOG_LEVEL",
    "calm_garbage_collector",
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
