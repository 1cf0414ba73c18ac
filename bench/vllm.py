"""Front doors before one real vLLM server: what each adds to a streamed answer, and its CPU time.

Ours and two published routers, asked in turns with the server itself; then vLLM's own client at
ours and at the server. Needs `make vllm` and `make peers`.
"""

from __future__ import annotations

import asyncio
import re
import socket
import statistics
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import aiohttp
import psutil
import yaml

from bench.needs import needs
from bench.result import Figure
from bench.vllm_client import ClientRun, bench_serve
from commutator.supervisor.local_cluster import LocalCluster

ROOT = Path(__file__).resolve().parent.parent
ROUTERS = {
    "sglang-router": ("sglang-router", "launch"),
    "vllm-router": ("vllm-router",),
}
MODEL = "smollm2-135m"
TOKENS = 24
ROUNDS = 100
CLIENT_ROUNDS = 4
PYTHON = ROOT / ".venv-vllm" / "bin" / "python"
READY_S = 600.0


def run() -> list[Figure]:
    needs(PYTHON, "make vllm")
    config = yaml.safe_load((ROOT / "examples" / "vllm.yaml").read_text())
    config["engines"][0] |= {"replicas": 1, "start_timeout_s": READY_S}
    with ExitStack() as stack:
        cluster = stack.enter_context(LocalCluster(config, start_timeout_s=READY_S))
        (server,) = re.findall(r"api_server --host (\S+) --port (\d+)", cluster.log())
        direct = "http://" + ":".join(server)
        assert cluster.process is not None
        fronts = {"ours": (cluster.url, front_door(cluster.process.pid))}
        for name, words in ROUTERS.items():
            fronts[name] = stack.enter_context(router(words, direct))
        found = asyncio.run(measure(direct, fronts))
        directory = re.findall(r"api_server .*--model (\S+)", cluster.log())[-1]
        return [*found, *by_its_own_client(cluster.url, direct, directory)]


def by_its_own_client(ours: str, direct: str, directory: str) -> Iterator[Figure]:
    """Both in turns, each run with prompts of its own, so that none is found in the cache."""
    runs: dict[str, list[ClientRun]] = {ours: [], direct: []}
    # What comes first is slow.
    bench_serve(PYTHON, direct, MODEL, directory, "random", seed=2 * CLIENT_ROUNDS)
    for number in range(CLIENT_ROUNDS):
        urls = [ours, direct] if number % 2 else [direct, ours]
        for side, url in enumerate(urls):
            seed = 2 * number + side
            runs[url].append(bench_serve(PYTHON, url, MODEL, directory, "random", seed=seed))
    failed = sum(run.failed for run in runs[ours])
    yield Figure(
        "vllm",
        f"`vllm bench serve`, {failed} failed: requests per second",
        statistics.median(run.requests_per_s for run in runs[ours]),
        statistics.median(run.requests_per_s for run in runs[direct]),
        "/s",
        "direct",
        aim="0.95",
    )
    yield Figure(
        "vllm",
        "`vllm bench serve`: mean time to the first token",
        statistics.median(run.mean_ttft_ms for run in runs[ours]),
        statistics.median(run.mean_ttft_ms for run in runs[direct]),
        "ms",
        "direct",
        aim="0.95",
        higher_is_better=False,
    )


def front_door(supervisor: int) -> psutil.Process:
    (found,) = (
        process
        for process in psutil.Process(supervisor).children(recursive=True)
        if "commutator.frontend.process" in process.cmdline()
    )
    return found


@contextmanager
def router(words: tuple[str, ...], url: str) -> Iterator[tuple[str, psutil.Process]]:
    program = needs(ROOT / ".venv-routers" / "bin" / words[0], "make peers")
    port, metrics = free_port(), free_port()
    arguments = ["--worker-urls", url, "--host", "127.0.0.1", "--port", str(port)]
    arguments += ["--prometheus-port", str(metrics), "--policy", "round_robin"]
    process = subprocess.Popen(
        [program, *words[1:], *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        yield f"http://127.0.0.1:{port}", psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait(30)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


async def measure(direct: str, fronts: Mapping[str, tuple[str, psutil.Process]]) -> list[Figure]:
    urls = {"direct": direct, **{name: url for name, (url, _) in fronts.items()}}
    taken_ms: dict[str, list[float]] = {name: [] for name in urls}
    async with aiohttp.ClientSession() as session:
        for url in urls.values():
            await until_ready(session, url)
        before = {name: cpu_s(process) for name, (_, process) in fronts.items()}
        for number in range(ROUNDS):
            for name, url in urls.items():
                taken_ms[name].append(await ask(session, url, f"Story {number} of {name}:"))
        used = {name: cpu_s(process) - before[name] for name, (_, process) in fronts.items()}
    return list(figures(taken_ms, used))


def figures(taken_ms: Mapping[str, list[float]], used_s: Mapping[str, float]) -> Iterator[Figure]:
    base = taken_ms["direct"]
    per_1000 = {name: seconds * 1000 / (ROUNDS * TOKENS) for name, seconds in used_s.items()}
    for other in ROUTERS:
        yield Figure(
            "vllm",
            "CPU seconds per 1,000 streamed tokens",
            per_1000["ours"],
            per_1000[other],
            "s",
            other,
            higher_is_better=False,
        )
    for quantile in (50, 99):
        direct = at(base, quantile)
        told = [f"{name} adds {at(taken_ms[name], quantile) - direct:.1f} ms" for name in used_s]
        yield Figure(
            "vllm",
            f"{TOKENS} tokens, p{quantile}; " + ", ".join(told),
            at(taken_ms["ours"], quantile),
            direct,
            "ms",
            "direct",
            higher_is_better=False,
        )


def at(values: list[float], quantile: int) -> float:
    return statistics.quantiles(values, n=100, method="inclusive")[quantile - 1]


async def until_ready(session: aiohttp.ClientSession, url: str) -> None:
    until_s = time.monotonic() + READY_S
    while True:
        try:
            await ask(session, url, "Are you there?")
        except (aiohttp.ClientError, AssertionError):
            if time.monotonic() > until_s:
                raise
            await asyncio.sleep(0.5)
        else:
            return


async def ask(session: aiohttp.ClientSession, url: str, prompt: str) -> float:
    """Milliseconds of one streamed answer."""
    body = {
        "model": MODEL,
        "prompt": prompt,
        "max_tokens": TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    started_s = time.perf_counter()
    async with session.post(f"{url}/v1/completions", json=body) as answer:
        text = await answer.text()
        assert answer.status == 200, text
        assert text.rstrip().endswith("[DONE]"), text[-200:]
    return (time.perf_counter() - started_s) * 1000


def cpu_s(process: psutil.Process) -> float:
    """Of the process and its children."""
    everyone = [process, *process.children(recursive=True)]
    return sum(sum(one.cpu_times()[:2]) for one in everyone)
