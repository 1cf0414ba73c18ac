"""Searches for better values of tunable options: replays what front doors have recorded."""

from __future__ import annotations

import asyncio
import heapq
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import msgspec
from attrs import evolve

from commutator.config.load import PREFIX
from commutator.config.model import Config
from commutator.config.show import effective
from commutator.config.tunable import tunable_options, with_values
from commutator.contract.launcher import Launcher, LaunchPlan
from commutator.contract.planner import TuningConfig
from commutator.contract.worker import Role
from commutator.planner.tuning import Finding, Tried

__all__ = ["PolicySearch", "recorded_since", "tuning_problems"]

_GRACE_S = 1.0
_LOWEST_PRIORITY = "19"


def tuning_problems(config: Config) -> Iterator[str]:
    """Why options cannot be tuned here, as "OPTION: what is wrong, and what to do"."""
    if config.planner is None or config.planner.tuning.mode == "off":
        return
    if _trace_of(config) is None:
        yield (
            "planner.tuning: needs the observer `recording`, such as observers: [{kind: recording, "
            "prompts: true, path: /var/log/commutator/trace.jsonl}]: values are tried in replays "
            "of what it records"
        )
    if not entry_points(group="commutator.commands", name="replay"):
        yield (
            "planner.tuning: needs commutator-replay, which is not installed; install it, as by "
            "`pip install commutator-replay`, or remove the option"
        )
    if not tunable_options(config):
        yield (
            "planner.tuning: nothing to tune, as the policies of `router` and `disaggregation` "
            "declare no option as tunable; remove it"
        )


class PolicySearch:
    """Runs `commutator replay --tune` in a process of the lowest priority."""

    def __init__(self, config: Config, launcher: Launcher, folder: Path) -> None:
        """``folder``: for the trace, the configuration and the result."""
        self._config = config
        self._launcher = launcher
        self._folder = folder

    async def search(
        self, tuning: TuningConfig, values: Mapping[str, float], fleet: Mapping[Role, int]
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
        tuning: TuningConfig,
        values: Mapping[str, float],
        fleet: Mapping[Role, int],
        trace: Path,
        file: Path,
    ) -> int:
        """Write the trace and the configuration to replay; returns the number of requests."""
        path, since_s = _trace_of(self._config), time.time() - tuning.window_s
        assert path is not None
        latest = heapq.nlargest(tuning.max_requests, recorded_since(path, since_s))
        trace.write_bytes(b"".join(line for _, line in sorted(latest)))
        file.write_text(json.dumps(_with_fleet(with_values(self._config, values), fleet)))
        return len(latest)


def _trace_of(config: Config) -> Path | None:
    """The file of the observer `recording`; None without one."""
    paths = (getattr(one, "path", None) for one in config.observers if one.kind == "recording")
    path = next(paths, None)
    return None if path is None else Path(path).expanduser()


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
