"""Searches for better values of tunable options: replays what front doors have recorded."""

from __future__ import annotations

import asyncio
import heapq
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
from attrs import evolve

from commutator.config.load import PREFIX
from commutator.config.model import Config
from commutator.config.show import effective
from commutator.config.tunable import with_values
from commutator.contract.launcher import Launcher, LaunchPlan
from commutator.contract.worker import Role
from commutator_tuning.config import TrialsConfig, trace_of
from commutator_tuning.tuner import Finding, Tried

_GRACE_S = 1.0
_LOWEST_PRIORITY = "19"


class PolicySearch:
    """Runs `commutator replay --tune` in a process of the lowest priority."""

    def __init__(self, config: Config, launcher: Launcher, folder: Path) -> None:
        """``folder``: for the trace, the configuration and the result."""
        self._config = config
        self._launcher = launcher
        self._folder = folder

    async def search(
        self, tuning: TrialsConfig, values: Mapping[str, float], fleet: Mapping[Role, int]
    ) -> Finding:
        """What replays say, with the present values and workers; raises nothing of its own."""
        self._folder.mkdir(exist_ok=True)
        trace, file = self._folder / "trace.jsonl", self._folder / "config.json"
        result = self._folder / "result.json"
        requests = await asyncio.to_thread(self._prepare, tuning, values, fleet, trace, file)
        if requests < tuning.min_requests:
            text = f"{requests} requests were recorded in the last {tuning.window_s:.0f} s"
            return Finding(problem=f"{text}, fewer than the {tuning.min_requests} of min_requests")
        replay = (sys.executable, "-m", "commutator", "replay", str(trace), str(file))
        command = (*replay, "--tune", "--json")
        # Output of our processes goes to the log; this one's is the result.
        to_file = ("sh", "-c", 'out=$1; shift; exec "$@" > "$out"', "sh", str(result))
        # The configuration has the effective values; the environment must not change them again.
        unset = [part for name in os.environ if name.startswith(PREFIX) for part in ("-u", name)]
        argv = ("env", *unset, "nice", "-n", _LOWEST_PRIORITY, *to_file, *command)
        process = await self._launcher.start("tuning", LaunchPlan(argv=argv, address=""))
        try:
            async with asyncio.timeout(tuning.search_timeout_s):
                ended = await process.wait()
        except TimeoutError:
            ended = f"took longer than planner.tuning.search_timeout_s ({tuning.search_timeout_s:g}"
            return Finding(problem=f"the replay {ended} s)")
        finally:
            await process.stop(_GRACE_S)
        try:
            return msgspec.json.decode(result.read_bytes(), type=_Result).tuning.finding()
        except (OSError, msgspec.MsgspecError):
            return Finding(problem=f"the replay {ended}")

    def _prepare(
        self,
        tuning: TrialsConfig,
        values: Mapping[str, float],
        fleet: Mapping[Role, int],
        trace: Path,
        file: Path,
    ) -> int:
        """Write the trace and the configuration to replay; returns the number of requests."""
        path, since_s = trace_of(self._config), time.time() - tuning.window_s
        assert path is not None
        latest = heapq.nlargest(tuning.max_requests, recorded_since(path, since_s))
        trace.write_bytes(b"".join(line for _, line in sorted(latest)))
        file.write_text(json.dumps(_with_fleet(with_values(self._config, values), fleet)))
        return len(latest)


def recorded_since(path: Path, unix_s: float) -> Iterator[tuple[float, bytes]]:
    """The requests that front doors recorded at ``path`` since then: the time of each, its line."""
    decode = msgspec.json.Decoder(_Timestamp).decode
    for file in sorted(path.parent.glob(f"{path.stem}.*{path.suffix}*")):
        if file.stat().st_mtime < unix_s:
            continue
        with file.open("rb") as lines:
            for line in lines:
                try:
                    time_ms = decode(line).timestamp
                except msgspec.MsgspecError:  # a line that is being written
                    continue
                if time_ms >= unix_s * 1000:
                    yield time_ms, line


def _with_fleet(config: Config, fleet: Mapping[Role, int]) -> dict[str, Any]:
    """The effective values of ``config``, whose workers are as many as there are now."""
    engines = []
    for role, workers in fleet.items():
        entry = next(one for one in config.engines if one.role == role)
        engines.append(evolve(entry, replicas=workers))
    return effective(evolve(config, engines=tuple(engines)))


class _Timestamp(msgspec.Struct):
    timestamp: float


class _Tuning(msgspec.Struct):
    requests: int
    tried: list[Tried]

    def finding(self) -> Finding:
        return Finding(tried=self.tried, requests=self.requests)


class _Result(msgspec.Struct):
    tuning: _Tuning
