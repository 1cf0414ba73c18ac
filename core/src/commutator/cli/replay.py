"""``commutator replay``: a trace through the routing code, over simulated workers."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from commutator.cli.options import NumberRange, set_option
from commutator.cli.replay_setup import Replays, Targets
from commutator.cli.replay_tables import by_policy, by_rate
from commutator.cli.replay_warnings import replay_warnings
from commutator.config.load import load_config
from commutator.errors import CommutatorError
from commutator.observe.replay_report import Report
from commutator.routing.trace import TraceRequest, ideal_hit_ratio, read_trace
from commutator.routing.trace_mix import at_rate, with_chats

__all__ = ["replay"]

_PLOT_SUFFIXES = (".svg", ".png", ".pdf")
_POSITIVE = NumberRange(min=0, min_open=True)


class _Rates(click.ParamType[list[float]]):
    name = "rates"

    def convert(self, value: Any, param: Any, ctx: Any) -> list[float]:
        if isinstance(value, list):
            return value
        return [_POSITIVE.convert(one, param, ctx) for one in value.split(",")]


def _checked_plot(ctx: click.Context, param: click.Parameter, value: Path | None) -> Path | None:
    """What could only be told after the whole replay otherwise."""
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


@click.command(
    epilog="Example: commutator replay trace.jsonl examples/replay.yaml --compare kv,round_robin"
)
@click.argument("trace", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--policy", help="Routing policy instead of the file's, with its defaults.")
@click.option("--compare", help="Several policies, separated by commas; one row each.")
@click.option(
    "--disagg",
    help="Several policies for prefill elsewhere, separated by commas; `aggregated` stands for "
    "the same workers without roles.",
)
@click.option("--workers", type=click.IntRange(1), help="Workers instead of the file's replicas.")
@click.option("--requests", type=click.IntRange(1), help="Only so many of the trace's requests.")
@click.option(
    "--chats",
    type=NumberRange(min=0),
    default=0.0,
    show_default=True,
    help="Mix so many short chats among the trace, for each of its requests.",
)
@click.option(
    "--speed",
    type=_POSITIVE,
    default=1.0,
    show_default=True,
    help="So many times as fast as recorded.",
)
@click.option(
    "--rates", type=_Rates(), help="Requests a second instead, several separated by commas."
)
@click.option("--seed", type=int, default=0, show_default=True, help="For ties and draws.")
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
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
@click.option(
    "--plot",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    callback=_checked_plot,
    help="Write a picture: SVG, PNG or PDF, as FILE ends.",
)
@set_option
def replay(
    trace: Path,
    file: Path,
    policy: str | None,
    compare: str | None,
    disagg: str | None,
    workers: int | None,
    requests: int | None,
    chats: float,
    speed: float,
    rates: list[float] | None,
    seed: int,
    target_ttft: float,
    target_itl: float,
    as_json: bool,
    plot: Path | None,
    sets: tuple[str, ...],
) -> None:
    """Replay TRACE over FILE's workers, in virtual time, and show what clients would see."""
    if sum(option is not None for option in (policy, compare, disagg)) > 1:
        raise click.UsageError("give one of --policy, --compare and --disagg")
    if rates and speed != 1.0:
        raise click.UsageError("give --speed or --rates, not both")
    loaded = load_config([file], sets=sets)
    replays = Replays(
        loaded,
        str(file),
        str(trace),
        Targets(target_ttft, target_itl),
        workers=workers,
        seed=seed,
    )
    names = policies(replays, policy, compare, disagg)
    for warning in replay_warnings(loaded):
        click.secho(f"warning: {warning}", fg="yellow", err=True)
    recorded = read_trace(trace, requests)
    mixed = with_chats(recorded, chats, seed) if chats else recorded

    def run(requests: Sequence[TraceRequest]) -> list[Report]:
        one = replays.by_router if disagg is None else replays.by_disaggregation
        return [one(name, requests) for name in names]

    if rates:
        sweep = {rate: run(at_rate(mixed, rate)) for rate in rates}
        show_sweep(sweep, plot, as_json=as_json)
    else:
        reports = run([one.sped_up(speed) for one in mixed])
        show(reports, ideal_hit_ratio(mixed), plot, as_json=as_json)


def policies(
    replays: Replays, policy: str | None, compare: str | None, disagg: str | None
) -> list[str]:
    """Those to be run, all of them looked up before the first one runs."""
    if disagg is not None:
        return replays.disaggregations(disagg, "--disagg")
    if compare is not None:
        return replays.routers(compare, "--compare")
    if policy is not None:
        return replays.routers(policy, "--policy")
    return [replays.config.router.kind]


def show(reports: Sequence[Report], ideal: float, plot: Path | None, *, as_json: bool) -> None:
    if as_json:
        told = {"ideal_hit_ratio": ideal, "policies": [one.as_dict() for one in reports]}
        click.echo(json.dumps(told))
    else:
        Console().print(by_policy(reports, ideal))
    if plot is not None:
        plots().draw(reports, ideal, plot)


def show_sweep(
    sweep: Mapping[float, Sequence[Report]], plot: Path | None, *, as_json: bool
) -> None:
    if as_json:
        told = [
            {"rate": rate, "policies": [one.as_dict() for one in reports]}
            for rate, reports in sweep.items()
        ]
        click.echo(json.dumps({"rates": told}))
    else:
        Console().print(by_rate(sweep))
    if plot is not None:
        plots().draw_sweep(sweep, plot)


def plots() -> Any:
    try:
        from commutator.observe import replay_plot
    except ImportError as error:
        raise CommutatorError(
            f"--plot needs matplotlib ({error}): pip install matplotlib"
        ) from None
    return replay_plot
