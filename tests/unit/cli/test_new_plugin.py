"""`commutator new-plugin`: what it writes, says and refuses. That it works is in tests/e2e."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import tomllib
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from commutator.cli.main import main
from commutator_scaffold.new_plugin import KINDS, plugin_files


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["new-plugin", *arguments])


@pytest.mark.parametrize("kind", KINDS)
def test_every_file_is_valid(kind: str, root: Path, tmp_path: Path) -> None:
    for path, text in plugin_files(kind, "my_own"):
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    ruff = [sys.executable, "-m", "ruff"]
    rules = ["--select", "ANN,B,E,F,I,N,PT,RET,SIM,UP"]
    style = ["--isolated", "--line-length", "100"]
    for command in (["check", *rules, *style], ["format", "--check", *style]):
        done = subprocess.run(
            [*ruff, *command, "."], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
    if KINDS[kind].deployed:
        assert yaml.safe_load((tmp_path / "cluster.yaml").read_text())
    page, _, anchor = KINDS[kind].page.partition("#")
    headings = re.findall(r"^#+ (.*)$", (root / page).read_text(), re.MULTILINE)
    assert not anchor or anchor in {re.sub(r"[^\w -]", "", line).lower() for line in headings}
    assert find_spec(KINDS[kind].module) is not None


def test_it_says_what_it_made_and_what_next(tmp_path: Path) -> None:
    folder = tmp_path / "plugin"
    done = run("router", "my-own", "--folder", str(folder))
    assert done.exit_code == 0, done.output
    made = {str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()}
    assert made == {
        "README.md",
        "cluster.yaml",
        "pyproject.toml",
        "src/commutator_my_own/__init__.py",
        "src/commutator_my_own/py.typed",
        "tests/conftest.py",
        "tests/test_my_own.py",
    }
    assert f"Made a routing policy in {folder}/:" in done.output
    assert "pip install -e '.[test]' && pytest" in done.output


def test_it_overwrites_nothing(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("precious")
    done = run("router", "my_own", "--folder", str(tmp_path))
    assert (done.exit_code, done.stdout) == (1, "")
    assert f"{tmp_path} is not empty; remove it, or choose another --folder" in done.stderr
    assert [file.name for file in tmp_path.iterdir()] == ["mine"]


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("Mine", '"Mine" cannot name a Python package; use up to 40 lower-case letters'),
        ("class", '"class" cannot name a Python package'),
        ("../x", "cannot name a Python package"),
        ("round_robin", '"round_robin" is already a plugin of commutator-round-robin'),
        ("least_loaded", '"least_loaded" is already a plugin of commutator-'),
        ("testing", "the package commutator_testing is already installed; choose another name"),
    ],
)
def test_a_name_that_cannot_be_is_refused(tmp_path: Path, name: str, problem: str) -> None:
    done = run("router", name, "--folder", str(tmp_path / "plugin"))
    assert done.exit_code == 2
    assert problem in " ".join(done.stderr.split())
    assert not (tmp_path / "plugin").exists()


@pytest.mark.parametrize("name", ["serve", "new-plugin", "top"])
def test_a_command_that_there_is_is_refused(tmp_path: Path, name: str) -> None:
    done = run("command", name, "--folder", str(tmp_path / "plugin"))
    assert done.exit_code == 2
    assert f'"{name}" is already a command of commutator; choose another name' in done.stderr
    done = run("router", "serve", "--folder", str(tmp_path / "plugin"))
    assert done.exit_code == 0, "which is no command"


def test_it_names_what_is_installed_to_read_on(tmp_path: Path) -> None:
    done = run("limiter", "my_own", "--folder", str(tmp_path / "plugin"))
    last = done.output.splitlines()[-1]
    assert "python -m pydoc commutator.contract.limiter" in last
    assert "python -m pydoc commutator.contract.limiter" in (
        (tmp_path / "plugin" / "README.md").read_text()
    )


def test_the_generated_command_takes_url_and_key_of_the_environment() -> None:
    made: dict[str, Any] = {"__name__": "made"}
    exec(dict(plugin_files("command", "mine"))["src/commutator_mine/command.py"], made)
    keys = []

    class Door(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            keys.append(self.headers["Authorization"])
            self.send_response(200 if self.path == "/ready" else 404)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Door) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        for key, sent in [("cmt-1", "Bearer cmt-1"), (None, None)]:
            env = {"COMMUTATOR_URL": f"{url}/", "COMMUTATOR_API_KEY": key}
            done = CliRunner().invoke(made["command"], [], env=env)
            assert done.output == f"{url}/ is ready\n"
            assert keys.pop() == sent
        server.shutdown()


def test_its_help_lists_the_kinds() -> None:
    told = " ".join(run("--help").output.split())
    assert "new-plugin [OPTIONS] KIND NAME" in told
    assert f"KIND is one of: {', '.join(KINDS)}." in told


def test_an_unknown_kind_names_the_known_ones() -> None:
    done = run("rooter", "my_own")
    assert done.exit_code == 2
    assert all(kind in done.stderr for kind in KINDS)


def test_a_package_requires_what_its_deployment_needs() -> None:
    """With wheels alone, a tier finds no default eviction policy unless it asks for it."""
    pages = {kind: dict(plugin_files(kind, "mine"))["pyproject.toml"] for kind in KINDS}
    projects = {kind: tomllib.loads(page)["project"] for kind, page in pages.items()}
    tier, eviction = projects["tier"], projects["eviction"]
    assert tier["dependencies"] == [
        "attrs>=24.2", "commutator>=0.2,<0.3", "commutator-engine-kit[nixl]>=0.2,<0.3",
        "commutator-eviction>=0.2,<0.3"
    ]  # fmt: skip
    assert "commutator-dram>=0.2,<0.3" in eviction["optional-dependencies"]["test"]
    for project in projects.values():
        assert "commutator[testing]>=0.2,<0.3" in project["optional-dependencies"]["test"]
