"""``commutator planner profile``: measures one worker, for `planner.performance`."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Sequence
from datetime import UTC, datetime
from http import HTTPStatus
from pathlib import Path
from typing import Any

import aiohttp
import click
import yaml
from attrs import define

from commutator import Operation
from commutator.errors import CommutatorError
from commutator_console.front_door import FrontDoor, front_door_options
from commutator_slo.profile import Answered, Profile, profile, profile_inputs

_TOKEN_IDS = (100, 20_000)
"""Drawn from these, and below the size of the vocabulary; few of them are special."""
_ANSWER_S = 300.0
_LEAST_DIGITS = 4


@click.command(
    "profile",
    short_help="Measure how fast a worker is.",
    epilog="Example: commutator planner profile --output profile.yaml",
)
@click.option(
    "--output",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    default="profile.yaml",
    show_default=True,
    help="The file to write; `commutator serve FILE profile.yaml` reads it.",
)
@click.option("--model", help="The model; optional when only one is served.")
@click.option(
    "--most-requests",
    type=click.IntRange(2, 256),
    default=16,
    show_default=True,
    help="Requests in the largest batch.",
)
@front_door_options
def profile_command(door: FrontDoor, output: Path, model: str | None, most_requests: int) -> None:
    """Measure how fast a worker is, and write it for `planner.performance`.

    Takes about a minute. The model must have one worker that gets requests, without others. One
    that generates nothing is asked for vectors.
    """
    worker = _only_worker(door, model)
    shown = next(one for one in door.call("/v1/models")[1]["data"] if one["id"] == worker["model"])
    longest = int(shown["max_model_len"])
    began_s = time.monotonic()
    made = asyncio.run(_measure(door, worker, longest, most_requests))
    click.echo(f"measured {worker['worker_id']} for {time.monotonic() - began_s:.0f} s")
    for line in _lines(made):
        click.echo(line)
    output.write_text(_text(made, worker, datetime.now(UTC)))
    click.echo(f"wrote {output}; start with: commutator serve FILE {output}")


def _only_worker(door: FrontDoor, model: str | None) -> dict[str, Any]:
    """The worker to measure. Raises CommutatorError where requests could go to another."""
    ready = [
        one
        for one in door.workers()
        if one["state"] == "ready" and (model is None or one["model"] == model)
    ]
    if len(ready) != 1:
        names = " ".join(one["worker_id"] for one in ready[1:])
        raise CommutatorError(
            f"{len(ready)} workers get requests, and one is to be measured: "
            + (f"commutator worker drain {names}, one by one" if ready else "start one")
        )
    (worker,) = ready
    if active := worker["active_requests_of_all"]:
        raise CommutatorError(
            f"{worker['worker_id']} has {active} requests; measure it while it has no others"
        )
    return worker


async def _measure(
    door: FrontDoor, worker: dict[str, Any], longest: int, most_requests: int
) -> Profile:
    can, model = worker["operations"], worker["model"]
    if not {Operation.GENERATE, Operation.EMBED} & {*can}:
        raise CommutatorError(
            f"{worker['worker_id']} neither generates nor embeds, but {', '.join(can)}: measure "
            "it yourself, and set planner.performance"
        )
    headers = {"Authorization": f"Bearer {door.api_key}"} if door.api_key else {}
    timeout = aiohttp.ClientTimeout(total=_ANSWER_S)
    connections = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(
        door.url, headers=headers, timeout=timeout, connector=connections
    ) as session:
        sender = _HttpSender(session, model, random.Random())  # noqa: S311 - guards nothing
        if Operation.GENERATE not in can:
            return await profile_inputs(sender.embed, longest=longest)
        return await profile(sender, longest=longest, most_requests=most_requests)


@define
class _HttpSender:
    """Sends random tokens, which no cache holds."""

    session: aiohttp.ClientSession
    model: str
    rng: random.Random

    async def __call__(self, requests: int, prompt_tokens: int, tokens: int) -> Sequence[Answered]:
        return await asyncio.gather(*(self._one(prompt_tokens, tokens) for _ in range(requests)))

    def _prompt(self, tokens: int) -> list[int]:
        return [self.rng.randrange(*_TOKEN_IDS) for _ in range(tokens)]

    async def embed(self, inputs: int, tokens: int) -> float:
        """Seconds of one request for the vectors of ``inputs``, each of ``tokens``."""
        body = {"model": self.model, "input": [self._prompt(tokens) for _ in range(inputs)]}
        sent_s = time.perf_counter()
        try:
            async with self.session.post("/v1/embeddings", json=body) as answer:
                if answer.status != HTTPStatus.OK:
                    text = (await answer.text())[:500]
                    raise CommutatorError(f"/v1/embeddings answered {answer.status}: {text}")
                await answer.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise CommutatorError(f"/v1/embeddings: {type(error).__name__}: {error}") from error
        return time.perf_counter() - sent_s

    async def _one(self, prompt_tokens: int, tokens: int) -> Answered:
        body = {
            "model": self.model,
            "prompt": self._prompt(prompt_tokens),
            "max_tokens": tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        sent_s = time.perf_counter()
        first_s = ended_s = 0.0
        usage: dict[str, Any] = {}
        try:
            async with self.session.post("/v1/completions", json=body) as answer:
                if answer.status != HTTPStatus.OK:
                    text = (await answer.text())[:500]
                    raise CommutatorError(f"/v1/completions answered {answer.status}: {text}")
                async for event in _events(answer):
                    if "error" in event:
                        raise CommutatorError(f"/v1/completions: {event['error']}")
                    now_s = time.perf_counter()
                    if event.get("choices"):
                        first_s, ended_s = first_s or now_s, now_s
                    usage = event.get("usage") or usage
        except (aiohttp.ClientError, TimeoutError) as error:
            raise CommutatorError(f"/v1/completions: {type(error).__name__}: {error}") from error
        made = int(usage.get("completion_tokens", 0))
        if made < tokens:
            raise CommutatorError(f"an answer ended after {made} of {tokens} tokens")
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        return Answered(sent_s, first_s, ended_s, prompt_tokens - int(cached), made)


async def _events(answer: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    """The JSON of server-sent events."""
    async for line in answer.content:
        if line.startswith(b"data: ") and not line.startswith(b"data: [DONE]"):
            yield json.loads(line[6:])


def _lines(made: Profile) -> list[str]:
    speed = made.fit.performance
    steps = [
        "between tokens: "
        + ", ".join(f"{requests} at once {s * 1000:.1f} ms" for requests, s in made.itl_s),
        f"fit: a step {speed.step_s * 1e3:.2f} ms + {speed.step_request_s * 1e3:.3f} ms a request",
    ]
    return [
        f"{'first token' if made.itl_s else 'vectors'}: "
        + ", ".join(f"{tokens} tokens {s * 1000:.0f} ms" for tokens, s in made.ttft_s),
        f"fit: {speed.prefill_tokens_per_s:,.0f} prompt tokens/s",
        *(steps if made.itl_s else ["it generates nothing: step_s was not measured"]),
        f"error: {made.fit.residual:.1%}, of {made.fit.samples:.0f} samples",
    ]


def _text(made: Profile, worker: dict[str, Any], when: datetime) -> str:
    speed = made.fit.performance
    values = {
        "prefill_tokens_per_s": speed.prefill_tokens_per_s,
        "step_s": speed.step_s,
        "step_request_s": speed.step_request_s,
    }
    digits = {name: float(f"{value:.{_LEAST_DIGITS}g}") for name, value in values.items()}
    head = [
        f"`commutator planner profile`, {when:%Y-%m-%d %H:%M} UTC",
        f"worker {worker['worker_id']}, model {worker['model']}",
        *_lines(made),
        "max_running, max_step_tokens and kv_tokens are options of the engine: add them here",
    ]
    comments = "".join(f"# {line}\n" for line in head)
    return comments + yaml.safe_dump({"planner": {"performance": digits}}, sort_keys=False)
