"""Set-up of our processes: log level, garbage collector, open files; why one could not start."""

from __future__ import annotations

import gc
import json
import resource
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from attrs import asdict, frozen

__all__ = [
    "LOG_LEVEL",
    "StartFailure",
    "calm_garbage_collector",
    "raise_descriptor_limit",
    "report_start_failure",
    "take_start_failure",
]

LOG_LEVEL = "COMMUTATOR_LOG_LEVEL"
"""The environment variable by which the supervisor passes `log.level`."""

_NEW_OBJECTS = 20_000
"""New objects until the next garbage collection."""


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
