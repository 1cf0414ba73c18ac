"""``commutator planner search``: the placement of workers with the best goodput for a trace."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property, partial
from itertools import product
from pathlib import Path
from typing import Any

import attrs
import click
import yaml
from attrs import define, field
from rich.console import Console
from rich.table import Table
from rich.text import Text

from commutator.config.load import Loaded, load_config
from commutator.config.tree import DEFAULT, Node, find
from commutator.contract.planner import EnginePerformance, PlannerTargets
from commutator.contract.worker import Role
from commutator.errors import ConfigError
from commutator_replay.options import table, trace_options
from commutator_replay.search import Layout, Look, Result, Search
from commutator_replay.setup import Replays
from commutator_replay.tables import Part, load_trace
from commutator_replay.trace import TraceRequest

_DEFAULT_POLICY = "conditional"
_KNOBS: Mapping[str, Sequence[Any]] = {
    "disaggregation.max_local_prefill_length": (0, 250, 500, 1000, 2000, 4000),
    "router.overlap_score_weight": (0.5, 1, 2, 4, 8, 16),
}
"""Tried where the policies have them."""


@click.command(
    short_help="Find the roles and options that serve TRACE best.",
    epilog="Example: commutator planner search trace.jsonl examples/replay-disagg.yaml --workers 8",
)
@click.option("--workers", type=click.IntRange(1), required=True, help="Of all roles together.")
@click.option(
    "--disagg",
    help="Disaggregation policies to try, separated by commas; by default the file's own, or "
    "`conditional`. Empty: only workers that do both.",
)
@click.option(
    "--knob",
    "knobs",
    multiple=True,
    metavar="PATH=V1,V2,...",
    help="Values of an option to try for the best placement; may be given several times. By "
    "default the length up to which prompts are computed locally, and the weight of overlaps.",
)
@click.option(
    "--output",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    help="Write what is to be changed in FILE: `commutator serve FILE OUTPUT`.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
@trace_options
def search(
    trace: Path,
    file: Path,
    workers: int,
    disagg: str | None,
    knobs: tuple[str, ...],
    requests: int | None,
    thin: float,
    seed: int,
    output: Path | None,
    as_json: bool,
    sets: tuple[str, ...],
) -> None:
    """Find how many prefill, decode or whole workers serve TRACE best, and with which options.

    Goodput, the largest rate at which enough requests meet the targets of FILE's `planner` (by
    default 0.5 s, 50 ms and 95 %), is found by replays over FILE's workers, which must have a
    model in virtual time (`sim`).
    """
    placements = Placements(file=file, sets=sets, trace_file=str(trace), seed=seed)
    targets = placements.targets
    asked = load_trace(trace, Part(thin=thin, requests=requests), seed)
    policies = placements.policies(disagg)
    result = Search(
        trace=asked,
        layouts=layouts(workers, policies),
        performance=placements.performance(),
        itl_s=targets.itl_s,
        attainment=targets.attainment,
        run=placements.run,
        knobs=_written_knobs(knobs) if knobs else placements.usual_knobs(policies),
        tell=partial(click.secho, dim=True, err=True),
    ).result()
    changes = placements.changes(result.best.layout)
    text = yaml.safe_dump(changes, sort_keys=False, default_flow_style=None)
    if as_json:
        click.echo(json.dumps({**_plain(result), "changes": changes}))
    else:
        show(result, targets)
        click.echo(f"\n# {result.best.layout}\n{text}", nl=False)
    if output is not None:
        output.write_text(f"# `commutator planner search`: {result.best.layout}\n{text}")


def layouts(workers: int, policies: Iterable[str]) -> list[Layout]:
    """All placements of ``workers`` workers, with each of the ``policies``."""
    split = [
        Layout(workers - prefill, prefill, policy)
        for policy, prefill in product(policies, range(1, workers))
    ]
    return [Layout(workers), *split]


@define(kw_only=True, slots=False)
class Placements:
    """Replays a file with its workers placed in other ways."""

    file: Path
    sets: tuple[str, ...]
    trace_file: str
    seed: int = 0
    _replays: dict[Layout, Replays] = field(factory=dict, init=False, eq=False)

    @cached_property
    def loaded(self) -> Loaded:
        """The file as it is. Raises ConfigError."""
        return load_config([self.file], sets=self.sets)

    @property
    def targets(self) -> PlannerTargets:
        """Those of the section `planner`, or the defaults of one."""
        planner = self.loaded.config.planner
        return PlannerTargets() if planner is None else planner.targets

    def policies(self, written: str | None) -> list[str]:
        """The disaggregation policies to try. Raises ConfigError for an unknown one."""
        loaded = self.loaded
        own = loaded.config.disaggregation
        if written is None:
            return [_DEFAULT_POLICY if own is None else own.kind]
        kinds = loaded.host.disaggs.kinds
        names = [name.strip() for name in written.split(",") if name.strip()]
        for name in names:
            if name not in kinds:
                known = ", ".join(sorted(kinds))
                problem = f'no disaggregation policy "{name}"; there are {known}'
                raise ConfigError([problem], "--disagg")
        return names

    def usual_knobs(self, policies: Sequence[str]) -> Mapping[str, Sequence[Any]]:
        """The knobs that are tried by default, as far as the file's policies have them."""
        loaded = self.loaded
        host, config = loaded.host, loaded.config
        classes = {"router": [host.routers.kinds[config.router.kind].config_class]}
        classes["disaggregation"] = [host.disaggs.kinds[name].config_class for name in policies]
        found = {}
        for path, values in _KNOBS.items():
            section, _, option = path.partition(".")
            has = classes[section] and all(
                option in {one.name for one in attrs.fields(kind)} for kind in classes[section]
            )
            weighs = section != "router" or getattr(config.router, "formula", "cost") == "cost"
            if has and weighs:
                found[path] = values
        return found

    def performance(self) -> EnginePerformance:
        """How fast a worker is. Raises ConfigError where its engine cannot tell."""
        replays = Replays(self.loaded, str(self.file), self.trace_file, self.targets)
        _, make = replays.makers(roles=False)[0]
        speed = make().performance
        if speed is None:
            raise ConfigError(["engines: the model tells no performance; use sim"], str(self.file))
        return speed

    def run(self, layout: Layout, trace: Sequence[TraceRequest]) -> float:
        """The part of the requests that met the targets."""
        if (replays := self._replays.get(layout)) is None:
            with tempfile.TemporaryDirectory() as folder:
                over = Path(folder) / "placement.yaml"
                over.write_text(yaml.safe_dump(self.changes(layout)))
                loaded = load_config([self.file, over], sets=self.sets)
            replays = Replays(loaded, str(self.file), self.trace_file, self.targets, seed=self.seed)
            self._replays[layout] = replays
        return replays.by_router(replays.config.router.kind, trace).good_ratio

    def changes(self, layout: Layout) -> dict[str, Any]:
        """What is to be changed in the file."""
        tree = self.loaded.tree
        engines = find(tree, ("engines",))
        assert engines is not None, "every configuration has engines"
        entries = [_written(node) for node in engines.value]
        roles = [Role(entry.role) for entry in self.loaded.config.engines]
        serving = next(
            (e for e, role in zip(entries, roles, strict=True) if role is not Role.PREFILL)
        )
        made: dict[str, Any] = {}
        if not layout.prefill:
            engine = {**serving, "name": "both", "role": "both", "replicas": layout.serving}
            made["engines"] = [engine]
            if self.loaded.config.disaggregation is not None:
                made["disaggregation"] = None
        else:
            own = [e for e, role in zip(entries, roles, strict=True) if role is Role.PREFILL]
            prefill = own[0] if own else serving
            made["engines"] = [
                {**serving, "name": "decode", "role": "decode", "replicas": layout.serving},
                {**prefill, "name": "prefill", "role": "prefill", "replicas": layout.prefill},
            ]
            made["disaggregation"] = {"kind": layout.policy}
        for path, value in layout.knobs:
            section, _, option = path.partition(".")
            made.setdefault(section, {})[option] = value
        return made


