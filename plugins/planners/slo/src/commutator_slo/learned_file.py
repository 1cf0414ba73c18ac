"""Keeps what was learned of workers' speed from one start to the next."""

from __future__ import annotations

import logging
import os
import platform
from collections.abc import Mapping
from pathlib import Path

import msgspec
from attrs import frozen

from commutator.contract.planner import SampleSums
from commutator.contract.worker import Role

__all__ = ["LearnedFile", "machine"]

log = logging.getLogger(__name__)


@frozen(kw_only=True)
class _Kept:
    key: str
    """Of model, engine and machine."""
    buckets: Mapping[int, SampleSums]


class LearnedFile:
    """The file named by `planner.learned_file`.

    It is JSON: for each role the samples, and a key of what they were measured at. Samples of
    another model, engine or machine are not read.
    """

    def __init__(self, path: Path, keys: Mapping[Role, str]) -> None:
        self._path = path
        self._keys = keys

    def read(self) -> Mapping[Role, Mapping[int, SampleSums]]:
        """What was kept; nothing where the file is not there or cannot be read."""
        try:
            kept = msgspec.json.decode(self._path.read_bytes(), type=dict[Role, _Kept])
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            log.warning("planner.learned_file: %s cannot be read: %s", self._path, error)
            return {}
        return {role: one.buckets for role, one in kept.items() if one.key == self._keys.get(role)}

    def write(self, learned: Mapping[Role, Mapping[int, SampleSums]]) -> None:
        """Keep it in the place of what was there; logs what goes wrong."""
        kept = {
            role.value: _Kept(key=self._keys[role], buckets=buckets)
            for role, buckets in learned.items()
        }
        draft = self._path.with_name(f"{self._path.name}.{os.getpid()}")
        try:
            draft.write_bytes(msgspec.json.encode(kept))
            draft.replace(self._path)
        except OSError as error:
            log.warning("planner.learned_file: %s cannot be written: %s", self._path, error)


def machine() -> str:
    """This machine's kind: its processors and their number."""
    models: set[str] = set()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = cpuinfo.read_text().splitlines()
        models = {line.partition(":")[2].strip() for line in lines if line.startswith("model name")}
    return f"{platform.machine()} {os.cpu_count()} {sorted(models)}"
