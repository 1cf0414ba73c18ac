"""``commutator completion``: what a shell needs to complete commands and options."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import click
from click.shell_completion import get_completion_class

from commutator.errors import CommutatorError

_PROGRAM = "commutator"
_VARIABLE = "_COMMUTATOR_COMPLETE"
"""By which the shell asks the program for what could follow; click's own name for it."""
_FILES: Mapping[str, tuple[str, str, str]] = {
    "bash": ("XDG_DATA_HOME", ".local/share", "bash-completion/completions/commutator"),
    "zsh": ("ZDOTDIR", "", ".zfunc/_commutator"),
    "fish": ("XDG_CONFIG_HOME", ".config", "fish/completions/commutator.fish"),
}
"""Where each shell looks: a folder, by a variable or else below the home; the file in it."""
_NEXT = {
    "bash": "Open a new shell. It needs the package bash-completion.",
    "zsh": "If ~/.zshrc does not have it: fpath+=(~/.zfunc); autoload -Uz compinit; compinit",
    "fish": "Open a new shell.",
}


@click.command(epilog="Example: commutator completion bash --install")
@click.argument("shell", type=click.Choice(list(_FILES)), required=False)
@click.option("--install", is_flag=True, help="Write it where the shell finds it.")
def completion(shell: str | None, install: bool) -> None:
    """Print the script that makes SHELL complete commands and options.

    SHELL is bash, zsh or fish; by default, that of the variable SHELL.
    """
    shell = shell or _own_shell()
    complete = get_completion_class(shell)
    assert complete is not None, "click knows every shell of _FILES"
    # The command itself is not asked: the script only needs its name.
    script = complete(click.Command(_PROGRAM), {}, _PROGRAM, _VARIABLE).source()
    if not install:
        click.echo(script)
        return
    file = _file(shell)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(script + "\n", encoding="utf-8")
    except OSError as error:
        raise CommutatorError(f"{file} cannot be written: {error.strerror}") from error
    click.echo(f"Wrote {file}.")
    click.secho("Next:", bold=True)
    click.echo(f"  {_NEXT[shell]}")


def _own_shell() -> str:
    name = Path(os.environ.get("SHELL", "")).name
    if name not in _FILES:
        raise click.UsageError(
            f"completion is known for {', '.join(_FILES)}, and the variable SHELL names none of "
            "them; name one, such as: commutator completion bash"
        )
    return name


def _file(shell: str) -> Path:
    variable, below_home, file = _FILES[shell]
    return Path(os.environ.get(variable) or Path.home() / below_home) / file
