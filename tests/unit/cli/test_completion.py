"""`commutator completion`: the scripts, where they go, and what a real shell makes of them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from commutator.cli.main import main


def run(*arguments: str, **env: str) -> Result:
    return CliRunner().invoke(main, ["completion", *arguments], env=env)


@pytest.mark.parametrize(
    ("shell", "variable", "file"),
    [
        ("bash", "XDG_DATA_HOME", "bash-completion/completions/commutator"),
        ("zsh", "ZDOTDIR", ".zfunc/_commutator"),
        ("fish", "XDG_CONFIG_HOME", "fish/completions/commutator.fish"),
    ],
)
def test_the_script_is_written_where_the_shell_looks(
    shell: str, variable: str, file: str, tmp_path: Path
) -> None:
    done = run(shell, "--install", **{variable: str(tmp_path)})
    assert done.exit_code == 0, done.output
    assert f"Wrote {tmp_path / file}." in done.stdout
    assert (tmp_path / file).read_text() == run(shell).stdout
    assert f"_COMMUTATOR_COMPLETE={shell}_complete" in run(shell).stdout


def test_below_the_home_without_the_variable(tmp_path: Path) -> None:
    run("--install", SHELL="/usr/bin/fish", HOME=str(tmp_path), XDG_CONFIG_HOME="")
    assert (tmp_path / ".config" / "fish" / "completions" / "commutator.fish").is_file()


def test_a_shell_that_is_not_known() -> None:
    done = run(SHELL="/bin/tcsh")
    assert done.exit_code == 2
    assert "completion is known for bash, zsh, fish" in done.stderr


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = run("bash", "--install", XDG_DATA_HOME=str(tmp_path / "file"))
    assert done.exit_code == 1
    assert "cannot be written" in done.stderr


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is missing")
def test_bash_completes_commands_and_options(tmp_path: Path) -> None:
    script = tmp_path / "script"
    script.write_text(run("bash").stdout)
    asks = f"""
        source {script}
        COMP_WORDS=(commutator config c); COMP_CWORD=2; COMPREPLY=()
        _commutator_completion commutator; echo "${{COMPREPLY[@]}}"
        COMP_WORDS=(commutator serve --no); COMP_CWORD=2; COMPREPLY=()
        _commutator_completion commutator; echo "${{COMPREPLY[@]}}"
    """
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", asks],
        env={**os.environ, "PATH": path},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.splitlines() == ["check", "--no-plugin"], done.stderr
