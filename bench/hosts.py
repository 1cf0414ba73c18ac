"""What workers on another host cost: chats under load, plain and with TLS, against one host.

Hosts are network namespaces of this machine, so that both ends share its cores, as on one host:
what is measured is the work of TCP between hosts and of TLS, not a network's own time. All
deployments run at the same time and are measured in short turns, as in ``keys``; all front doors
are on the same host, and the client is on another.
"""

from __future__ import annotations

import json
import os
import secrets
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import attrs
import yaml
from tests.support.hosts import Host, hosts, why_not

from bench.load import LOAD, WORKERS, config
from bench.needs import NotInstalledError, needs_command
from bench.result import Figure
from bench.waiting import answer_of, wait_until
from bench.wrk import WRK

WORDS = (20, 400, 3000)
DEPLOYMENTS = 2
TURNS = 8
"""With each deployment."""
TURN_S = 1
WARM_UP_S = 3
READY_S = 300.0
COMMUTATOR = (sys.executable, "-m", "commutator")
ONE, PLAIN, TLS = "one host", "plain text", "TLS"


def run() -> list[Figure]:
    needs_command(*WRK)
    if (reason := why_not()) is not None:
        raise NotInstalledError(reason)
    turns: dict[int, list[dict[str, float]]] = {words: [] for words in WORDS}
    for _ in range(DEPLOYMENTS):
        for words, found in compared().items():
            turns[words] += found
    return [figure(words, kind, turns[words]) for words in WORDS for kind in (PLAIN, TLS)]


def compared() -> dict[int, list[dict[str, float]]]:
    """By words of a prompt, requests a second of each deployment in each turn."""
    with ExitStack() as stack:
        places = stack.enter_context(hosts(2))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-hosts-")))
        started = [
            stack.enter_context(Deployment(kind, 8000 + number, places, folder))
            for number, kind in enumerate((ONE, PLAIN, TLS))
        ]
        for one in started:
            one.wait_ready()
        urls = {one.kind: one.url for one in started}
        return {words: measured(words, urls) for words in WORDS}


def measured(words: int, urls: Mapping[str, str]) -> list[dict[str, float]]:
    load = attrs.evolve(LOAD, words=words)
    for url in urls.values():
        load.run(url, WARM_UP_S)
    order = list(urls)
    turns = []
    for _ in range(TURNS):
        turns.append({kind: load.run(urls[kind], TURN_S).rate for kind in order})
        order = [*order[1:], order[0]]
    return turns


def figure(words: int, kind: str, turns: Sequence[Mapping[str, float]]) -> Figure:
    here = statistics.median(turn[ONE] for turn in turns)
    ratio = statistics.median(turn[kind] / turn[ONE] for turn in turns)
    what = f"requests/s, {words:,} words, workers on another host, {kind}"
    return Figure("hosts", what, ratio * here, here, "1/s", "workers on the same host")


class Deployment:
    """A front door on the first host, workers there or on the second."""

    def __init__(self, kind: str, port: int, places: Sequence[Host], folder: Path) -> None:
        self.kind = kind
        self._port = port
        self._places = places
        self._folder = folder / str(port)
        self._processes: list[subprocess.Popen[bytes]] = []
        self._secret = secrets.token_hex(16)

    @property
    def url(self) -> str:
        return f"http://{self._places[0].address}:{self._port}"

    def __enter__(self) -> Self:
        self._folder.mkdir()
        here, there = self._places
        if self.kind == ONE:
            self._begin(here, "serve", self._written("one.yaml", {}))
            return self
        if self.kind == TLS:
            self._command("certs", "init", "--cluster", "bench")
            for host in self._places:
                self._command("certs", "issue", "--name", host.name, "--ip", host.address)
        self._begin(there, "worker", self._of(there), "--engine", "sim")
        self._begin(here, "frontend", self._of(here))
        return self

    def __exit__(self, *_: object) -> None:
        for process in reversed(self._processes):
            process.terminate()
        for process in self._processes:
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def wait_ready(self) -> None:
        """Raises TimeoutError, with the logs, when it is not ready in time."""
        wait_until(
            lambda: self._ready_workers() == WORKERS,
            f"workers of {self.kind}",
            READY_S,
            logs=self._folder,
            processes=self._processes,
        )

    def _ready_workers(self) -> int:
        answer = answer_of(f"{self.url}/health")
        workers = [] if answer is None else json.loads(answer)["workers"]
        return sum(one["state"] == "ready" for one in workers)

    def _of(self, host: Host) -> str:
        files = {part: f"certs/{host.name}.{end}" for part, end in
                 (("cert_file", "pem"), ("key_file", "key"))}  # fmt: skip
        secured = {"tls": {"ca_file": "certs/ca.pem", **files}} if self.kind == TLS else {}
        place = {"listen": host.address, **({} if secured else {"name": host.name})}
        open_ = {} if secured else {"insecure": True}
        sections: dict[str, Any] = {
            "cluster": {"name": "bench", "host": place, **secured, **open_},
            "registry": {
                "kind": "memory",
                "address": f"{self._places[1].address}:{self._port - 1000}",
            },
        }
        return self._written(f"{host.name}.yaml", sections)

    def _written(self, name: str, sections: dict[str, Any]) -> str:
        values = config(1) | sections | {"runtime": {"secret": {"env": "BENCH_SECRET"}}}
        values["engines"] = [{**engine, "name": "sim"} for engine in values["engines"]]
        values["frontend"] = {"host": "0.0.0.0", "port": self._port}
        (self._folder / name).write_text(yaml.safe_dump(values))
        return name

    def _begin(self, host: Host, *argv: str) -> None:
        with (self._folder / f"{host.name}.log").open("wb") as log:
            self._processes.append(
                subprocess.Popen(
                    host.command(*COMMUTATOR, *argv),
                    cwd=self._folder,
                    env=self._env(),
                    stdout=log,
                    stderr=log,
                )
            )

    def _command(self, *argv: str) -> None:
        subprocess.run([*COMMUTATOR, *argv], cwd=self._folder, check=True, capture_output=True)

    def _env(self) -> dict[str, str]:
        return {**os.environ, "BENCH_SECRET": self._secret}
