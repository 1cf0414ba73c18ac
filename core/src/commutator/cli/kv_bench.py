"""``commutator kv bench``: how fast each tier stores and loads, beside the limit of its medium."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from commutator.cli.options import override_options

if TYPE_CHECKING:
    from commutator.cli.bench_tier import Line
    from commutator.config.model import TierConfig
    from commutator.kv.tier_setup import TierSetup
    from commutator.plugins import PluginHost

__all__ = ["bench"]

_KIB = 1024
_SIZES_KIB = (64, 256, 1024, 4096)
_OWN_NAMES = {"dram": "dram", "nvme": "nvme", "nvme-2": "nvme-cached"}
"""What the tiers are called that are measured without FILE."""


@click.command(
    short_help="Measure tiers beside the limits of their media.",
    epilog="Example: commutator kv bench cluster.yaml --json",
)
@click.argument(
    "files",
    metavar="[FILE...]",
    nargs=-1,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
)
@click.option(
    "--path",
    type=click.Path(exists=True, file_okay=False, writable=True, path_type=Path),
    help="Without FILE: a folder on the disk to measure; that for temporary files by default.",
)
@click.option(
    "--block-kib",
    "sizes_kib",
    type=click.IntRange(1, 65536),
    multiple=True,
    help="Size of a block; may be repeated. 64, 256, 1024 and 4096 by default.",
)
@click.option("--total-mib", type=click.IntRange(1), default=64, show_default=True,
              help="Bytes of blocks in each round.")  # fmt: skip
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True,
              help="The median of so many counts.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
@override_options
def bench(
    files: tuple[Path, ...],
    path: Path | None,
    sizes_kib: tuple[int, ...],
    total_mib: int,
    rounds: int,
    as_json: bool,
    sets: tuple[str, ...],
    no_plugins: tuple[str, ...],
) -> None:
    """Measure the tiers of FILE, or host memory and a local disk.

    Without FILE: dram is host memory, nvme the disk past the page cache, nvme-cached through it.

    Needs no engine and no deployment. Blocks go the way that they go in an engine: reserved,
    moved by NIXL, checked, committed. Raw limits are measured in the same rounds, each of them
    first in turn: memcpy, NIXL alone, preadv and pwritev by 8 threads, boto3; the table has the
    tier's share of each. The tiers of FILE are taken as they are, but with the room that is needed,
    and in a new folder or under a new prefix, removed in the end. Those that nothing can be stored
    in are left out. Exit code 1 when one could not be measured; the others are shown.
    """
    from commutator.errors import CommutatorError

    with ExitStack() as stack:
        host, configs = _configs(files, path, sets, no_plugins, stack)
        sizes = [size * _KIB for size in sizes_kib or _SIZES_KIB]
        plan = _plan(configs, host, sizes, total_mib << 20, stack, own_names=not files)
        lines, problems = _measured(plan, total_mib << 20, rounds, quiet=as_json)
    if as_json:
        click.echo(json.dumps([line.as_json() for line in lines], indent=2))
    elif lines:
        _show(lines)
    if problems:
        raise CommutatorError("\n  ".join(["not everything could be measured:", *problems]))


def _plan(
    configs: Sequence[TierConfig],
    host: PluginHost,
    sizes: Sequence[int],
    total_bytes: int,
    stack: ExitStack,
    *,
    own_names: bool,
) -> list[tuple[int, TierSetup]]:
    """(block size, tier) of each measurement. Raises CommutatorError before anything is measured.

    A tier is made for each of them, but not yet opened.
    """
    from attrs import evolve

    from commutator.cli.bench_tier import needed_bytes
    from commutator.engine.tiers import make_tiers
    from commutator.errors import CommutatorError

    plan: list[tuple[int, TierSetup]] = []
    left_out: set[str] = set()
    for size in sizes:
        capacity = needed_bytes(size, total_bytes)
        tailored = [_tailored(config, capacity, stack) for config in configs]
        for setup in make_tiers(tailored, host, f"kv-bench-{os.getpid()}"):
            if setup.tier.writable:
                name = _OWN_NAMES[setup.name] if own_names else setup.name
                plan.append((size, evolve(setup, name=name)))
            else:
                left_out.add(setup.name)
    for name in sorted(left_out):
        click.echo(f"{name}: left out, as nothing can be stored in it", err=True)
    if not plan:
        raise CommutatorError("there is no tier that blocks can be stored in, so none to measure")
    return plan


def _measured(
    plan: Sequence[tuple[int, TierSetup]], total_bytes: int, rounds: int, *, quiet: bool
) -> tuple[list[Line], list[str]]:
    """The results, and what kept the others from being measured."""
    from commutator.cli.bench_tier import measure
    from commutator.errors import CommutatorError

    lines: list[Line] = []
    problems: list[str] = []
    for size, setup in plan:
        try:
            lines += measure(setup, size, total_bytes, rounds)
        except (CommutatorError, OSError) as error:
            problems.append(f"{setup.name}, {_size(size)}: {error}")
        else:
            if not quiet:
                click.echo(f"{setup.name}, {_size(size)}: measured", err=True)
    return lines, problems


def _configs(
    files: tuple[Path, ...],
    path: Path | None,
    sets: tuple[str, ...],
    no_plugins: tuple[str, ...],
    stack: ExitStack,
) -> tuple[PluginHost, list[TierConfig]]:
    from commutator.config.kinds import config_converter
    from commutator.config.load import load_config
    from commutator.config.model import TierConfig
    from commutator.plugins import load_plugins
    from commutator.schema import structure

    if files:
        if path is not None:
            raise click.UsageError("--path is for measuring without FILE")
        loaded = load_config(files, sets=sets, no_plugins=no_plugins)
        if not loaded.config.tiers:
            raise click.UsageError(f"{', '.join(map(str, files))}: there are no tiers")
        return loaded.host, list(loaded.config.tiers)
    if sets:
        raise click.UsageError("--set changes a FILE; give one")
    host = load_plugins(no_plugins)
    try:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="kv-bench-", dir=path))
    except OSError as error:
        raise click.BadParameter(_not_made(path, error), param_hint="--path") from None
    entries: list[dict[str, Any]] = [
        {"kind": "dram", "capacity": 1},
        {"kind": "nvme", "path": folder, "capacity": 1},
        {"kind": "nvme", "path": folder, "capacity": 1, "direct": "off"},
    ]
    converter = config_converter(host)
    return host, [structure(converter, entry, TierConfig) for entry in entries]


def _tailored(config: TierConfig, capacity: int, stack: ExitStack) -> TierConfig:
    """The same with enough room, in a place of its own. Raises TierError if there is none."""
    import attrs

    from commutator.errors import TierError

    names = {field.name for field in attrs.fields(type(config))}
    changes: dict[str, Any] = {}
    if "capacity" in names:
        changes["capacity"] = capacity
    if "path" in names:
        parent = Path(config.path.replace("{worker}", f"kv-bench-{os.getpid()}"))  # type: ignore[attr-defined]
        stack.callback(_remove_empty, _missing(parent))
        try:
            parent.mkdir(parents=True, exist_ok=True)
            folder = tempfile.mkdtemp(prefix="kv-bench-", dir=parent)
        except OSError as error:
            raise TierError(f"{config.kind}: path: {_not_made(parent, error)}") from None
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        changes["path"] = folder
    if "prefix" in names:
        changes["prefix"] = f"{config.prefix}/kv-bench-{os.getpid()}"  # type: ignore[attr-defined]
    return attrs.evolve(config, **changes)


def _not_made(parent: Path | None, error: OSError) -> str:
    return (
        f"no folder can be made in {parent or 'any folder for temporary files'}: {error.strerror}"
    )


def _missing(folder: Path) -> list[Path]:
    """The folders that do not exist yet, innermost first."""
    return [each for each in (folder, *folder.parents) if not each.exists()]


def _remove_empty(folders: list[Path]) -> None:
    for folder in folders:
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()


def _show(lines: list[Line]) -> None:
    """Fits 80 columns; the rates of bare NIXL are in the JSON."""
    from rich.console import Console

    from commutator.cli.kv_tables import add_row, make_table

    table = make_table(
        "tier", "block>", "", "cache", "GB/s>", "p99 ms>", "raw GB/s", "ratio>", "of NIXL>"
    )
    for line in lines:
        rates = dict(line.raw_gb_per_s)
        nixl = rates.pop("nixl", None)
        raw = next(iter(rates.items()), None)
        add_row(
            table,
            line.tier,
            _size(line.block_bytes),
            line.operation,
            line.cache,
            _figure(line.gb_per_s),
            _figure(line.p99_ms),
            "" if raw is None else f"{raw[0]} {_figure(raw[1])}",
            "" if raw is None else _figure(line.gb_per_s / raw[1]),
            "" if nixl is None else _figure(line.gb_per_s / nixl),
        )
    Console().print(table)


def _size(block_bytes: int) -> str:
    kib = block_bytes // _KIB
    return f"{kib} KiB" if kib % _KIB else f"{kib // _KIB} MiB"


def _figure(value: float) -> str:
    """In four characters up to 9,999."""
    decimals = max(0, 3 - len(str(int(value))))
    return f"{value:.{decimals}f}"
