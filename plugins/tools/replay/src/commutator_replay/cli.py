"""``commutator replay``: a trace through the routing code, over simulated workers."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import click
from attrs import asdict, frozen
from click.core import ParameterSource
from rich.console import Console
from rich.table import Table
from rich.text import Text

from commutator.cli.options import NumberRange
from commutator.config.load import Loaded, load_config
from commutator.config.tree import DEFAULT, find
from commutator.config.tunable import tunable_options
from commutator.contract.planner import PlannerTargets
from commutator.errors import CommutatorError, ConfigError
from commutator_replay.options import table, trace_options
from commutator_replay.planners import PlannedReplays, PlanReport
from commutator_replay.report import Report
from commutator_replay.setup import Replays
from commutator_replay.tables import Part, load_trace
from commutator_replay.trace import TraceRequest, at_rate, ideal_hit_ratio, with_chats
from commutator_replay.tuning import Comparison, compare_values

_PLOT_SUFFIXES = (".svg", ".png", ".pdf")
_POSITIVE = NumberRange(min=0, min_open=True)


class _Rates(click.ParamType[list[float]]):
    name = "rates"

    def convert(self, value: Any, param: Any, ctx: Any) -> list[float]:
        if isinstance(value, list):
            return value
        return [_POSITIVE.convert(one, param, ctx) for one in value.split(",")]


def _checked_plot(ctx: click.Context, param: click.Parameter, value: Path | None) -> Path | None:
    """Find now what would otherwise fail after the whole replay."""
    del ctx, param
    if value is None:
        return None
    if value.suffix not in _PLOT_SUFFIXES:
        expected = ", ".join(_PLOT_SUFFIXES)
        raise click.BadParameter(f"{value}: expected a name that ends in one of {expected}")
    if not os.access(value.parent, os.W_OK) or not value.parent.is_dir():
        raise click.BadParameter(f"{value}: {value.parent} is not a folder that can be written to")
    plots()
    return value


@frozen(kw_only=True)
class Asked:
    """What the command line asks for; each field is an option of `commutator replay`."""

    trace: Path
    file: Path
    sets: tuple[str, ...]
    policy: str | None
    compare: str | None
    disagg: str | None
    plan: bool
    compare_planners: str | None
    tune: bool
    workers: int | None
    requests: int | None
    thin: float
    begin: float
    """Seconds."""
    end: float | None
    """Seconds."""
    copies: int
    chats: float
    speed: float
    rates: list[float] | None
    """Requests a second."""
    seed: int
    target_ttft: float
    """Seconds."""
    target_itl: float
    """Seconds."""
    timing: bool
    as_json: bool
    plot: Path | None

    def mixed(self) -> list[TraceRequest]:
        """The chosen part of the trace, with the chats that were asked for."""
        part = Part(
            thin=self.thin,
            begin_s=self.begin,
            end_s=self.end,
            copies=self.copies,
            requests=self.requests,
        )
        traced = load_trace(self.trace, part, self.seed)
        return with_chats(traced, self.chats, self.seed) if self.chats else traced

    def policies(self, replays: Replays) -> list[str]:
        """The policies to be run; all are looked up before the first one runs."""
        if self.disagg is not None:
            return replays.disaggregations(self.disagg, "--disagg")
        if self.compare is not None:
            return replays.routers(self.compare, "--compare")
        if self.policy is not None:
            return replays.routers(self.policy, "--policy")
        return [replays.config.router.kind]


@click.command(
    epilog="Example: commutator replay trace.jsonl examples/replay.yaml --compare kv,round_robin"
)
@click.option("--policy", help="Routing policy instead of the file's, with its defaults.")
@click.option("--compare", help="Several policies, separated by commas; one row each.")
@click.option(
    "--disagg",
    help="Several disaggregation policies, separated by commas; `aggregated` means the same "
    "workers without roles.",
)
@click.option(
    "--plan", is_flag=True, help="Let the file's `planner` start and stop workers as it goes."
)
@click.option(
    "--compare-planners",
    help="Several planners, separated by commas, one row each: `ours` (the file's own), other "
    "installed kinds, `fixed:N`, `fixed` (the smallest constant fleet, in hindsight), and "
    "`clairvoyant` (a schedule made from the trace).",
)
@click.option(
    "--tune",
    is_flag=True,
    help="Try other values of each tunable option of the file, one at a time.",
)
@click.option("--workers", type=click.IntRange(1), help="Workers instead of the file's replicas.")
@click.option(
    "--begin",
    type=NumberRange(min=0),
    default=0.0,
    show_default=True,
    help="Leave out this many seconds of the trace.",
)
@click.option("--end", type=_POSITIVE, help="Leave out what comes after this many seconds.")
@click.option(
    "--copies",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Replay as many copies at once, each shifted in time, with prompts of its own.",
)
@click.option(
    "--chats",
    type=NumberRange(min=0),
    default=0.0,
    show_default=True,
    help="Add this many short chats for each request of the trace.",
)
@click.option(
    "--speed",
    type=_POSITIVE,
    default=1.0,
    show_default=True,
    help="Replay this many times as fast as recorded.",
)
@click.option(
    "--rates", type=_Rates(), help="Requests a second instead, several separated by commas."
)
@click.option(
    "--target-ttft",
    type=_POSITIVE,
    default=2.0,
    show_default=True,
    help="For goodput: seconds to the first token, at most.",
)
@click.option(
    "--target-itl",
    type=_POSITIVE,
    default=0.05,
    show_default=True,
    help="For goodput: seconds between tokens, at most, on average.",
)
@click.option(
    "--timing",
    is_flag=True,
    help="Print on standard error how long each run took, and the routing decisions in it.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
@click.option(
    "--plot",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    callback=_checked_plot,
    help="Write a picture: SVG, PNG or PDF, as FILE ends.",
)
@trace_options
@click.pass_context
def replay(ctx: click.Context, /, **options: Any) -> None:
    """Replay TRACE over FILE's workers, in virtual time, and show what clients would see."""
    _check_combined(ctx)
    asked = Asked(**options)
    loaded = load_config([asked.file], sets=asked.sets)
    replays = Replays(
        loaded,
        str(asked.file),
        str(asked.trace),
        PlannerTargets(ttft_s=asked.target_ttft, itl_s=asked.target_itl),
        workers=asked.workers,
        seed=asked.seed,
        on_run=partial(click.echo, err=True) if asked.timing else lambda _: None,
    )

    def read() -> list[TraceRequest]:
        mixed = asked.mixed()
        for warning in (*replay_warnings(loaded), *block_warnings(loaded, mixed)):
            click.secho(f"warning: {warning}", fg="yellow", err=True)
        return mixed

    if asked.plan or asked.compare_planners is not None:
        planned = PlannedReplays(replays)
        named = asked.compare_planners
        written = planned.config.kind if named is None else named
        planners = planned.names(written, "--compare-planners")
        mixed = read()
        plans = [planned.run(name, mixed) for name in planners]
        show_plans(plans, asked.plot, as_json=asked.as_json)
        return
    if asked.tune:
        targets = tuned_targets(replays)
        mixed = [one.sped_up(asked.speed) for one in read()]
        show_values(compare_values(replays, mixed, targets), as_json=asked.as_json)
        return
    names = asked.policies(replays)
    if loaded.config.planner is not None:
        click.secho(
            "warning: planner: without --plan the fleet stays as it is", fg="yellow", err=True
        )
    mixed = read()

    def run(requests: Sequence[TraceRequest]) -> list[Report]:
        one = replays.by_router if asked.disagg is None else replays.by_disaggregation
        return [one(name, requests) for name in names]

    if asked.rates:
        sweep = {rate: run(at_rate(mixed, rate)) for rate in asked.rates}
        show_sweep(sweep, asked.plot, as_json=asked.as_json)
    else:
        reports = run([one.sped_up(asked.speed) for one in mixed])
        show(reports, ideal_hit_ratio(mixed), asked.plot, as_json=asked.as_json)


