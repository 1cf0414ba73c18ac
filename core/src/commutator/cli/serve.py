"""``commutator serve``, and ``commutator frontend``."""

from __future__ import annotations

import asyncio
import logging
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import click

from commutator.cli.options import Sources, configuration_options

if TYPE_CHECKING:
    from commutator.config.load import Loaded
    from commutator.config.model import Config


log = logging.getLogger(__name__)


def _fresh(_context: click.Context, option: click.Parameter, value: Path | None) -> Path | None:
    if value is not None:
        if not value.parent.is_dir():
            raise click.BadParameter(f"no such folder: {value.parent}", param=option)
        value.unlink(missing_ok=True)  # a process that waits for it must not find an old one
    return value


port_option = click.option(
    "--port", type=click.IntRange(0, 65535), help="Port to listen on; 0 picks one."
)
url_file_option = click.option(
    "--url-file",
    type=click.Path(dir_okay=False, path_type=Path),
    callback=_fresh,
    help="Write the front door's URL to this file when everything is ready.",
)


@click.command(
    epilog="Example: commutator serve examples/quickstart.yaml --set 'engines[0].replicas=1'"
)
@configuration_options
@port_option
@url_file_option
def serve(sources: Sources, port: int | None, url_file: Path | None) -> None:
    """Run the deployment that FILE describes; later files override earlier ones.

    Without FILE, the one that commutator.yaml describes.

    Starts the workers and the front door, watches them, and restarts those that fail. Ctrl-C
    lets running requests finish; a second Ctrl-C stops at once. With the section `cluster`, this is
    one host of several.
    """
    sys.exit(run_deployment(sources.load(port=port), url_file))


@click.command(epilog="Example: commutator frontend cluster.yaml --port 8000")
@configuration_options
@port_option
@url_file_option
def frontend(sources: Sources, port: int | None, url_file: Path | None) -> None:
    """Run only the front doors that FILE describes, for workers of other hosts.

    They find the workers in the registry, which has to be one that hosts share. Engines that speak
    Commutator's token API need no plugin here.
    """
    loaded = sources.load(port=port, only_routes=True)
    must_be_shared(loaded.config, "front doors would find no worker")
    sys.exit(run_deployment(loaded, url_file, engine=""))


def must_be_shared(config: Config, otherwise: str) -> None:
    """Raises ConfigError when only one supervisor has the registry."""
    from commutator.errors import ConfigError

    if config.registry.kind == "memory" and getattr(config.registry, "address", None) is None:
        problem = (
            f"registry: it is in one supervisor's memory, so {otherwise}; set registry.address, or "
            "use the kind etcd"
        )
        raise ConfigError([problem], "this command")


def must_launch_here(config: Config, engine: str | None) -> None:
    """Raises ConfigError when another process has to place the workers of a launcher of agents."""
    from commutator.errors import ConfigError
    from commutator.registry.memory import MemoryConfig
    from commutator.supervisor.hosts import network_of, serves_registry

    kind, registry = config.launcher.kind, config.registry
    if engine == "":  # front doors alone
        return
    if engine is not None:
        problem = (
            f'launcher: "{kind}" places all workers of the configuration from `commutator serve`; '
            "use that, or the launcher process"
        )
        raise ConfigError([problem], "this command")
    if isinstance(registry, MemoryConfig) and serves_registry(config, network_of(config)) is None:
        problem = (
            f'launcher: "{kind}" places workers from the host that serves the registry, '
            f"{registry.address}; run `commutator serve` there and `commutator frontend` here, or "
            "use the registry etcd"
        )
        raise ConfigError([problem], "this machine")


def run_deployment(
    loaded: Loaded,
    url_file: Path | None = None,
    *,
    engine: str | None = None,
    front_doors: int | None = None,
) -> int:
    """Run a deployment, or the part that ``Supervisor`` describes; returns the exit code."""
    from attrs import evolve
    from rich.console import Console

    from commutator.cli.likely_mistakes import warnings_of
    from commutator.launcher.child import raise_descriptor_limit
    from commutator.launcher.output import Printer, PrinterHandler
    from commutator.launcher.ports import reserved_port
    from commutator.supervisor.placed_fleet import of_agents
    from commutator.supervisor.preflight import check_machine, fetch_models, machine_warnings
    from commutator.supervisor.supervisor import Supervisor

    raise_descriptor_limit()
    config = loaded.config
    here = config
    if engine is not None:  # what other hosts run need not work on this one
        here = evolve(config, engines=tuple(e for e in config.engines if e.name == engine))
    if of_agents(config) is not None:  # each worker's host checks itself
        must_launch_here(config, engine)
        here = evolve(config, engines=(), tiers=())
    fetch_models(here)
    check_machine(here, loaded.host, front_doors=front_doors != 0)

    async def supervise(port: int, printer: Printer) -> int:
        colour = Console().color_system is not None
        supervisor = Supervisor(
            loaded,
            port,
            printer,
            colour=colour,
            url_file=url_file,
            engine=engine,
            front_doors=front_doors,
        )
        return await supervisor.run()

    reserved: AbstractContextManager[int] = nullcontext(0)
    if front_doors != 0:
        reserved = reserved_port(config.frontend.door.host, config.frontend.door.port)
    with reserved as port:
        printer = Printer(config.log.format, colour=Console(stderr=True).color_system is not None)
        logging.basicConfig(level=config.log.level.upper(), handlers=[PrinterHandler(printer)])
        for warning in (*warnings_of(config, loaded.host), *machine_warnings(here, loaded.host)):
            log.warning("%s", warning)
        try:
            return asyncio.run(supervise(port, printer))
        finally:
            printer.close()
