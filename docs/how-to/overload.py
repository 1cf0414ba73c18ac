"""Sends more requests than the workers take, and prints in which order they are served."""

from __future__ import annotations

import asyncio
import sys

from aiohttp import ClientSession

from commutator_testing import LocalCluster


async def ask(session: ClientSession, name: str, priority: int, tokens: int) -> None:
    body = {
        "model": "smollm2-135m",
        "prompt": f"Request {name}",
        "priority": priority,
        "max_tokens": tokens,
        "ignore_eos": True,
    }
    async with session.post("/v1/completions", json=body) as answer:
        error = (await answer.json()).get("error")
        print(f"{name}: {answer.status}" + (f" {error['message']}" if error else ""))


async def until(session: ClientSession, running: int, waiting: int) -> None:
    while True:
        async with session.get("/health") as answer:
            health = await answer.json()
        active = sum(worker["active_requests"] for worker in health["workers"])
        if (active, *health["waiting_for_a_worker"].values()) == (running, waiting):
            return
        await asyncio.sleep(0.01)


async def main(config: str) -> None:
    with LocalCluster(config) as cluster:
        async with ClientSession(cluster.url) as session, asyncio.TaskGroup() as group:
            for number in range(4):
                tokens = 300 << number  # so that they end one after the other
                group.create_task(ask(session, f"running {number}", 0, tokens))
            await until(session, 4, 0)
            for number, priority in enumerate([0, 5, -1, 0]):
                name = f"waiting {number}, priority {priority}"
                group.create_task(ask(session, name, priority, 2))
                await until(session, 4, number + 1)
            await ask(session, "one too many, priority 5", 5, 2)
            await ask(session, "one more, priority 0", 0, 2)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