def _check_combined(ctx: click.Context) -> None:
    """Raises UsageError for options that cannot be combined."""
    given = {
        name for name in ctx.params if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE
    }
    if len(given & {"policy", "compare", "disagg"}) > 1:
        raise click.UsageError("give one of --policy, --compare and --disagg")
    if {"rates", "speed"} <= given:
        raise click.UsageError("give --speed or --rates, not both")
    if {"plan", "compare_planners"} <= given:
        raise click.UsageError("give --plan or --compare-planners, not both")
    if given & {"plan", "compare_planners"}:
        _check_planned(given)
    elif "tune" in given and given & {"policy", "compare", "disagg", "rates", "plot"}:
        raise click.UsageError(
            "--tune compares values of options of the file's own policies: leave --policy, "
            "--compare, --disagg, --rates and --plot out"
        )


def _check_planned(given: set[str]) -> None:
    """Raises UsageError for options that are ``given`` and cannot be combined with a planner."""
    if given & {"policy", "compare", "disagg", "tune"}:
        raise click.UsageError(
            "a planner runs under the file's own policies: leave --policy, --compare, --disagg and "
            "--tune out"
        )
    if given & {"speed", "rates"}:
        raise click.UsageError(
            "--speed and --rates compress the trace, and the start-up of a worker does not shrink "
            "with it: leave them out, or use more or less of the trace"
        )
    if given & {"target_ttft", "target_itl"}:
        raise click.UsageError("a planner has its own targets: --set planner.targets.ttft_s=...")


