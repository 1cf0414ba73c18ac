"""The command line as a newcomer meets it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import types
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import click
import jsonschema
import pytest
import yaml
from click.testing import CliRunner, Result

from commutator import __version__
from commutator import plugins as loading
from commutator.cli import added
from commutator.cli.added import GROUP
from commutator.cli.main import COMMANDS, main
from commutator.contract.commands import CommandRegister
from commutator.errors import PluginError
from commutator.hookspecs import hookimpl
from commutator_rollout.worker import requests_text

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
    said = run("--version").output
    assert said.startswith(f"commutator {__version__} (plugin contract 0.2, Python 3.")


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


def test_help_imports_no_command() -> None:
    code = (
        "import sys\n"
        "from commutator.cli.main import main\n"
        "main(['--help'], standalone_mode=False)\n"
        "print('MODULES', *sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    modules = done.stdout.split("MODULES ")[1].split()
    assert {name for name in modules if name.split(".")[0] == "commutator"} == {
        "commutator",
        "commutator.cli",
        "commutator.cli.added",
        "commutator.cli.main",
        "commutator.contract",
        "commutator.contract.commands",
        "commutator.errors",
        "commutator.faces",
        "commutator.hookspecs",
    }
    plugins = {name for name in modules if name.startswith("commutator_")}
    assert {name.removesuffix(".commands") for name in plugins} <= {
        "commutator_certs",
        "commutator_console",
        "commutator_doctor",
        "commutator_endpoint_picker",
        "commutator_kubernetes_tools",
        "commutator_models",
        "commutator_replay",
        "commutator_rollout",
        "commutator_scaffold",
        "commutator_slo",
    }
    assert not {"aiohttp", "attrs", "yaml", "rich", "msgspec", "cattrs"} & set(modules)


@pytest.mark.parametrize(
    "arguments", [["sevre"], ["serve"], ["serve", "absent.yaml"], ["plugins", "--jsno"]]
)
def test_a_wrong_command_line_is_exit_code_2(arguments: list[str]) -> None:
    assert run(*arguments).exit_code == 2


def test_check_says_ok(good: str) -> None:
    done = run("config", "check", good, "--elsewhere")
    assert (done.exit_code, done.output) == (0, f"{good}: ok\n")


def test_check_reads_the_files_that_are_here(good: str, tmp_path: Path) -> None:
    template = tmp_path / "t.jinja"
    template.write_text("{% if %}")
    done = run(
        "config", "check", good, "--elsewhere", "--set", f"models[0].chat_template={template}"
    )
    assert done.exit_code == 1
    assert done.stderr == (
        "error: files that it names: 1 problem\n"
        f"  models[0].chat_template: {template}: its syntax is wrong in line 1: Expected an "
        "expression, got 'end of statement block'\n"
    )


def test_check_refuses_what_serve_would(good: str) -> None:
    done = run("config", "check", good)
    assert (done.exit_code, done.stdout) == (1, "")
    assert 'models[0].source: the package "m" is not installed' in done.stderr
    assert "api_keys[0]: environment variable COMMUTATOR_TEST_KEY is not set" in done.stderr
    assert run("serve", good, "--port", "0").stderr == done.stderr


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
    door = shown["frontend"]["doors"][0]
    assert door["port"] == 9000
    assert door["api_keys"] == [{"env": "COMMUTATOR_TEST_KEY"}]
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


@pytest.mark.parametrize(
    ("code", "problem"),
    [
        ("def engine_regster(register): pass", 'unknown hook engine_regster; did you mean "engi'),
        ("def tier_register(register): 1 / 0", "tier_register raised ZeroDivisionError: division"),
    ],
)
def test_a_broken_plugin_is_reported_and_stops_only_what_needs_it(
    tmp_path: Path, code: str, problem: str
) -> None:
    (tmp_path / "broken_plugin.py").write_text(
        f"from commutator import hookimpl\n@hookimpl\n{code}\n"
    )
    info = tmp_path / "broken-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: steam-engine\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[commutator]\nbroken = broken_plugin\n")

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "commutator", *arguments],
            capture_output=True, text=True, check=False, env={"PYTHONPATH": str(tmp_path)},
        )  # fmt: skip

    done = run("plugins")
    assert done.returncode == 0
    assert f"not loaded: {problem}" in done.stdout
    assert "commutator-round-robin" in done.stdout
    example = Path(__file__).parents[3] / "examples" / "quickstart.yaml"
    done = run("config", "check", str(example))
    assert done.returncode == 0, done.stderr
    done = run("config", "check", str(example), "--set", "router={kind: steam}")
    assert done.returncode == 1
    assert 'no installed plugin offers the router "steam"' in done.stderr
    assert f"not loaded: broken (steam-engine): {problem}" in done.stderr


def plugin_of_commands(
    monkeypatch: pytest.MonkeyPatch, name: str, *commands: tuple[object, object, object]
) -> EntryPoint:
    """An entry point whose module registers ``commands``."""
    plugin = types.ModuleType(name)

    def command_register(register: Any) -> None:
        for one in commands:
            register(*one)

    plugin.command_register = hookimpl(command_register)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, name, plugin)
    return EntryPoint(name, name, GROUP)


def test_a_plugin_adds_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    @click.command()
    def hello() -> None:
        """Greet."""
        click.echo("good day")

    def never() -> click.Command:
        raise AssertionError("it was not used")

    points = [
        plugin_of_commands(
            monkeypatch,
            "greeter",
            ("hello", "Greet the user.", lambda: hello),
            ("planner hello", "Greet the planner.", lambda: hello),
        ),
        plugin_of_commands(monkeypatch, "lazy", ("never", "Do nothing.", never)),
        EntryPoint("planner", "commutator_slo.commands", GROUP),
    ]
    monkeypatch.setattr(added, "entry_points", lambda group: points)
    listed = run("--help").output
    assert re.search(r"hello +Greet the user\.\n", listed)
    assert re.search(r"never +Do nothing\.\n", listed)
    assert run("hello").output == "good day\n"
    assert run("planner", "hello").output == "good day\n"
    assert "hello " in run("planner", "--help").output
    assert "Did you mean 'hello'?" in run("helo").stderr


def test_a_plugin_whose_commands_are_wrong_is_named_and_the_others_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken() -> click.Command:
        raise ImportError("no module named steam")

    points = [
        EntryPoint("absent", "not_installed", GROUP),
        plugin_of_commands(monkeypatch, "broken", ("broken", "Fail.", broken)),
        plugin_of_commands(monkeypatch, "no_command", ("no-command", "Fail.", lambda: print)),
        plugin_of_commands(monkeypatch, "second", ("broken", "Fail too.", broken)),
        plugin_of_commands(monkeypatch, "serves", ("serve", "Serve better.", broken)),
        EntryPoint("unmarked", "json", GROUP),
    ]
    monkeypatch.setattr(added, "entry_points", lambda group: points)
    listed = " ".join(run("--help").output.split())
    for text in (
        "plugin not_installed: commands of not_installed cannot be listed: ModuleNotFoundError",
        'plugin second: command "broken": already registered by broken; uninstall one of the two',
        'plugin serves: command "serve": commutator itself has it; choose another name',
        "plugin json: json is in the entry-point group commutator.commands: define",
    ):
        assert text in listed
    assert "Run the deployment" in run("serve", "--help").output, "none replaces one of core's"
    done = run("broken")
    assert (done.exit_code, done.stdout) == (1, "")
    assert "plugin broken: command broken cannot be imported: ImportError(" in done.stderr
    assert "command no-command: expected a click.Command, got " in run("no-command").stderr
    assert "plugin not_installed: " in run("other").stderr, "it may have the command"


def test_commands_that_are_not_loaded_are_not_listed_as_if(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def never() -> click.Command:
        raise AssertionError("it was not used")

    points = [
        plugin_of_commands(
            monkeypatch,
            "some",
            ("serve", "Serve better.", never),
            ("hello", "Greet the user.", never),
            ("greet twice", "Greet twice.", never),
            ("config twice", "Check twice.", never),
        )
    ]
    console = EntryPoint("console", "commutator_console.commands", added.GROUP)  # has `plugins`
    monkeypatch.setattr(added, "entry_points", lambda group: [*points, console])
    monkeypatch.setattr(loading, "entry_points", lambda group: [])
    (told,) = (one for one in json.loads(run("plugins", "--json").stdout) if one["name"] == "some")
    assert told["commands"] == ["hello"]
    assert told["problem"].split("; command ") == [
        'command "serve": commutator itself has it; choose another name',
        '"greet twice": there is no group greet; register "greet" alone, with a click.Group',
        '"config twice": config takes no commands of others; choose another name',
    ]
    listed = run("plugins").output
    assert "    command hello\n" in listed
    assert "    command serve\n" not in listed
    assert '    not loaded: command "serve": commutator itself has it' in listed


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        (("Hello", "Greet.", print), "a name is a word such as new-plugin"),
        (("a b c", "Greet.", print), "a name is a word such as new-plugin"),
        (("hello", "", print), "its help must be one line, not ''"),
        (("hello", "Greet.\nTwice.", print), "its help must be one line"),
        (("hello", "Greet.", "greeter:hello"), "expected a function that returns the click.Comma"),
    ],
)
def test_a_command_that_breaks_the_contract_is_refused(
    given: tuple[Any, Any, Any], problem: str
) -> None:
    with pytest.raises(PluginError, match="plugin greeter: command ") as caught:
        CommandRegister({}, "greeter")(*given)
    assert problem in str(caught.value)


@pytest.mark.parametrize("command", added.PACKAGES)
def test_a_command_that_is_not_installed_names_its_package(
    monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setattr(added, "entry_points", lambda group: [])
    done = run(*command.split(), "argument")
    assert done.exit_code == 2
    word = command.split(maxsplit=1)[
        0
    ]  # without the package of a group there is none of its commands
    package = added.PACKAGES[word]
    assert f"{word} comes with {package}: pip install {package}" in done.stderr


@pytest.mark.parametrize("command", added.PACKAGES)
def test_our_packages_bring_the_commands_that_errors_say_they_do(command: str) -> None:
    group, _, name = command.rpartition(" ")
    found = added.AddedCommands(group).commands[name]
    assert found.distribution == added.PACKAGES[command]
    done = run(*command.split(), "--help")
    assert done.exit_code == 0, done.output


def test_a_misspelled_command_names_the_likely_one() -> None:
    done = run("serv")
    assert done.exit_code == 2
    assert "No such command 'serv'. Did you mean 'serve'?" in done.stderr
    assert "Did you mean 'worker ls' or 'top'?" in run("status").stderr
    assert "Did you mean 'planner explain' or 'route explain'?" in run("explain").stderr
    assert run("--help").exit_code == 0
    assert "Did you mean" not in run("nothing-like-any").stderr


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 requests"), (1, "1 request"), (2, "2 requests")]
)
def test_one_request_is_one_request(count: int, text: str) -> None:
    assert requests_text(count) == text


def test_without_a_file_it_is_the_one_that_init_writes(
    good: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    missing = run("config", "check")
    assert missing.exit_code == 2
    assert "no commutator.yaml here either; `commutator init` writes one" in missing.stderr
    (tmp_path / "commutator.yaml").write_text(Path(good).read_text())
    env = {"COMMUTATOR_TEST_KEY": "k"}
    done = run("config", "check", "--elsewhere", env=env)
    assert done.stdout == "commutator.yaml: ok\n", done.stderr
