"""The conformance suite for commands: subclass it, name the module, run pytest."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module

import click
from click.testing import CliRunner

from commutator.contract.commands import Command, CommandRegister

_LIGHT = {"commutator", "pluggy"}
_LONGEST_HELP = 80


class CommandContract:
    """What every command must do. ``module`` is what its entry point names."""

    documented_in = (
        "CommandRegister in docs/reference/contract/commands.md and docs/reference/hooks.md"
    )

    module: str
    """With the hook ``command_register``."""

    def commands(self) -> dict[str, Command]:
        """What the module registers, by name."""
        found: dict[str, Command] = {}
        import_module(self.module).command_register(register=CommandRegister(found, self.module))
        return found

    def test_it_registers_commands_with_a_line_of_help(self) -> None:
        """`commutator --help` shows the line."""
        found = self.commands()
        assert found, f"{self.module} registers no command"
        for one in found.values():
            assert len(one.help) <= _LONGEST_HELP, f"the help of {one.name} is no short line"

    def test_listing_it_imports_nothing_but_its_module(self) -> None:
        """Every `commutator --help` imports the module: what the command needs is for `load`."""
        code = (
            "import sys; before = set(sys.modules)\n"
            "from commutator.contract.commands import CommandRegister\n"
            f"import {self.module} as module\n"
            "module.command_register(register=CommandRegister({}, 'test'))\n"
            "print(*{name.split('.')[0] for name in set(sys.modules) - before})"
        )
        done = subprocess.run(  # noqa: S603 - the module is the author's own
            [sys.executable, "-c", code], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        allowed = _LIGHT | {self.module.split(".")[0]} | set(sys.stdlib_module_names)
        heavy = set(done.stdout.split()) - allowed
        assert not heavy, f"listing imports {', '.join(sorted(heavy))}: import them in load()"

    def test_its_help_says_how_to_use_it(self) -> None:
        for one in self.commands().values():
            command = one.load()
            assert isinstance(command, click.Command), f"load() of {one.name} gave {command!r}"
            done = CliRunner().invoke(command, ["--help"])
            assert done.exit_code == 0, done.output
            assert command.help, f"{one.name} has no docstring, which its --help would show"

    def test_a_wrong_option_is_exit_code_2(self) -> None:
        for one in self.commands().values():
            done = CliRunner().invoke(one.load(), ["--no-such-option"])
            assert done.exit_code == 2, f"{one.name}: {done.output}"
