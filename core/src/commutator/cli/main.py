"""The entry point: a table of commands, each imported only when it is used."""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Mapping
from typing import IO, Any

import click

from commutator import __version__
from commutator.errors import CommutatorError

__all__ = ["main"]

COMMANDS: Mapping[str, tuple[str, str]] = {
    "serve": ("commutator.cli.serve:serve", "Run a whole deployment on this machine."),
    "plugins": ("commutator.cli.plugins:plugins", "List the installed plugins."),
    "config": ("commutator.cli.config:config", "Check or show a configuration."),
    "worker": (
        "commutator.cli.worker:worker",
        "List workers; drain one, bring it back, change its role.",
    ),
    "route": ("commutator.cli.route:route", "Ask a running deployment about its routing."),
    "kv": ("commutator.cli.kv:kv", "See and change what lies in storage tiers; measure them."),
    "replay": ("commutator.cli.replay:replay", "Replay a trace over simulated workers."),
    "demo": ("commutator.cli.demo:demo", "Hold a scripted conversation and show what happened."),
}


class Failure(click.ClickException):
    """An error of ours: one block on standard error, exit code 1."""

    exit_code = 1

    def show(self, file: IO[Any] | None = None) -> None:
        stream = file or sys.stderr
        head, _, rest = self.message.partition("\n")
        click.secho(f"error: {head}", fg="red", bold=True, file=stream)
        if rest:
            click.echo(rest, file=stream)


class LazyGroup(click.Group):
    """Knows names and one-line helps; a command's module is imported when it is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        del ctx
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        del ctx
        if cmd_name not in COMMANDS:
            return None
        module, _, name = COMMANDS[cmd_name][0].partition(":")
        command: click.Command = getattr(importlib.import_module(module), name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        del ctx
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except CommutatorError as error:
            raise Failure(str(error)) from error


@click.group(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Example: commutator serve examples/quickstart.yaml --port 8000",
)
@click.version_option(__version__, prog_name="commutator")
def main() -> None:
    """Serve LLMs from many workers behind one OpenAI-compatible door."""
    # Until a command sets logging up, findings are told by the command, not by the log.
    logging.getLogger("commutator").addHandler(logging.NullHandler())


if __name__ == "__main__":
    main()
