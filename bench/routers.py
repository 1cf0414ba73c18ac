"""Front doors before HTTP engines under load: ours, beside two published routers.

The engines cost next to nothing, so that what is measured is the work of what is before them. The
routers pass text on and choose a worker by it; ours also renders the template, tokenizes, and makes
the text of the answer. With the token API there is nothing else in between, and the workers are
`sim`. All run at the same time and are measured in turns.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from statistics import median
from typing import Any

from bench.load import LOAD, MODEL, WORKERS, Case, config, in_turns
from bench.needs import needs_command
from bench.result import Figure
from bench.sample import check_chats
from bench.vllm import ROUTERS, router
from bench.waiting import answer_of, wait_until
from bench.wrk import WRK, Measured
from commutator.launcher.ports import free_ports
from commutator_scaffold.local_cluster import LocalCluster

HTTP, WIRE = "HTTP engines", "token API"
CASES = tuple(
    Case(words, connections, turns=3, turn_s=3) for connections in (32, 512) for words in (20, 400)
)
_READY_S = 30.0


def run() -> list[Figure]:
    needs_command(*WRK)
    with ExitStack() as stack:
        engines = [stack.enter_context(http_engine()) for _ in range(WORKERS)]
        urls = {
            HTTP: stack.enter_context(LocalCluster(over_http(engines))).url,
            WIRE: stack.enter_context(LocalCluster(config(1))).url,
        }
        for url in urls.values():
            check_chats(url, MODEL, LOAD.tokens)
        for name, command in ROUTERS.items():
            url, _ = stack.enter_context(router(command, *engines, policy="cache_aware"))
            wait_ready(f"{url}/health")
            urls[name] = url
        return [figure for case in CASES for figure in figures(case, in_turns(case, urls))]


def over_http(engines: Sequence[str]) -> dict[str, Any]:
    attached = [
        {"kind": "vllm", "name": f"http-{number}", "url": url} for number, url in enumerate(engines)
    ]
    return {**config(1), "engines": attached}


@contextmanager
def http_engine() -> Iterator[str]:
    """The URL of an engine of ``bench.http_engine``."""
    (port,) = free_ports("127.0.0.1")
    process = subprocess.Popen([sys.executable, "-m", "bench.http_engine", str(port)])
    try:
        url = f"http://127.0.0.1:{port}"
        wait_ready(f"{url}/health")
        yield url
    finally:
        process.terminate()
        process.wait()


def wait_ready(url: str) -> None:
    """Raises TimeoutError when it does not answer in time."""
    wait_until(lambda: answer_of(url) is not None, f"an answer of {url}", _READY_S)


def figures(case: Case, turns: dict[str, list[Measured]]) -> Iterator[Figure]:
    rates = {name: median(turn.rate for turn in found) for name, found in turns.items()}
    p99s_ms = {name: median(turn.p99_ms for turn in found) for name, found in turns.items()}
    better = max(ROUTERS, key=lambda name: rates[name])
    for ours, aim in ((HTTP, ">= 0.5 of the better"), (WIRE, "ahead of both")):
        what = f"{case.words:,} words, {case.connections} connections, ours, {ours}"
        for name in ROUTERS:
            rate = f"requests/s, {what}"
            stated = aim if name == better else ""
            yield Figure("routers", rate, rates[ours], rates[name], "1/s", name, stated)
            p99 = (p99s_ms[ours], p99s_ms[name])
            said = f"latency p99, {what}"
            yield Figure("routers", said, *p99, "ms", name, higher_is_better=False)