def _written(node: Node) -> Any:
    """What a file, not a default, says."""
    if isinstance(node.value, dict):
        return {k: _written(one) for k, one in node.value.items() if one.origin != DEFAULT}
    if isinstance(node.value, list):
        return [_written(one) for one in node.value]
    return node.value


def _written_knobs(written: Sequence[str]) -> dict[str, list[Any]]:
    knobs: dict[str, list[Any]] = {}
    for one in written:
        path, equals, values = one.partition("=")
        if not equals or "." not in path:
            raise click.BadParameter(
                f"{one}: expected SECTION.OPTION=V1,V2,...", param_hint="--knob"
            )
        knobs[path] = [yaml.safe_load(value) for value in values.split(",")]
    return knobs


def _plain(result: Result) -> dict[str, Any]:
    return {
        "best": _plain_look(result.best),
        "looks": [_plain_look(one) for one in result.looks],
        "front": [
            {"layout": str(layout), "workers": layout.workers, "attained": attained}
            for layout, attained in result.front
        ],
        "notes": list(result.notes),
    }


def _plain_look(one: Look) -> dict[str, Any]:
    return {
        "layout": str(one.layout),
        "expected_per_s": one.expected,
        "goodput_per_s": {f"1/{stage}": rate for stage, rate in one.goodput.items()},
        "why": one.why,
    }


def show(result: Result, targets: PlannerTargets) -> None:
    """Print what was tried, the front, and the notes."""
    console = Console()
    console.print(_looks(result.looks, targets))
    console.print(_front(result.front, targets))
    for note in result.notes:
        console.print(note, highlight=False)


def _looks(looks: Sequence[Look], targets: PlannerTargets) -> Table:
    title = (
        f"Requests/s at which {targets.attainment:.0%} are within {targets.ttft_s:g} s and "
        f"{targets.itl_s * 1000:g} ms"
    )
    made = table(title, "placement", "formula", "1/8", "1/4", "all")
    made.columns[0].no_wrap = False  # with options a placement may be long
    made.add_column("")
    for one in looks:
        rates = [f"{one.goodput[s]:.2f}" if s in one.goodput else "-" for s in (8, 4, 1)]
        made.add_row(Text(str(one.layout)), f"{one.expected:.2f}", *rates, one.why or "the best")
    return made


def _front(front: Sequence[tuple[Layout, float]], targets: PlannerTargets) -> Table:
    title = "Workers and what they attain at the trace's own rate"
    made = Table(title=title, box=None, padding=(0, 1, 0, 0), title_justify="left")
    made.add_column("workers", justify="right")
    made.add_column("placement")
    made.add_column("attained", justify="right")
    made.add_column("")
    enough = next((one for one, attained in front if attained >= targets.attainment), None)
    for layout, attained in front:
        text = "the fewest that are enough" if layout == enough else ""
        made.add_row(str(layout.workers), Text(str(layout)), f"{attained:.1%}", text)
    return made
