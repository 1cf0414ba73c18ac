"""Front doors before a real vLLM server under load: CPU, requests per second, time to first token.

Ours over the token API and over HTTP, vLLM's own HTTP API alone, and two published routers, in
turns before the same server. Its model has one layer with random weights, so that the engine is as
fast beside its front doors as on a GPU. Needs `make vllm` and `make peers`.
"""

from __future__ import annotations

import asyncio
import statistics
import subprocess
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import yaml
from attrs import frozen

from bench.needs import needs
from bench.result import Figure
from commutator.launcher.ports import free_ports
from commutator_engine_kit.launching import api_key_at
from commutator_scaffold.local_cluster import LocalCluster

ROOT = Path(__file__).resolve().parent.parent
ROUTERS = {
    "sglang-router": ("sglang-router", "launch"),
    "vllm-router": ("vllm-router",),
}
MODEL = "smollm2-135m"
AT_ONCE = 32
REQUESTS = 128
"""In one turn of one front door."""
TOKENS = 32
ROUNDS = 5
WORDS = 40
PYTHON = ROOT / ".venv-vllm" / "bin" / "python"
READY_S = 600.0
ENGINE = (
    "--dtype=float32",
    "--enforce-eager",
    "--block-size=32",
    "--kv-cache-memory-bytes=268435456",
    "--load-format=dummy",
    '--hf-overrides={"num_hidden_layers":1}',
    "--max-num-seqs=64",
    "--disable-uvicorn-access-log",
)
AIMED = ("cpu_s", "requests_per_s", "ttft_ms")
ALONE, WIRE, HTTP = "vLLM alone", "token API", "HTTP"


@frozen
class Way:
    """One way to the server's engine; ``fronts`` are the processes before the server, if any."""

    url: str
    headers: Mapping[str, str]
    fronts: tuple[psutil.Process, ...] = ()


@frozen
class Turn:
    """One turn of one way."""

    requests_per_s: float
    ttft_ms: float
    """The median."""
    cpu_s: float
    """Of the processes before the engine, the server's HTTP process included, by 1,000 tokens."""
    front_cpu_s: float
    """The front door's part of ``cpu_s``."""
    engine_cpu_s: float
    """Of the engine's own processes, by 1,000 tokens."""


def run() -> list[Figure]:
    needs(PYTHON, "make vllm")
    wire = measured("token_api", ROUTERS)
    http = measured("http", {})
    return [*compared(WIRE, wire), *compared(HTTP, http)]


def measured(connection: str, routers: Mapping[str, Sequence[str]]) -> dict[str, list[Turn]]:
    """Turns by way, before one server that front doors reach over ``connection``."""
    config: dict[str, Any] = yaml.safe_load((ROOT / "examples" / "vllm.yaml").read_text())
    config["engines"][0] |= {
        "replicas": 1,
        "start_timeout_s": READY_S,
        "connection": connection,
        "args": list(ENGINE),
    }
    with ExitStack() as stack:
        cluster = stack.enter_context(LocalCluster(config, start_timeout_s=READY_S))
        assert cluster.process is not None
        server = process_with(cluster, "vllm.entrypoints.openai.api_server")
        words = server.cmdline()
        direct = f"http://127.0.0.1:{words[words.index('--port') + 1]}"
        key = {"Authorization": f"Bearer {api_key_at(direct)}"}
        ours = WIRE if connection == "token_api" else HTTP
        ways = {
            ours: Way(cluster.url, {}, (process_with(cluster, "commutator.frontend.process"),)),
            ALONE: Way(direct, key),
        }
        for name, command in routers.items():
            url, process = stack.enter_context(router(command, direct))
            ways[name] = Way(url, key, (process,))
        return asyncio.run(in_turns(ways, server))


def compared(ours: str, turns: Mapping[str, list[Turn]]) -> Iterator[Figure]:
    """Ours beside each other way of the same run."""
    for other in turns.keys() - {ours}:
        for what, name, unit, higher in (
            ("CPU seconds for 1,000 streamed tokens without the engine's", "cpu_s", "s", False),
            ("of these, the front door's", "front_cpu_s", "s", False),
            ("CPU seconds for 1,000 streamed tokens of the engine", "engine_cpu_s", "s", False),
            ("requests per second", "requests_per_s", "/s", True),
            ("time to the first token, p50", "ttft_ms", "ms", False),
        ):
            mine, theirs = (
                statistics.median(getattr(turn, name) for turn in turns[way])
                for way in (ours, other)
            )
            yield Figure(
                "vllm",
                f"{ours}, {AT_ONCE} connections: {what}",
                mine,
                theirs,
                unit,
                other,
                aim="1" if other == ALONE and ours == WIRE and name in AIMED else "",
                higher_is_better=higher,
            )


