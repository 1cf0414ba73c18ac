"""Finds the workers of a running deployment, and asks them about their storage tiers."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from attrs import frozen

from commutator.cli.route import call
from commutator.engine.client import TokenApiClient
from commutator.errors import CommutatorError, EngineError

__all__ = ["Worker", "ask_tiers", "find_workers"]


@frozen
class Worker:
    """One worker on this machine."""

    worker_id: str
    model: str
    address: str


def find_workers(url: str, api_key: str | None, worker_id: str | None = None) -> list[Worker]:
    """The workers behind the front door that listen on this machine.

    Raises CommutatorError when nothing answers there, or when there is no such worker.
    """
    _, health = call(f"{url}/health", api_key)
    known = health["workers"]
    if worker_id is not None:
        known = [worker for worker in known if worker["worker_id"] == worker_id]
        if not known:
            names = ", ".join(worker["worker_id"] for worker in health["workers"])
            raise CommutatorError(f"{url} has no worker {worker_id!r}; it has: {names or 'none'}")
    found = [
        Worker(worker["worker_id"], worker["model"], worker["admin_address"])
        for worker in known
        if worker["admin_address"] is not None
    ]
    if not found:
        raise CommutatorError(
            f"none of the {len(known)} workers of {url} can be asked from here; "
            "run this on the machine where they run"
        )
    return found


def ask_tiers(
    workers: Sequence[Worker],
    what: str,
    arguments: Mapping[str, Any] | None = None,
    *,
    timeout_s: float = 10.0,
) -> tuple[dict[str, Any], dict[str, str]]:
    """By worker id, the answers, and why others gave none.

    Raises CommutatorError with what they say when there is no answer at all.
    """
    answers, problems = asyncio.run(_ask_all(workers, what, arguments, timeout_s))
    if not answers:
        lines = "\n".join(f"  {worker_id}: {problem}" for worker_id, problem in problems.items())
        raise CommutatorError(f"no worker answers about its tiers:\n{lines}")
    return answers, problems


async def _ask_all(
    workers: Sequence[Worker], what: str, arguments: Mapping[str, Any] | None, timeout_s: float
) -> tuple[dict[str, Any], dict[str, str]]:
    async def ask(worker: Worker) -> Any:
        client = TokenApiClient(worker.address)
        try:
            return await client.kv_admin(what, arguments, timeout_s=timeout_s)
        except EngineError as error:
            return error
        finally:
            await client.close()

    told = await asyncio.gather(*(ask(worker) for worker in workers))
    answers: dict[str, Any] = {}
    problems: dict[str, str] = {}
    for worker, answer in zip(workers, told, strict=True):
        if isinstance(answer, EngineError):
            problems[worker.worker_id] = str(answer)
        else:
            answers[worker.worker_id] = answer
    return answers, problems
