"""The command line. Core's commands and those of other distributions are imported on use."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import suppress
from pkgutil import resolve_name
from typing import IO, Any

import click

from commutator import __version__
from commutator.cli.added import PACKAGES, AddedCommands
from commutator.errors import CommutatorError, PluginError

_CONTRACT = ".".join(__version__.split(".")[:2])
"""Of plugins; its definition is not imported for the help alone."""
_PYTHON = ".".join(map(str, sys.version_info[:3]))

COMMANDS: Mapping[str, tuple[str, str]] = {
    "serve": ("commutator.cli.serve:serve", "Run a whole deployment on this machine."),
    "frontend": ("commutator.cli.serve:frontend", "Run only front doors, for a cluster's workers."),
    "config": ("commutator.cli.config:config", "Check or show a configuration; print its schema."),
}
"""Core's commands: import path and one-line help of each."""

_MEANT = {"status": ["worker ls", "top"], "health": ["worker ls", "top"]}
"""For words that people try first, the commands that answer them."""


class Failure(click.ClickException):
    """A CommutatorError: its message on standard error, exit code 1."""

    exit_code = 1

    def show(self, file: IO[Any] | None = None) -> None:
        stream = file or sys.stderr
        head, _, rest = self.message.partition("\n")
        click.secho(f"error: {head}", fg="red", bold=True, file=stream)
        if rest:
            click.echo(rest, file=stream)


class LazyGroup(click.Group):
    """Lists commands without importing them; a command's module is imported when it is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        del ctx
        return [*COMMANDS, *_added().commands]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in COMMANDS:
            command: click.Command = resolve_name(COMMANDS[cmd_name][0])
            return command
        added = _added()
        if (found := added.load(ctx, cmd_name)) is not None:
            return found
        if ctx.resilient_parsing:
            return None
        if added.problems:  # one of them may have it
            raise added.problems[0]
        if near := self._near(ctx, cmd_name):
            names = " or ".join(f"'{name}'" for name in near)
            raise click.UsageError(f"No such command '{cmd_name}'. Did you mean {names}?", ctx)
        return None

    def _near(self, ctx: click.Context, cmd_name: str) -> list[str]:
        """Commands of groups with this name, or names like it.

        Click looks only among commands that are imported.
        """
        from difflib import get_close_matches

        known = [*self.list_commands(ctx), *(name for name in PACKAGES if " " not in name)]
        inside = []
        for name in self.list_commands(ctx):
            with suppress(PluginError):  # one that cannot be imported is not what is meant
                group = self.get_command(ctx, name)
                if isinstance(group, click.Group) and cmd_name in group.commands:
                    inside.append(f"{name} {cmd_name}")
        return _MEANT.get(cmd_name) or inside or get_close_matches(cmd_name, known, n=1)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        del ctx
        added = _added()
        rows = [(name, text) for name, (_, text) in COMMANDS.items()]
        rows += [(name, command.help) for name, command in added.commands.items()]
        with formatter.section("Commands"):
            formatter.write_dl(rows)
        for problem in added.problems:
            with formatter.section("Not loaded"):
                formatter.write_text(str(problem))

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except CommutatorError as error:
            raise Failure(str(error)) from error


def _added() -> AddedCommands:
    return AddedCommands(own=COMMANDS)


@click.group(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Example: commutator serve examples/quickstart.yaml --port 8000",
)
@click.version_option(
    __version__,
    prog_name="commutator",
    message=f"%(prog)s %(version)s (plugin contract {_CONTRACT}, Python {_PYTHON})",
)
def main() -> None:
    """Serve LLMs from many workers behind one OpenAI-compatible server."""
    import logging  # the help needs none

    # Until a command configures logging, its output reports all problems.
    logging.getLogger("commutator").addHandler(logging.NullHandler())


if __name__ == "__main__":
    main()
