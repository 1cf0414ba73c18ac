"""``commutator adapter``: serves LoRA adapters beside the models of a running deployment."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from commutator.errors import CommutatorError
from commutator_console.front_door import FrontDoor, front_door_options
from commutator_rollout.cli import (
    APPLY_S,
    body_of,
    json_option,
    print_table,
    show_report,
    wait_for,
    why_option,
)
from commutator_rollout.plugin import PATH

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_/:-]{0,127}")
_WAIT_S = 120.0


@click.group(epilog="Example: commutator adapter load sql ./adapters/sql")
def adapter() -> None:
    """Serve LoRA adapters beside the models of a running deployment; list them."""


@adapter.command(epilog="Example: commutator adapter load sql ./adapters/sql --model llama")
@click.argument("name")
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--model", metavar="NAME", help="The model that it adapts; by default the only one.")
@why_option
@front_door_options
def load(door: FrontDoor, name: str, folder: Path, model: str | None, why: str) -> None:
    """Serve the adapter in FOLDER as NAME, which clients give as `model`.

    New requests find it at once, and each worker loads it for its first one. It stays, beside the
    file, until `unload`, or until its entry in `traffic.adapters` says otherwise.
    """
    if _NAME.fullmatch(name) is None:
        raise click.BadParameter("expected letters, digits, and _ - / :", param_hint="NAME")
    path = f"traffic.adapters.{name}"
    base = _only_model(door) if model is None else model
    entry = {"model": base, "source": str(folder.absolute())}
    _set(door, f"{path}={json.dumps(entry)}", why)


@adapter.command(epilog="Example: commutator adapter unload sql")
@click.argument("name")
@why_option
@front_door_options
def unload(door: FrontDoor, name: str, why: str) -> None:
    """Serve NAME no more; requests that have begun end with it."""
    known = [one["id"] for one in _adapters(door)]
    if name not in known:
        found = ", ".join(known) or "none"
        raise CommutatorError(f'no adapter is named "{name}"; adapters: {found}')
    _set(door, f"traffic.adapters.{name}=null", why)


@adapter.command("ls", epilog="Example: commutator adapter ls")
@json_option
@front_door_options
def list_adapters(door: FrontDoor, as_json: bool) -> None:
    """List the adapters that clients can ask for, and the models that they adapt."""
    rows = [{"name": one["id"], "model": one["parent"]} for one in _adapters(door)]
    if as_json:
        click.echo(json.dumps(rows, indent=2))
    else:
        print_table([("ADAPTER", "MODEL"), *((row["name"], row["model"]) for row in rows)])


def _set(door: FrontDoor, change: str, why: str) -> None:
    body = body_of((), [change], forget=False, why=why) | {"dry_run": False}
    report = door.administer("POST", f"{PATH}/apply", body, timeout_s=APPLY_S)
    show_report(report)
    if report["accepted"]:
        wait_for(door, report["generation"], _WAIT_S, as_json=False)
    else:
        click.echo(f"generation {report['generation']} stays: nothing changes")


def _cards(door: FrontDoor) -> list[Mapping[str, Any]]:
    with door.ask("/v1/models") as answer:
        found: list[Mapping[str, Any]] = json.load(answer)["data"]
    return found


def _adapters(door: FrontDoor) -> list[Mapping[str, Any]]:
    return [one for one in _cards(door) if one.get("parent") is not None]


def _only_model(door: FrontDoor) -> str:
    models = [one["id"] for one in _cards(door) if one.get("parent") is None]
    if len(models) != 1:
        raise CommutatorError(f"--model: several names are served: {', '.join(models)}")
    return str(models[0])
