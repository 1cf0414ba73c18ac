"""Sends 400 sessions to an alias, moves its weights while it runs, and asks what is too long."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from typing import Any

from aiohttp import ClientSession

from commutator_testing import LocalCluster

SESSIONS = 400


async def ask(session: ClientSession, prompt: str, **more: Any) -> tuple[str, str]:
    """The model that answered, and the header that tells of others."""
    body = {"prompt": prompt, "max_tokens": 4, **more}  # no model: the default
    async with session.post("/v1/completions", json=body) as answer:
        answer.raise_for_status()
        return (await answer.json())["model"], answer.headers.get("X-Commutator-Fallback", "")


async def served(session: ClientSession) -> dict[str, str]:
    """The version of each session."""
    names = [f"session-{number}" for number in range(SESSIONS)]
    answers = await asyncio.gather(*(ask(session, "Hello", session_id=name) for name in names))
    return {name: model for name, (model, _) in zip(names, answers, strict=True)}


async def apply(url: str, *values: str) -> None:
    sets = [word for value in values for word in ("--set", value)]
    command = [sys.executable, "-m", "commutator", "apply", *sets, "--wait", "--url", url]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    said, _ = await process.communicate()
    assert process.returncode == 0, said.decode()
    print(*said.decode().splitlines()[: len(values)], sep="\n")


def count(models: dict[str, str]) -> str:
    found = Counter(models.values())
    return ", ".join(f"{name} {found[name]}" for name in sorted(found))


async def main(config: str) -> None:
    with LocalCluster(config) as cluster:
        async with ClientSession(cluster.url) as session:
            before = await served(session)
            print(f"{SESSIONS} sessions: {count(before)}")
            weights = "traffic.aliases.default.models"
            await apply(cluster.url, f"{weights}.v1=75", f"{weights}.v2=25")
            after = await served(session)
            moved = Counter((before[name], after[name]) for name in before)
            print(f"{SESSIONS} sessions: {count(after)}")
            print(f"from v1 to v2: {moved['v1', 'v2']}, from v2 to v1: {moved['v2', 'v1']}")
            model, told = await ask(session, "word " * 600, session_id="session-0")
            print(f"a long prompt: {model}, because {told}")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
