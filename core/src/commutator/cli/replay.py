"""``commutator replay``: a trace through the routing code, over simulated workers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from commutator.cli.options import set_option
from commutator.config.load import load_config
from commutator.engine import VirtualEngine
from commutator.errors import CommutatorError, ConfigError
from commutator.observe.replay_report import Report, report
from commutator.routing.replay import replay as run_replay
from commutator.routing.trace import ideal_hit_ratio, read_trace

__all__ = ["replay"]

_POSITIVE = click.FloatRange(min=0, min_open=True)


@click.command(
    epilog="Example: commutator replay trace.jsonl examples/replay.yaml --compare kv,round_robin"
)
@click.argument("trace", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--policy", help="Routing policy instead of the file's, with its defaults.")
@click.option("--compare", help="Several policies, separated by commas; one row each.")
@click.option("--workers", type=click.IntRange(1), help="Workers instead of the file's replicas.")
@click.option("--requests", type=click.IntRange(1), help="Only so many of the trace's requests.")
@click.option(
    "--speed",
    type=_POSITIVE,
    default=1.0,
    show_default=True,
    help="So many times as fast as recorded.",
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
    "--plot", type=click.Path(dir_okay=False, path_type=Path), help="Write an SVG or PNG."
)
@set_option
def replay(
    trace: Path,
    file: Path,
    policy: str | None,
    compare: str | None,
    workers: int | None,
    requests: int | None,
    speed: float,
    seed: int,
    target_ttft: float,
    target_itl: float,
    as_json: bool,
    plot: Path | None,
    sets: tuple[str, ...],
) -> None:
    """Replay TRACE over FILE's first engine, in virtual time, and show what clients would see."""
    if policy and compare:
        raise click.UsageError("give --policy or --compare, not both")
    loaded = load_config([file], sets=sets)
    engine = loaded.config.engines[0]
    connector = loaded.host.engines.kinds[engine.kind].thing

    def make_engine() -> VirtualEngine:
        made = connector.virtual(engine)
        if made is None:
            problem = f'engines[0].kind: "{engine.kind}" has no model in virtual time; use sim'
            raise ConfigError([problem], str(file))
        return made

    names = (compare or policy or loaded.config.router.kind).split(",")
    recorded = read_trace(trace, requests)
    reports = []
    for name in names:
        routing = make_policy(loaded.host, loaded.config.router, name)
        try:
            outcome = run_replay(
                recorded,
                make_engine,
                workers or engine.replicas,
                routing,
                seed=seed,
                speed=speed,
            )
        except ValueError as error:  # the engine's sizes do not fit the trace
            raise ConfigError([f"engines[0]: {error}"], str(file)) from error
        reports.append(report(name, outcome, target_ttft, target_itl))
    ideal = ideal_hit_ratio(recorded)
    if as_json:
        click.echo(
            json.dumps({"ideal_hit_ratio": ideal, "policies": [r.as_dict() for r in reports]})
        )
    else:
        Console().print(table(reports, ideal))
    if plot is not None:
        draw_plot(reports, ideal, plot)


def draw_plot(reports: list[Report], ideal: float, path: Path) -> None:
    try:
        from commutator.observe.replay_plot import draw  # noqa: PLC0415 - an option, and heavy
    except ImportError as error:
        raise CommutatorError(
            f"--plot needs matplotlib ({error}): pip install matplotlib"
        ) from None
    draw(reports, ideal, path)


def make_policy(host: Any, router: Any, name: str) -> Any:
    """The file's own policy with its options, or another with its defaults."""
    if name == router.kind:
        return host.routers.kinds[name].thing(router)
    kind = host.routers.kinds.get(name)
    if kind is None:
        known = ", ".join(sorted(host.routers.kinds))
        raise ConfigError([f'no routing policy "{name}"; there are {known}'], "--compare")
    return kind.thing(kind.config_class(kind=name, block_size=router.block_size))


def table(reports: list[Report], ideal: float) -> Table:
    title = f"Prompt tokens found in a cache; an infinite one would find {ideal:.1%}"
    made = Table(title=title, box=None, padding=(0, 1, 0, 0), title_justify="left")
    made.add_column("policy", no_wrap=True)
    times = ("TTFT p50  p99", "ITL p50  p99")
    for column in ("cached", "given up", *times, "imbalance", "goodput"):
        made.add_column(column, justify="right", no_wrap=True)
    for one in reports:
        made.add_row(
            one.policy,
            f"{one.cached_ratio:.1%}",
            "-" if one.given_up_ratio is None else f"{one.given_up_ratio:.1%}",
            f"{one.ttft_p50_s:.2f} {one.ttft_p99_s:5.2f} s",
            f"{one.itl_p50_s * 1000:.1f} {one.itl_p99_s * 1000:4.0f} ms",
            f"{one.imbalance:.2f}",
            f"{one.goodput_per_s:.2f}/s",
        )
    return made