def show(reports: Sequence[Report], ideal: float, plot: Path | None, *, as_json: bool) -> None:
    if as_json:
        shown = {"ideal_hit_ratio": ideal, "policies": [asdict(one) for one in reports]}
        click.echo(json.dumps(shown))
    else:
        Console().print(by_policy(reports, ideal))
        _tell_refused({one.policy: one.refused for one in reports})
    if plot is not None:
        plots().draw(reports, ideal, plot)


def _tell_refused(refused: Mapping[str, int]) -> None:
    for name, number in refused.items():
        if number:
            text = f"{name}: {number} requests were refused: every worker was busy (router.busy)"
            click.secho(text, fg="yellow", err=True)


def show_sweep(
    sweep: Mapping[float, Sequence[Report]], plot: Path | None, *, as_json: bool
) -> None:
    if as_json:
        shown = [
            {"rate": rate, "policies": [asdict(one) for one in reports]}
            for rate, reports in sweep.items()
        ]
        click.echo(json.dumps({"rates": shown}))
    else:
        Console().print(by_rate(sweep))
    if plot is not None:
        plots().draw_sweep(sweep, plot)


def tuned_targets(replays: Replays) -> PlannerTargets:
    """The planner's targets, or those of --target-ttft and --target-itl.

    Raises ConfigError where nothing can be tuned.
    """
    if not tunable_options(replays.config):
        problem = "no option of `router` or `disaggregation` is tunable: their plugins declare none"
        raise ConfigError([problem], replays.file)
    planner = replays.config.planner
    return replays.targets if planner is None else planner.targets


def show_values(found: Comparison, *, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps({"tuning": asdict(found)}))
        return
    title = f"{found.requests} requests with each value; delay as a part of the targets"
    made = table(title, "option", "value", "delay", "gain", "both")
    made.add_row("the file's values", "", f"{found.delay:.3f}", "", f"{found.attained:.1%}")
    for path, tried in groupby(found.tried, key=lambda one: one.option):
        made.add_row(Text(path), f"{found.values[path]:g}", "", "now", "")
        for one in tried:
            cells = (f"{one.value:g}", f"{one.delay:.3f}", f"{one.gain:+.1%}")
            made.add_row("", *cells, f"{one.attained:.1%}")
    Console().print(made)


def show_plans(reports: Sequence[PlanReport], plot: Path | None, *, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps({"planners": [asdict(one) for one in reports]}))
    else:
        if len(reports) == 1:
            for line in _course(reports[0]):
                click.echo(line)
        for one in reports:
            for text, number in one.warnings.items():
                click.secho(f"{one.planner}: {text} ({number} times)", fg="yellow", err=True)
        Console().print(by_planner(reports))
        _tell_refused({one.planner: one.refused for one in reports})
    if plot is not None:
        plots().draw_plans(reports, plot)


def _course(report: PlanReport) -> Iterator[str]:
    """A line for each change, in the order of time."""
    lines = [
        (one.time_s, f"{one.after - one.before:+d} {one.role}: {one.reason}")
        for one in report.changes
    ]
    lines += [(one.time_s, f"tuning, {one.kind}: {one.text}") for one in report.tuning]
    for time_s, line in sorted(lines, key=lambda one: one[0]):
        yield f"{_clock(time_s)} {line}"


