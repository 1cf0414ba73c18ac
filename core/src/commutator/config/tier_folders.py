"""No two tiers of a worker may keep their blocks in one folder, however it is spelled."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from commutator.schema.structure import show

__all__ = ["folder_problems"]

_WORKER = "{worker}"
_MOST_WORKERS = 256
"""Looked at on one machine."""


def folder_problems(tiers: Sequence[Any], engines: Sequence[Any]) -> Iterator[tuple[str, str]]:
    """(path, message) for each `path` that is a tier's of the same kind already, on any worker.

    A path without ``{worker}`` is every worker's.
    """
    workers = [_WORKER, *islice(_worker_ids(engines), _MOST_WORKERS)]
    owners: dict[tuple[str, str, str], int] = {}
    for number, kind, path in _folders(tiers):
        mine = [
            (kind, worker, os.path.realpath(path.replace(_WORKER, worker))) for worker in workers
        ]
        taken = next((place for place in mine if place in owners), None)
        if taken is not None:
            whose = f"the folder of tiers[{owners[taken]}]"
            when = "already" if taken[1] == _WORKER else f"on worker {taken[1]} already"
            yield f"tiers[{number}].path", f"{show(path)} is {whose} {when}; give it another"
        for place in mine:
            owners.setdefault(place, number)


def _folders(tiers: Sequence[Any]) -> Iterator[tuple[int, str, str]]:
    """(number, kind, path) of each tier that names a folder; what is none is told of elsewhere."""
    for number, tier in enumerate(tiers):
        if not isinstance(tier, Mapping):
            continue
        kind, path = tier.get("kind"), tier.get("path")
        if isinstance(kind, str) and isinstance(path, str) and path.strip() and "\0" not in path:
            yield number, kind, path


def _worker_ids(engines: Sequence[Any]) -> Iterator[str]:
    """As the supervisor names them."""
    for engine in engines:
        if isinstance(engine, Mapping):
            replicas = engine.get("replicas", 1)
            for replica in range(replicas if isinstance(replicas, int) else 1):
                yield f"{engine.get('name')}-{replica}"
