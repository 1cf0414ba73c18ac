"""An endpoint picker behind a real Envoy: what it adds to one that asks nobody.

Prompts have 4 kB and shared beginnings. The client, Envoy with one worker thread, the picker's one
process and the engines, which cost next to nothing, share the machine. Beside our KV routing the
same picker takes workers in turn, and another Envoy asks nobody; all are measured in turns. A piece
of a streamed answer costs what the picker's process spends on it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from bench.envoy import envoy_config, running_envoy
from bench.load import Case, in_turns
from bench.needs import needs_command
from bench.result import Figure
from bench.routers import http_engine, over_http
from bench.wrk import WRK, Measured
from commutator.launcher.ports import free_ports
from commutator_scaffold.local_cluster import LocalCluster

WORDS = 680
"""Some 4 kB."""
CASES = tuple(Case(WORDS, connections, turns=3, turn_s=3) for connections in (1, 8, 64))
PICKER, IN_TURN, REQUEST_ONLY, NOBODY = (
    "KV routing",
    "workers in turn",
    "KV routing, answers not shown",
    "Envoy alone",
)
_MOST_MS = 4.0
_LEAST_RATE = 700


def run() -> list[Figure]:
    needs_command(*WRK)
    with ExitStack() as stack:
        engines = [stack.enter_context(http_engine()) for _ in range(2)]
        ports = {
            name: stack.enter_context(picker(engines, policy))
            for name, policy in ((PICKER, "kv"), (IN_TURN, "round_robin"))
        }
        asked = {
            PICKER: ([ports[PICKER]], "FULL_DUPLEX_STREAMED"),
            IN_TURN: ([ports[IN_TURN]], "FULL_DUPLEX_STREAMED"),
            REQUEST_ONLY: ([ports[PICKER]], "NONE"),
            NOBODY: ([], "NONE"),
        }
        urls = {
            name: stack.enter_context(gateway(engines, pickers, mode))
            for name, (pickers, mode) in asked.items()
        }
        return [figure for case in CASES for figure in figures(case, in_turns(case, urls))]


@contextmanager
def picker(engines: Sequence[str], policy: str) -> Iterator[int]:
    """The port of an endpoint picker."""
    (port,) = free_ports("127.0.0.1")
    door = {"kind": "endpoint_picker", "port": port, "protocols": [{"kind": "openai"}]}
    config: dict[str, Any] = {
        **over_http(engines),
        "router": {"kind": policy},
        "frontend": {"doors": [{"port": 0, "protocols": [], "operations": "open"}, door]},
    }
    with LocalCluster(config):
        yield port


@contextmanager
def gateway(engines: Sequence[str], pickers: Sequence[int], mode: str) -> Iterator[str]:
    """The URL of an Envoy before ``engines``."""
    port, admin = free_ports("127.0.0.1", 2)
    pods = [one.removeprefix("http://") for one in engines]
    config = envoy_config(port, admin, pickers, pods, response_body_mode=mode)
    with (
        tempfile.TemporaryDirectory(prefix="bench-envoy-") as folder,
        running_envoy(config, Path(folder)),
    ):
        yield f"http://127.0.0.1:{port}"


def figures(case: Case, turns: dict[str, list[Measured]]) -> Iterator[Figure]:
    rates = {name: median(turn.rate for turn in found) for name, found in turns.items()}
    p50s_ms = {name: median(turn.p50_ms for turn in found) for name, found in turns.items()}
    for name in (PICKER, IN_TURN, REQUEST_ONLY):
        what = f"{case.connections} connections, {name}"
        least = f">= {_LEAST_RATE}" if name == PICKER and case.connections > 1 else ""
        rate = f"requests/s, {what}"
        yield Figure("gateway", rate, rates[name], rates[NOBODY], "1/s", NOBODY, least)
        most = f"<= + {_MOST_MS:g}" if name == PICKER and case.connections == 1 else ""
        both = p50s_ms[name], p50s_ms[NOBODY]
        latency = f"latency p50, {what}"
        yield Figure("gateway", latency, *both, "ms", NOBODY, most, higher_is_better=False)
