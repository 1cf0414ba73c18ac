"""The options of tuning by trials."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated, Any

from attrs import frozen

from commutator import Bounds, PositiveInt, PositiveSeconds, setting
from commutator.config.tunable import tunable_options
from commutator.contract.planner import TuningConfig


@frozen(kw_only=True)
class TrialsConfig(TuningConfig):
    """Options of tuning by replays, and by trials on some of the requests.

    Needs the observer `recording`, and commutator-replay installed.
    """

    state_file: str | None = setting(
        "Where tuned values are kept, for the next start. Without it the values of the "
        "configuration come back with a restart.",
        None,
    )
    window_s: PositiveSeconds = setting(
        "Values are tried in replays of the requests of this many seconds.", 3600.0
    )
    max_requests: PositiveInt = setting(
        "Of these requests, at most this many, the latest: a search replays them some ten times "
        "for each tunable option.",
        5_000,
    )
    min_gain: Annotated[float, Bounds(minimum=0, maximum=1)] = setting(
        "A value is tried on requests if replayed ones are delayed less by more than this part.",
        0.05,
    )
    share: Annotated[float, Bounds(above=0, maximum=0.5)] = setting(
        "The part of the requests that a value is tried on.", 0.1
    )
    min_requests: PositiveInt = setting(
        "Both stages of a trial take at least this many requests with each of the two values.",
        200,
    )
    canary_s: PositiveSeconds = setting(
        "A value is tried on `share` of the requests for this many seconds. Then, twelve times for "
        "half as long, all requests have it or none. Half of it should be much longer than a "
        "request takes. What lacks requests for six times as long is given up.",
        300.0,
    )
    pause_s: PositiveSeconds = setting(
        "Seconds from the end of a trial, or of a search that found nothing, to the next search.",
        1800.0,
    )
    search_timeout_s: PositiveSeconds = setting(
        "A search that takes longer is ended without a result. It runs as a process of lowest "
        "priority.",
        600.0,
    )

    def problems(self, config: Any) -> Iterable[str]:
        if trace_of(config) is None:
            yield (
                ": needs the observer `recording`, such as observers: [{kind: recording, prompts: "
                "true, path: /var/log/commutator/trace.jsonl}]: values are tried in replays of "
                "what it records"
            )
        if not entry_points(group="commutator.commands", name="replay"):
            yield (
                ": needs commutator-replay, which is not installed; install it, as by "
                "`pip install commutator-replay`, or remove the option"
            )
        if not tunable_options(config):
            yield (
                ": nothing to tune, as the policies of `router` and `disaggregation` declare no "
                "option as tunable; remove it"
            )


def trace_of(config: Any) -> Path | None:
    """The file of the observer `recording`; None without one."""
    paths = (getattr(one, "path", None) for one in config.observers if one.kind == "recording")
    path = next(paths, None)
    return None if path is None else Path(path).expanduser()
