"""Agents' sessions through our front door, and through Dynamo's with its parsers on.

Both have the same prompts, templates and answers, workers that only simulate, and the same client,
which knows what to send: it reads answers only as far as it measures them.
"""

from __future__ import annotations

import asyncio
import json
import re
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

import psutil
from attrs import define, field, frozen

from bench.dynamo_cluster import DynamoCluster
from bench.load import DYNAMO, cpu_s, until_idle
from bench.result import Figure
from commutator_scaffold.local_cluster import LocalCluster

__all__ = ["Agent", "beside_dynamo"]

CONNECTIONS = 32
ROUNDS = 3
ROUND_S = 5.0
WARM_UP_S = 3.0
WORKERS = 2
OURS = "ours"
AIM = "at least 4 times"
_ANSWER = "call"
"""The name of the answer in what Dynamo replays."""
_END = b"\r\n0\r\n\r\n"
"""The last chunk of an HTTP answer."""
_FUNCTION = b'"function":{'
_CALLED = re.compile(rb'"finish_reason":\s*"tool_calls"')
_numbers = count()


@frozen
class Agent:
    """What all sessions have in common."""

    model: str
    source: str
    template: Path
    tools: Sequence[Mapping[str, Any]]
    answer: str
    """As the model writes it: one call."""
    function: Mapping[str, Any]
    """The call: name, and arguments as an object."""
    turns: int
    """Of a session."""


@define
class Measured:
    """What one door did."""

    took_s: float = 0.0
    cpu_s: float = 0.0
    """Of the whole deployment. Unlike the rest, it says something on a busy machine, too."""
    answers: int = 0
    first_call_s: list[float] = field(factory=list)


def beside_dynamo(agent: Agent, config: Mapping[str, Any]) -> Iterator[Figure]:
    """``config`` is our deployment. Raises NotInstalledError without the peer."""
    with ExitStack() as stack:
        peer = DynamoCluster(
            agent.model,
            agent.source,
            workers=WORKERS,
            template=agent.template.read_text(),
            tool_parser="hermes",
            said={_ANSWER: agent.answer},
        )
        replay = {"nvext": {"annotations": [f"output_replay_id:{_ANSWER}"]}}
        doors: dict[str, Door] = {}
        clusters: dict[str, DynamoCluster | LocalCluster] = {DYNAMO: peer}
        clusters[OURS] = LocalCluster({**config})
        for name, cluster in clusters.items():
            before = {one.pid for one in psutil.Process().children(recursive=True)}
            stack.enter_context(cluster)
            more = replay if name == DYNAMO else {}
            own = [
                one for one in psutil.Process().children(recursive=True) if one.pid not in before
            ]
            doors[name] = Door(cluster.url, bodies_of(agent, more), own)
        for door in doors.values():
            asyncio.run(door.check(agent.function))
            asyncio.run(door.load(WARM_UP_S))
            until_idle()
        found: dict[str, list[Measured]] = {name: [] for name in doors}
        for number in range(ROUNDS):
            for name in sorted(doors, reverse=bool(number % 2)):
                found[name].append(asyncio.run(doors[name].load(ROUND_S)))
                until_idle()
    load = f"{CONNECTIONS} connections, {agent.turns} turns, {len(agent.tools)} tools"
    yield from figures(found, load)


def figures(found: Mapping[str, Sequence[Measured]], what: str) -> Iterator[Figure]:
    """Medians of the rounds."""

    def median(of: Callable[[Measured], float]) -> tuple[float, float]:
        ours, theirs = (statistics.median(map(of, found[name])) for name in (OURS, DYNAMO))
        return ours, theirs

    used_ms = median(lambda one: one.cpu_s / one.answers * 1000)
    said = f"CPU of all processes a request, {what}"
    yield Figure("agents", said, *used_ms, "ms", DYNAMO, higher_is_better=False)
    rates = median(lambda one: one.answers / one.took_s)
    yield Figure("agents", f"requests/s, {what}", *rates, "1/s", DYNAMO, AIM)
    for percent, aim in ((50, ""), (99, "below it")):
        times = median(partial(quantile_ms, percent=percent))
        said = f"first token of a call p{percent}, {what}"
        yield Figure("agents", said, *times, "ms", DYNAMO, aim, higher_is_better=False)


def quantile_ms(measured: Measured, percent: int) -> float:
    return statistics.quantiles(measured.first_call_s, n=100)[percent - 1] * 1000


