"""``commutator serve``."""

from __future__ import annotations

import asyncio
import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from commutator.cli.options import files_argument, override_options

if TYPE_CHECKING:
    from commutator.config.load import Loaded

__all__ = ["serve"]

log = logging.getLogger(__name__)


@click.command(
    epilog="Example: commutator serve examples/quickstart.yaml --set engines[0].replicas=1"
)
@files_argument
@override_options
@click.option("--port", type=click.IntRange(0, 65535), help="Port to listen on; 0 picks one.")
@click.option(
    "--url-file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write the front door's URL to this file when everything is ready.",
)
def serve(
    files: tuple[Path, ...],
    sets: tuple[str, ...],
    no_plugins: tuple[str, ...],
    port: int | None,
    url_file: Path | None,
) -> None:
    """Run the deployment that FILE describes; later files override earlier ones.

    Without FILE, the one that commutator.yaml describes.

    Starts the workers and the front door, watches them, and restarts those that fail. Ctrl-C
    lets running requests finish; a second Ctrl-C stops at once.
    """
    from commutator.config.load import load_config

    if url_file is not None:
        if not url_file.parent.is_dir():
            raise click.BadParameter(f"no such folder: {url_file.parent}", param_hint="--url-file")
        url_file.unlink(missing_ok=True)  # a process that waits for it must not find an old one
    loaded = load_config(files, sets=sets, port=port, no_plugins=no_plugins)
    sys.exit(_serve(loaded, url_file))


def _serve(loaded: Loaded, url_file: Path | None) -> int:
    """Returns the exit code."""
    from rich.console import Console

    from commutator.config.checks import tier_warnings
    from commutator.launcher.child import raise_descriptor_limit
    from commutator.launcher.output import Printer, PrinterHandler
    from commutator.launcher.ports import reserved_port
    from commutator.supervisor.preflight import check_machine, machine_warnings
    from commutator.supervisor.supervisor import Supervisor

    raise_descriptor_limit()
    config = loaded.config
    check_machine(config, loaded.host)

    async def supervise(port: int, printer: Printer) -> int:
        colour = Console().color_system is not None
        supervisor = Supervisor(loaded, port, printer, colour=colour, url_file=url_file)
        return await supervisor.run()

    with reserved_port(config.frontend.host, config.frontend.port) as port:
        printer = Printer(config.log.format, colour=Console(stderr=True).color_system is not None)
        logging.basicConfig(level=config.log.level.upper(), handlers=[PrinterHandler(printer)])
        for warning in (
            *tier_warnings(config, loaded.host),
            *machine_warnings(config, loaded.host),
        ):
            log.warning("%s", warning)
        try:
            return asyncio.run(supervise(port, printer))
        finally:
            printer.close()