def process_with(cluster: LocalCluster, word: str) -> psutil.Process:
    assert cluster.process is not None
    (found,) = (
        process
        for process in psutil.Process(cluster.process.pid).children(recursive=True)
        if word in process.cmdline()
    )
    return found


@contextmanager
def router(
    command: Sequence[str], *urls: str, policy: str = "round_robin"
) -> Iterator[tuple[str, psutil.Process]]:
    """A published router before the servers at ``urls``: its own URL, and its process."""
    program = needs(ROOT / ".venv-routers" / "bin" / command[0], "make peers")
    port, metrics = free_ports("127.0.0.1", 2)
    arguments = ["--worker-urls", *urls, "--host", "127.0.0.1", "--port", str(port)]
    arguments += ["--prometheus-port", str(metrics), "--policy", policy]
    process = subprocess.Popen(
        [program, *command[1:], *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        yield f"http://127.0.0.1:{port}", psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait(30)


async def in_turns(ways: Mapping[str, Way], server: psutil.Process) -> dict[str, list[Turn]]:
    found: dict[str, list[Turn]] = defaultdict(list)
    numbers = count()
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:
        for way in ways.values():
            await until_ready(session, way)
            await turn(session, way, server, numbers)  # what comes first is slow
        names = list(ways)
        for number in range(ROUNDS):
            for name in names if number % 2 else reversed(names):
                found[name].append(await turn(session, ways[name], server, numbers))
    return found


async def turn(
    session: aiohttp.ClientSession, way: Way, server: psutil.Process, numbers: Iterator[int]
) -> Turn:
    """REQUESTS answers of TOKENS tokens, AT_ONCE at a time."""
    waiting = iter([f"{next(numbers)} " + "and so on " * (WORDS // 3) for _ in range(REQUESTS)])
    ttft_ms: list[float] = []

    async def client() -> None:
        for prompt in waiting:
            first_ms = await ask(session, way, prompt)
            ttft_ms.append(first_ms)

    engine = server.children(recursive=True)
    groups = ([server, *way.fronts], way.fronts, engine)
    before_s = [cpu_s(group) for group in groups]
    started_s = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(AT_ONCE)))
    taken_s = time.perf_counter() - started_s
    thousands = REQUESTS * TOKENS / 1000
    both, front, core = (
        (cpu_s(group) - first_s) / thousands
        for group, first_s in zip(groups, before_s, strict=True)
    )
    return Turn(
        requests_per_s=REQUESTS / taken_s,
        ttft_ms=statistics.median(ttft_ms),
        cpu_s=both,
        front_cpu_s=front,
        engine_cpu_s=core,
    )


async def until_ready(session: aiohttp.ClientSession, way: Way) -> None:
    until_s = time.monotonic() + READY_S
    while True:
        try:
            await ask(session, way, "Are you there?")
        except (aiohttp.ClientError, AssertionError):
            if time.monotonic() > until_s:
                raise
            await asyncio.sleep(0.5)
        else:
            return


async def ask(session: aiohttp.ClientSession, way: Way, prompt: str) -> float:
    """Milliseconds to the first part of one streamed answer, which is read to its end."""
    body = {
        "model": MODEL,
        "prompt": prompt,
        "max_tokens": TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    started_s, first_ms, last = time.perf_counter(), 0.0, b""
    url = f"{way.url}/v1/completions"
    async with session.post(url, json=body, headers=way.headers) as answer:
        assert answer.status == 200, await answer.text()
        async for data in answer.content.iter_any():
            first_ms = first_ms or (time.perf_counter() - started_s) * 1000
            last = (last + data)[-200:]
    assert last.rstrip().endswith(b"[DONE]"), last
    return first_ms


def cpu_s(processes: Sequence[psutil.Process]) -> float:
    return sum(sum(process.cpu_times()[:2]) for process in processes)
