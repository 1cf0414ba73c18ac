"""Open WebUI as it was published, against a scripted deployment: `make test-clients`.

Its server is what talks to models; it is asked as its own page asks it.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import requests
from tests.judges.clients.conftest import Program
from tests.judges.clients.deployment import MODEL, Scripted
from tests.judges.clients.table import Table

from commutator.launcher.ports import free_ports

pytestmark = [pytest.mark.long, pytest.mark.clients, pytest.mark.timeout(1200)]

START_S = 600
HELLO = "Hello."
TITLE = "A greeting"
ANSWERS = [("Generate a concise", json.dumps({"title": TITLE})), ("", HELLO)]


@contextmanager
def open_webui(program: Program, folder: Path, url: str) -> Iterator[str]:
    """Its own address; it knows one server of models, and starts without users."""
    (port,) = free_ports("127.0.0.1")
    settings = {
        "DATA_DIR": str(folder),
        "WEBUI_AUTH": "False",
        "WEBUI_SECRET_KEY": "x",
        "OPENAI_API_BASE_URL": f"{url}/v1",
        "OPENAI_API_KEY": "x",
        "ENABLE_OLLAMA_API": "False",
        "OFFLINE_MODE": "True",
        "HF_HUB_OFFLINE": "1",
        "RAG_EMBEDDING_ENGINE": "openai",  # otherwise it looks for a model of its own
        "HOME": str(folder),
        "PATH": os.environ["PATH"],
    }
    command = [program.path("open-webui"), "serve", "--host", "127.0.0.1", "--port", str(port)]
    folder.mkdir()
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, cwd=folder, env=settings, stdout=log, stderr=log)
        try:
            wait(f"http://127.0.0.1:{port}", process, folder / "log")
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def wait(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    until_s = time.monotonic() + START_S
    while time.monotonic() < until_s and process.poll() is None:
        try:
            requests.get(f"{url}/health", timeout=10).raise_for_status()
        except requests.RequestException:
            time.sleep(0.5)
        else:
            return
    pytest.fail(log.read_text()[-4000:])


def test_open_webui(installed: Callable[[str], Program], table: Table, tmp_path: Path) -> None:
    program = installed("open_webui")
    with (
        Scripted(tmp_path, ANSWERS) as running,
        open_webui(program, tmp_path / "data", running.url) as url,
        requests.Session() as session,
    ):

        def ask(path: str, **body: Any) -> requests.Response:
            said = session.post(f"{url}{path}", json=body, timeout=120)
            assert said.status_code == 200, said.text
            return said

        token = ask("/api/v1/auths/signin", email="", password="").json()["token"]
        session.headers["Authorization"] = f"Bearer {token}"
        models = session.get(f"{url}/api/models", timeout=60).json()["data"]
        assert [one["id"] for one in models if one["owned_by"] == "openai"] == [MODEL]

        chat = {"model": MODEL, "messages": [{"role": "user", "content": "Say hello."}]}
        whole = ask("/api/chat/completions", **chat, stream=False).json()
        assert whole["choices"][0]["message"]["content"] == HELLO
        lines = ask("/api/chat/completions", **chat, stream=True).text.splitlines()
        chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        deltas = [one["delta"] for chunk in chunks for one in chunk["choices"]]
        assert "".join(one.get("content") or "" for one in deltas) == HELLO
        history = [*chat["messages"], {"role": "assistant", "content": HELLO}]
        titled = ask("/api/v1/tasks/title/completions", model=MODEL, messages=history).json()
        said = titled["choices"][0]["message"]["content"]
        assert json.loads(said) == {"title": TITLE}
        answered = running.answered(chats=3)
    assert len([one for one in answered if one.path == "/v1/chat/completions"]) == 3
    assert {one.status for one in answered} == {200}
    asked = ("models", "chat", "chat, stream", "title of a chat")
    table.add("Open WebUI", program.versions, dict.fromkeys(asked, "yes"))
