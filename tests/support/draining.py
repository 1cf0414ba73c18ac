"""Workers are drained in turn under traffic, and have nothing to do as long as they are."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import aiohttp
from click.testing import CliRunner
from tests.support.streams import stream

from commutator.cli.main import main

__all__ = ["drain_in_turn"]

_WAIT_S = 600.0


async def drain_in_turn(
    url: str,
    model: str,
    workers: Sequence[str],
    work: Callable[[str], Awaitable[float]],
    clients: int = 4,
    new_tokens: int = 8,
) -> Counter[str]:
    """Let ``clients`` stream without pause; how many answers each worker has served.

    Every one must be complete. ``work`` is a number that a worker tells of itself and that stays
    as it is while it rests.
    """
    stop, served, turns = asyncio.Event(), Counter[str](), Counter[int]()

    async def ask(session: aiohttp.ClientSession, number: int) -> None:
        while not stop.is_set():
            body: dict[str, Any] = {
                "model": model,
                "prompt": f"{turns[number]} times client {number} has asked",
                "max_tokens": new_tokens,
                "ignore_eos": True,
            }
            answer = await stream(session, url, body)
            assert answer.outcome == "complete", answer
            assert answer.usage["completion_tokens"] == new_tokens
            served[answer.worker] += 1
            turns[number] += 1

    async def all_were_answered() -> None:
        """What was begun before has been read to its end."""
        before = turns.copy()
        while any(turns[number] == before[number] for number in range(clients)):
            await asyncio.sleep(0.05)

    async def until(worker: str, count: int) -> None:
        wanted = served[worker] + count
        while served[worker] < wanted:
            await asyncio.sleep(0.05)

    async def drained(worker: str, other: str) -> None:
        await until(worker, 3)
        said = await _command("drain", worker, "--url", url, "--wait", "300")
        assert said == f"{worker} gets no new requests and has none left\n"
        await all_were_answered()
        before = served[worker], await work(worker)
        await until(other, 2 * clients)
        after = served[worker], await work(worker)
        assert after == before, f"{worker} went on"
        await _command("undrain", worker, "--url", url)
        await until(worker, 3)

    timeout = aiohttp.ClientTimeout(total=_WAIT_S)
    async with (
        asyncio.timeout(_WAIT_S),
        aiohttp.ClientSession(timeout=timeout) as session,
        asyncio.TaskGroup() as group,
    ):
        for number in range(clients):
            group.create_task(ask(session, number))
        for number, worker in enumerate(workers):
            await drained(worker, workers[number - 1])
        stop.set()
    return served


async def _command(*arguments: str) -> str:
    done = await asyncio.to_thread(CliRunner().invoke, main, ["worker", *arguments])
    assert done.exit_code == 0, done.output
    return done.output