def bodies_of(agent: Agent, more: Mapping[str, Any]) -> Callable[[], Iterator[bytes]]:
    """Makes the bodies of a new session's turns, ``more`` in each."""
    options: dict[str, Any] = {"model": agent.model, "stream": True, "max_tokens": 64, **more}
    head = json.dumps({**options, "tools": agent.tools})[:-1].encode() + b', "messages": ['
    function = {**agent.function, "arguments": json.dumps(agent.function["arguments"])}

    def bodies() -> Iterator[bytes]:
        session = f"{next(_numbers)}"
        said = [{"role": "user", "content": f"user {session}: find rain"}]
        text = json.dumps(said)[1:-1].encode()
        for turn in range(agent.turns):
            yield b"%b%b]}" % (head, text)
            name = f"call_{turn}"
            call = {"id": name, "type": "function", "function": function}
            result = f"result {turn} of {session}"
            added = [
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "tool_call_id": name, "content": result},
            ]
            text += b", " + json.dumps(added)[1:-1].encode()

    return bodies


@frozen
class Door:
    """A front door, and what is sent to it."""

    url: str
    bodies: Callable[[], Iterator[bytes]]
    processes: Sequence[psutil.Process]
    """Of the deployment."""

    async def load(self, duration_s: float) -> Measured:
        """Sessions one after another on each connection, for ``duration_s``.

        Raises RuntimeError for what is no call.
        """
        found = Measured()
        began_s, used_s = time.perf_counter(), cpu_s(self.processes)
        async with asyncio.TaskGroup() as group:
            for _ in range(CONNECTIONS):
                group.create_task(self._converse(found, began_s + duration_s))
        found.took_s = time.perf_counter() - began_s
        found.cpu_s = cpu_s(self.processes) - used_s
        return found

    async def _converse(self, found: Measured, end_s: float) -> None:
        async with Connection(self.url) as connection:
            while time.perf_counter() < end_s:
                for body in self.bodies():
                    said, first_s = await connection.ask(body)
                    if not (said.startswith(b"HTTP/1.1 200 ") and first_s and _CALLED.search(said)):
                        raise RuntimeError(f"an answer is no call: {said[:2000]!r}")
                    found.answers += 1
                    found.first_call_s.append(first_s)
                    if time.perf_counter() >= end_s:
                        return

    async def check(self, function: Mapping[str, Any]) -> None:
        """Raises RuntimeError unless a turn is answered by the call, and by nothing else."""
        async with Connection(self.url) as connection:
            said, _ = await connection.ask([*self.bodies()][-1])
        chunks = [json.loads(one) for one in re.findall(rb"data: (\{.*\})", said)]
        deltas = [one["delta"] for chunk in chunks for one in chunk["choices"]]
        pieces = [one["function"] for delta in deltas for one in delta.get("tool_calls") or ()]
        name = "".join(one.get("name") or "" for one in pieces)
        arguments = "".join(one.get("arguments") or "" for one in pieces)
        text = "".join(delta.get("content") or "" for delta in deltas)
        if text.strip() or {"name": name, "arguments": json.loads(arguments or "0")} != function:
            raise RuntimeError(f"{self.url} answered something else: {said[-3000:]!r}")


class Connection:
    """One of HTTP 1.1 that is kept: a client that costs little beside what it measures."""

    def __init__(self, url: str) -> None:
        target = urlsplit(url)
        self._address = target.hostname, target.port
        self._head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: {target.netloc}\r\n"
            "Content-Type: application/json\r\nContent-Length: "
        ).encode()

    async def __aenter__(self) -> Self:
        self._reader, self._writer = await asyncio.open_connection(*self._address)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._writer.close()

    async def ask(self, body: bytes) -> tuple[bytes, float]:
        """The whole answer, and the seconds until a call began; 0: none did."""
        began_s, first_s, parts = time.perf_counter(), 0.0, list[bytes]()
        self._writer.write(b"%b%d\r\n\r\n%b" % (self._head, len(body), body))
        while not (parts and parts[-1].endswith(_END)):
            part = await self._reader.read(1 << 16)
            if not part:
                raise RuntimeError(f"an answer has no end: {b''.join(parts)[-2000:]!r}")
            if not first_s and _FUNCTION in part:
                first_s = time.perf_counter() - began_s
            parts.append(part)
        return b"".join(parts), first_s
