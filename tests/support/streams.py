"""Streams of a real front door, and the engine processes behind it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from typing import Any

import aiohttp
import psutil
from attrs import define, field

from commutator_scaffold.local_cluster import LocalCluster

__all__ = ["Answer", "engine_processes", "stream", "timed_stream"]


@define
class Answer:
    """One streamed completion."""

    worker: str = ""
    text: str = ""
    events: int = 0
    outcome: str = "cut off"
    """ "complete" or "error event" are the clean ends."""
    error: Mapping[str, Any] | None = None
    usage: Mapping[str, Any] = field(factory=dict)


async def stream(
    session: aiohttp.ClientSession,
    url: str,
    body: Mapping[str, Any],
    heard: Callable[[int], None] = lambda _: None,
) -> Answer:
    """POST a completion as a stream; ``heard`` gets the number of events so far."""
    asked = {**body, "stream": True, "stream_options": {"include_usage": True}}
    answer = Answer()
    async with session.post(f"{url}/v1/completions", json=asked) as response:
        assert response.status == 200, await response.text()
        answer.worker = response.headers["X-Commutator-Worker"]
        async for line in response.content:
            if line.startswith(b"data: [DONE]"):
                answer.outcome = "complete"
            elif line.startswith(b"data: "):
                _take(answer, json.loads(line[6:]))
                heard(answer.events)
    return answer


async def timed_stream(
    session: aiohttp.ClientSession, url: str, body: Mapping[str, Any]
) -> tuple[Answer, float]:
    """As ``stream``, and the longest time between two of its events, in seconds."""
    last_s, gap_s = time.monotonic(), 0.0

    def heard(_: int) -> None:
        nonlocal last_s, gap_s
        now_s = time.monotonic()
        last_s, gap_s = now_s, max(gap_s, now_s - last_s)

    return await stream(session, url, body, heard), gap_s


def _take(answer: Answer, data: Mapping[str, Any]) -> None:
    answer.events += 1
    if "error" in data:
        answer.outcome, answer.error = "error event", data["error"]
        return
    answer.text += "".join(choice["text"] for choice in data["choices"])
    answer.usage = data.get("usage") or answer.usage


def engine_processes(cluster: LocalCluster, module: str) -> dict[int, psutil.Process]:
    """The engines of the cluster that run ``python -m module``, by process id."""
    assert cluster.process is not None
    children = psutil.Process(cluster.process.pid).children(recursive=True)
    found = {}
    for process in children:
        try:
            if module in process.cmdline():
                found[process.pid] = process
        except psutil.NoSuchProcess:
            continue
    return found
