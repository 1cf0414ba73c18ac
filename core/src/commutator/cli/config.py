"""``commutator config check``, ``show`` and ``schema``."""

from __future__ import annotations

import json

import click

from commutator.cli.options import Sources, configuration_options, no_plugin_option


@click.group(epilog="Example: commutator config check examples/quickstart.yaml")
def config() -> None:
    """Check or show a configuration; print its schema."""


@config.command(epilog="Example: commutator config check base.yaml production.yaml")
@configuration_options
@click.option(
    "--elsewhere",
    is_flag=True,
    help="FILE is for another machine: check only what holds on every one.",
)
def check(sources: Sources, elsewhere: bool) -> None:
    """Report every mistake in FILE, or "ok".

    Several files are merged in order, as `serve` does. What `serve` would need of this machine is
    checked too: models, devices, memory, folders, secrets, the environments of engines. Where a
    model has a config.json: what its KV needs, and what the engine does with it.
    """
    from commutator.cli.likely_mistakes import warnings_of
    from commutator.supervisor.preflight import (
        check_files,
        check_machine,
        check_routes,
        machine_warnings,
        model_notes,
    )

    loaded = sources.load()
    warnings = list(warnings_of(loaded.config, loaded.host))
    if elsewhere:
        check_files(loaded.config)
        check_routes(loaded.config, loaded.host)
    else:
        check_machine(loaded.config, loaded.host)
        warnings += machine_warnings(loaded.config, loaded.host)
    for warning in warnings:
        click.secho(f"warning: {warning}", fg="yellow", err=True)
    for note in model_notes(loaded.config, loaded.host):
        click.echo(note)
    click.echo(f"{', '.join(map(str, sources.files))}: ok")


@config.command(
    epilog="Example: commutator config show examples/quickstart.yaml --set frontend.port=9000"
)
@configuration_options
def show(sources: Sources) -> None:
    """Print the effective values and the origin of each."""
    from commutator.config.show import show_config

    loaded = sources.load()
    click.echo(show_config(loaded.config, loaded.tree), nl=False)


@config.command(epilog="Example: commutator config schema > commutator.schema.json")
@no_plugin_option
def schema(no_plugins: tuple[str, ...]) -> None:
    """Print the JSON Schema of the file, for editors.

    It covers the options of every installed plugin.
    """
    from commutator.config.kinds import file_schema
    from commutator.plugins import load_plugins

    click.echo(json.dumps(file_schema(load_plugins(no_plugins)), indent=2))
