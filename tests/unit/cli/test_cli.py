"""The command line as a newcomer meets it."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
import yaml
from click.testing import CliRunner, Result

from commutator import __version__
from commutator.cli.main import COMMANDS, main

GOOD = """
models: [{name: m, source: package:m}]
engines: [{kind: reference, replicas: 2}]
frontend: {api_keys: [{env: COMMUTATOR_TEST_KEY}]}
"""


def run(*arguments: str, env: dict[str, str] | None = None) -> Result:
    return CliRunner().invoke(main, list(arguments), env=env)


@pytest.fixture
def good(tmp_path: Path) -> str:
    (tmp_path / "good.yaml").write_text(GOOD)
    return str(tmp_path / "good.yaml")


def test_version() -> None:
    assert run("--version").output == f"commutator, version {__version__}\n"


def test_help_names_every_command_and_gives_an_example() -> None:
    done = run("--help")
    assert done.exit_code == 0
    for name, (_, text) in COMMANDS.items():
        assert f"{name} " in done.output
        assert text in done.output
    assert "Example:" in done.output


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(name: str) -> None:
    done = run(name, "--help")
    assert done.exit_code == 0, done.output
    assert "Usage: " in done.output


def test_help_is_quick() -> None:
    """The best of five in CPU time, because the machine may be busy."""
    best_s = float("inf")
    for _ in range(5):
        begun_s = _cpu_of_children_s()
        subprocess.run(
            [sys.executable, "-m", "commutator", "--help"], check=True, capture_output=True
        )
        best_s = min(best_s, _cpu_of_children_s() - begun_s)
    assert best_s < 0.4


def _cpu_of_children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@pytest.mark.parametrize(
    "arguments", [["sevre"], ["serve"], ["serve", "absent.yaml"], ["plugins", "--jsno"]]
)
def test_a_wrong_command_line_is_exit_code_2(arguments: list[str]) -> None:
    assert run(*arguments).exit_code == 2


def test_check_says_ok(good: str) -> None:
    done = run("config", "check", good)
    assert (done.exit_code, done.output) == (0, f"{good}: ok\n")


def test_check_reads_the_files_that_are_here(good: str, tmp_path: Path) -> None:
    template = tmp_path / "t.jinja"
    template.write_text("{% if %}")
    done = run("config", "check", good, "--set", f"models[0].chat_template={template}")
    assert done.exit_code == 1
    assert done.stderr == (
        "error: files that it names: 1 problem\n"
        f"  models[0].chat_template: {template}: its syntax is wrong in line 1: Expected an "
        "expression, got 'end of statement block'\n"
    )


@pytest.mark.parametrize("command", [["config", "check"], ["config", "show"], ["serve"]])
def test_mistakes_are_one_block_on_stderr(good: str, command: list[str]) -> None:
    done = run(*command, good, "--set", "engines[0].replicas=two", "--set", "log.levl=info")
    assert done.exit_code == 1
    assert done.stdout == ""
    assert done.stderr == (
        f"error: {good}: 2 problems\n"
        '  engines[0].replicas: expected an integer from 1 to 10000, got "two" '
        "(from --set engines[0].replicas)\n"
        '  log.levl: unknown key; did you mean "level"? (from --set log.levl)\n'
    )


def test_show_gives_values_origins_and_no_secret(good: str) -> None:
    env = {"COMMUTATOR_TEST_KEY": "sk-very-secret", "COMMUTATOR__FRONTEND__PORT": "9000"}
    done = run("config", "show", good, "--set", "engines.0.replicas=3", env=env)
    assert done.exit_code == 0
    assert "sk-very-secret" not in done.output
    shown = yaml.safe_load(done.output)
    assert shown["engines"][0]["replicas"] == 3
    assert shown["frontend"]["port"] == 9000
    assert shown["frontend"]["api_keys"] == [{"env": "COMMUTATOR_TEST_KEY"}]
    comments = [line.rpartition("  # ")[2] for line in done.output.splitlines() if "port:" in line]
    assert comments == ["env COMMUTATOR__FRONTEND__PORT"]


def test_the_schema_describes_the_examples(root: Path) -> None:
    schema = json.loads(run("config", "schema").output)
    for example in (root / "examples").glob("*.yaml"):
        jsonschema.validate(yaml.safe_load(example.read_text()), schema)


def test_plugins_as_json() -> None:
    listed = {plugin["name"]: plugin for plugin in json.loads(run("plugins", "--json").output)}
    assert listed["round_robin"]["kinds"] == [
        {"seam": "router", "kind": "round_robin", "stability": "stable"}
    ]
    assert listed["round_robin"]["hooks"] == ["router_register"]
    assert listed["round_robin"]["problem"] is None
    assert listed["reference"]["distribution"] == "commutator-reference"


def entry(output: str, name: str) -> str:
    """The lines about one plugin: its own and those indented below it."""
    about, inside = [], False
    for line in output.splitlines():
        inside = line.startswith(f"{name} ") or (inside and line.startswith(" "))
        about += [line] if inside else []
    return "\n".join(about)


def test_plugins_for_people() -> None:
    about = entry(run("plugins").output, "round_robin")
    for part in ("commutator-round-robin 0", "router round_robin (stable)", "router_register"):
        assert part in about


def test_a_blocked_plugin_says_so() -> None:
    about = entry(run("plugins", "--no-plugin", "reference").output, "reference")
    assert "blocked" in about
    assert "engine reference" not in about


def test_a_blocked_plugin_that_is_needed_is_named(good: str) -> None:
    done = run("config", "check", good, "--no-plugin", "reference")
    assert done.exit_code == 1
    assert 'no installed plugin offers the engine "reference"' in done.stderr
    assert "not loaded: reference (commutator-reference): blocked" in done.stderr


def test_plugins_without_heavy_libraries() -> None:
    code = (
        "import sys\n"
        "for name in ('torch', 'numpy', 'aiohttp', 'tokenizers', 'transformers', 'gguf'):\n"
        "    sys.modules[name] = None\n"
        "from commutator.cli.main import main\n"
        "main(['plugins', '--json'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert all(plugin["problem"] is None for plugin in json.loads(done.stdout))


def test_a_plugin_that_breaks_the_contract_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "broken_plugin.py").write_text(
        "from commutator import hookimpl\n@hookimpl\ndef engine_regster(register): pass\n"
    )
    info = tmp_path / "broken-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[commutator]\nbroken = broken_plugin\n")
    done = subprocess.run(
        [sys.executable, "-m", "commutator", "plugins"],
        capture_output=True, text=True, check=False, env={"PYTHONPATH": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.splitlines() == ["error: plugin broken: unknown hook engine_regster"]