def _clock(time_s: float) -> str:
    minutes, seconds = divmod(round(time_s), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{seconds:02}"


def by_planner(reports: Sequence[PlanReport]) -> Table:
    """A row for each planner."""
    columns = ("both", "TTFT", "ITL", "TTFT p99", "worker-hours", "most", "flips")
    made = table("Requests within the targets, and what the workers cost", "planner", *columns)
    for one in reports:
        made.add_row(
            Text(one.planner),
            f"{one.attained:.1%}",
            f"{one.attained_ttft:.1%}",
            f"{one.attained_itl:.1%}",
            f"{one.ttft_p99_s:.2f} s",
            f"{one.worker_hours:.2f}",
            str(one.most_workers),
            str(one.flips),
        )
    return made


def plots() -> Any:
    try:
        from commutator_replay import plot as replay_plot
    except ImportError as error:
        raise CommutatorError(
            f"--plot needs matplotlib ({error}): pip install matplotlib"
        ) from None
    return replay_plot


def by_policy(reports: Sequence[Report], ideal: float) -> Table:
    """A row for each policy."""
    title = f"Prompt tokens found in a cache; an infinite one would find {ideal:.1%}"
    times = ("TTFT p50  p99", "ITL p50  p99")
    disaggregated = any(one.separate_ratio is not None for one in reports)
    last = "separate" if disaggregated else "imbalance"
    made = table(title, "policy", "cached", "given up", *times, last, "goodput")
    for one in reports:
        separate = "-" if one.separate_ratio is None else f"{one.separate_ratio:.0%}"
        made.add_row(
            Text(one.policy),
            f"{one.cached_ratio:.1%}",
            "-" if one.given_up_ratio is None else f"{one.given_up_ratio:.1%}",
            f"{one.ttft_p50_s:.2f} {one.ttft_p99_s:5.2f} s",
            f"{one.itl_p50_s * 1000:.1f} {one.itl_p99_s * 1000:4.0f} ms",
            separate if disaggregated else f"{one.imbalance:.2f}",
            f"{one.goodput_per_s:.2f}/s",
        )
    return made


def by_rate(sweep: Mapping[float, Sequence[Report]]) -> Table:
    """A row for each rate; the best goodput of a row is marked."""
    policies = [one.policy for one in next(iter(sweep.values()))]
    made = table("Goodput and p99 ITL by requests/s", "rate", *policies)
    made.columns[0].justify = "right"
    for rate, reports in sweep.items():
        best = max(one.good_ratio for one in reports)
        made.add_row(
            f"{rate:g}",
            *(
                f"{one.good_ratio * rate:.2f}{'*' if one.good_ratio == best else ' '}"
                f"{one.itl_p99_s * 1000:4.0f} ms"
                for one in reports
            ),
        )
    return made


def replay_warnings(loaded: Loaded) -> Iterator[str]:
    """A line for each option of the router that was set and has no effect in a replay."""
    router = loaded.config.router
    if not router.use_kv_events:
        yield _no_effect("use_kv_events", "cached blocks are known at once, never guessed")
    if _was_set(loaded, "router_ttl_s"):
        yield _no_effect("router_ttl_s", "cached blocks are never guessed")
    sizes = {getattr(engine, "block_size", router.block_size) for engine in loaded.config.engines}
    if _was_set(loaded, "block_size") and sizes != {router.block_size}:
        found = ", ".join(map(str, sorted(sizes)))
        yield _no_effect("block_size", f"the index has the engines' blocks, of {found} tokens")


def block_warnings(loaded: Loaded, trace: Iterable[TraceRequest]) -> Iterator[str]:
    """A line if the engines' blocks are longer than the trace's, whose shorter prefixes vanish."""
    router = loaded.config.router
    ours = max(getattr(one, "block_size", router.block_size) for one in loaded.config.engines)
    theirs = min((one.block_tokens for one in trace), default=ours)
    if theirs < ours:
        sets = [
            f"--set 'engines[{i}].block_size={theirs}'" for i in range(len(loaded.config.engines))
        ]
        yield (
            f"the trace's blocks are of {theirs} tokens, the file's of {ours}: equal beginnings of "
            f"less than {ours} tokens are not found again; add {' '.join(sets)} "
            f"--set router.block_size={theirs}"
        )


def _no_effect(option: str, why: str) -> str:
    return f"router.{option}: a replay ignores this option: {why}"


def _was_set(loaded: Loaded, option: str) -> bool:
    node = find(loaded.tree, ("router", option))
    return node is not None and node.origin != DEFAULT
