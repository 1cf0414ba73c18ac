"""Agents as they were published do a task against a scripted deployment: `make test-agents`."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from itertools import pairwise
from pathlib import Path

import pytest
from tests.judges.clients.conftest import Program, Run
from tests.judges.clients.deployment import CONTEXT_TOKENS, MODEL, Scripted, called
from tests.judges.clients.table import Table

pytestmark = [pytest.mark.long, pytest.mark.clients]

FILES = {"a.txt": "The password is in b.txt.", "b.txt": "The password is heron-4711."}
QUESTION = "Which password does a.txt lead to?"
ANSWER = "It is heron-4711."
LEAST_CACHED = 0.9
THINKS = "<think>\nNow I know.\n</think>\n"


def ask_claude(program: Program, run: Run, work: Path, url: str) -> str:
    command = [program.path("claude"), "-p", QUESTION, "--model", MODEL]
    keys = {"ANTHROPIC_BASE_URL": url, "ANTHROPIC_API_KEY": "x"}
    said = json.loads(run([*command, "--output-format", "json"], work, **keys))
    assert not said["is_error"]
    assert said["num_turns"] == len(FILES) + 1
    return str(said["result"])


def ask_opencode(program: Program, run: Run, work: Path, url: str) -> str:
    model = {
        "name": MODEL,
        "tool_call": True,
        "limit": {"context": CONTEXT_TOKENS, "output": 4096},
    }
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": f"{url}/v1", "apiKey": "x"},
        "models": {MODEL: model},
    }
    settings = {
        "model": f"local/{MODEL}",
        "small_model": f"local/{MODEL}",
        "autoupdate": False,
        "share": "disabled",
        "provider": {"local": provider},
    }
    (work / "opencode.json").write_text(json.dumps(settings))
    printed = run([program.path("opencode"), "run", "--format", "json", QUESTION], work)
    parts = [json.loads(line)["part"] for line in printed.splitlines()]
    calls = [part["state"]["status"] for part in parts if part["type"] == "tool"]
    assert calls == ["completed"] * len(FILES)
    return str([part["text"] for part in parts if part["type"] == "text"][-1])


def ask_codex(
    program: Program, run: Run, work: Path, url: str, *, web_sockets: bool = False
) -> str:
    home = work / ".codex"
    home.mkdir()
    (home / "config.toml").write_text(f"""
model = "{MODEL}"
model_provider = "local"
[model_providers.local]
name = "local"
base_url = "{url}/v1"
wire_api = "responses"
supports_websockets = {str(web_sockets).lower()}
request_max_retries = 0
stream_max_retries = 0
""")
    command = [program.path("codex"), "exec", "--skip-git-repo-check", "-s", "read-only", "--json"]
    printed = run([*command, QUESTION], work, CODEX_HOME=str(home))
    items = [json.loads(line).get("item", {}) for line in printed.splitlines()]
    ended = [one for one in items if one.get("status") == "completed"]
    calls = [one for one in ended if one["type"] == "command_execution"]
    assert [one["aggregated_output"] for one in calls] == list(FILES.values())
    return str([one["text"] for one in items if one.get("type") == "agent_message"][-1])


def reads(tool: str, argument: str) -> Callable[[Path], str]:
    return lambda file: called(tool, {argument: str(file)}, thought="I look.", text="I look.")


def runs_cat(file: Path) -> str:
    return called("exec_command", {"cmd": f"cat {file}"}, thought="I look.")


Ask = Callable[[Program, Run, Path, str], str]
AGENTS: dict[str, tuple[str, Ask, str, Callable[[Path], str]]] = {
    "Claude Code": ("claude_code", ask_claude, '"name": "Read"', reads("Read", "file_path")),
    "OpenCode": ("opencode", ask_opencode, '"name": "read"', reads("read", "filePath")),
    "Codex": ("codex", ask_codex, '"name": "exec_command"', runs_cat),
    "Codex over WebSockets": (
        "codex",
        partial(ask_codex, web_sockets=True),
        '"name": "exec_command"',
        runs_cat,
    ),
}
"""Of each: its environment, how it is asked, what shows that it offers the tool, a call of it."""


@pytest.mark.parametrize("name", AGENTS)
def test_an_agent_reads_two_files(
    name: str, installed: Callable[[str], Program], run: Run, table: Table, tmp_path: Path
) -> None:
    """Three turns with thoughts and two calls; each finds the prompt of the one before cached."""
    environment, ask, offered, call = AGENTS[name]
    program = installed(environment)
    work = tmp_path / "work"
    work.mkdir()
    for file, text in FILES.items():
        (work / file).write_text(text)
    first, second = FILES
    answers = [
        (FILES[second], THINKS + ANSWER),
        (FILES[first], call(work / second)),
        (offered, call(work / first)),
        ("", '{"title": "Reading files"}'),
    ]
    with Scripted(tmp_path, answers) as running:
        assert ask(program, run, work, running.url) == ANSWER
        answered = running.answered()
    upgraded = [one for one in answered if one.status == HTTPStatus.SWITCHING_PROTOCOLS]
    assert bool(upgraded) == name.endswith("WebSockets")
    assert {one.status for one in answered if one not in upgraded} == {HTTPStatus.OK}
    turns = sorted(answered, key=lambda one: one.prompt_tokens)[-len(FILES) - 1 :]
    parts = [after.cached_tokens / before.prompt_tokens for before, after in pairwise(turns)]
    assert min(parts) >= LEAST_CACHED, turns
    found = " and ".join(f"{part:.3f}" for part in parts)
    said = f"yes; the second and third turn found {found} of the prompt before cached"
    table.add(name, program.versions, {"a task with two tool calls": said})
