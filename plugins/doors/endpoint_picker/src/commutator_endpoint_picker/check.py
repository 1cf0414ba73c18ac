"""What ``commutator epp check`` asks of a gateway, and what it concludes.

``judge`` functions are pure; ``probe`` sends what they judge.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from http import HTTPStatus
from io import BytesIO
from typing import Any

import msgspec
from aiohttp import ClientError, ClientSession, ClientTimeout
from attrs import frozen

from commutator_endpoint_picker.messages import DESTINATION

WORKER = "X-Commutator-Worker"
_EXPLAIN, _DECISION = "X-Commutator-Explain", "X-Commutator-Decision"
NOWHERE = "192.0.2.1:9"
"""An endpoint of the network that documents have; nobody answers there."""
_PROMPTS = 8
_LEAST_BLOCKS, _HIT = 8, 0.5
"""More than what all prompts of a chat template begin with."""
_EVENTS_S = 1.5
"""After which a picker knows what is in a worker's cache."""
_PADDING_BYTES = 1 << 20
_WORDS = 100
_TIMEOUT_S = 60.0
_MOST_ANSWER_BYTES = 1 << 20
_CHAT = "/v1/chat/completions"


@frozen
class Answer:
    """What came of one request."""

    status: int
    """0: nothing, or not to its end."""
    text: str
    worker: str | None = None
    """As the picker names it."""
    cached_share: float | None = None
    """Of the prompt's tokens; None: it is not said."""
    overlap_blocks: int | None = None
    """What the worker has cached of the prompt, as the picker believes; None: it does not say."""

    @property
    def is_ok(self) -> bool:
        return self.status == HTTPStatus.OK

    @property
    def said(self) -> str:
        """For people."""
        return f"{self.status or 'no answer'}: {self.text[:200]}".strip()


@frozen
class Finding:
    """One line of the result."""

    what: str
    problem: str | None = None
    """What is wrong, and what to do; None: nothing."""


def judge_asked(answer: Answer) -> Finding:
    """Of a plain request."""
    what = "requests are answered, and the picker is asked"
    if answer.status == HTTPStatus.INTERNAL_SERVER_ERROR:
        return Finding(
            what,
            f"{answer.said}; the gateway cannot reach the picker, or sends no bodies: look at the "
            "picker's log, and set request_body_mode FULL_DUPLEX_STREAMED",
        )
    if not answer.is_ok:
        return Finding(what, answer.said)
    if answer.worker is None:
        return Finding(
            what,
            f"no answer names its worker ({WORKER}): the route does not ask the picker, or the key "
            "lacks the permission explain",
        )
    return Finding(what)


def judge_obeyed(repeats: Sequence[Answer]) -> Finding:
    """Of prompts that were sent before: they go to a worker that has them in its cache."""
    what = "requests go where the picker says"
    failed = [one for one in repeats if not one.is_ok]
    if failed:
        return Finding(what, failed[0].said)
    told = [
        one
        for one in repeats
        if (one.overlap_blocks or 0) >= _LEAST_BLOCKS and one.cached_share is not None
    ]
    if not told:
        return Finding(f"{what}: not known, as the policy or the engine says nothing of caches")
    missed = sum((one.cached_share or 0.0) < _HIT for one in told)
    if missed:
        return Finding(
            what,
            f"{missed} of {len(told)} prompts were not in the cache of the worker that has them: "
            f"the gateway must take {DESTINATION} from the metadata envoy.lb, with override_host, "
            "and receive that namespace from the picker; or the engine caches no prefixes",
        )
    return Finding(what)


def judge_own_header(answer: Answer) -> Finding:
    """Of a request in which the client names an endpoint."""
    what = "clients cannot choose an endpoint"
    if answer.is_ok:
        return Finding(what)
    return Finding(
        what,
        f"{answer.said} to a request with {DESTINATION}: {NOWHERE}; remove this header of clients "
        "before the picker is asked (early_header_mutation)",
    )


def judge_large(answer: Answer) -> Finding:
    """Of a body that has to be sent in pieces."""
    what = f"bodies of {_PADDING_BYTES >> 20} MiB pass"
    return Finding(what, None if answer.is_ok else f"{answer.said}; raise the gateway's limits")


def judge_streams(answers: Sequence[Answer]) -> Finding:
    """Of requests at the same time."""
    what = f"{len(answers):,} streams at the same time"
    failed = [one for one in answers if not one.is_ok]
    if not failed:
        return Finding(what)
    return Finding(
        what,
        f"{len(failed):,} failed, the first with {failed[0].said}; raise the circuit breakers of "
        "the picker's cluster and of the pool's (1,024 by default), and the picker's max_calls",
    )


async def probe(url: str, model: str, key: str | None, streams: int) -> AsyncIterator[Finding]:
    """Send requests to the gateway at ``url``; a few tokens each."""
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    timeout = ClientTimeout(total=_TIMEOUT_S)
    async with ClientSession(headers=headers, timeout=timeout) as session:
        first = await _chat(session, url, model, "Hello")
        yield judge_asked(first)
        if not first.is_ok:
            return
        prompts = [f"{secrets.token_hex(8)} " * _WORDS for _ in range(_PROMPTS)]
        for prompt in prompts:
            await _chat(session, url, model, prompt)
        await asyncio.sleep(_EVENTS_S)
        # In another order: a gateway that takes workers in turn would else take the same ones.
        secrets.SystemRandom().shuffle(prompts)
        yield judge_obeyed([await _chat(session, url, model, prompt) for prompt in prompts])
        named = {DESTINATION: NOWHERE}
        yield judge_own_header(await _chat(session, url, model, "Hello", named))
        padding = " " * _PADDING_BYTES
        yield judge_large(await _chat(session, url, model, "Hello", padding=padding))
        if streams:
            some = [_chat(session, url, model, "Hello", stream=True) for _ in range(streams)]
            yield judge_streams(await asyncio.gather(*some))


async def _chat(
    session: ClientSession,
    url: str,
    model: str,
    text: str,
    headers: Mapping[str, str] | None = None,
    *,
    padding: str = "",
    stream: bool = False,
) -> Answer:
    body: dict[str, Any] = {"model": model, "messages": [{"role": "user", "content": text}]}
    body |= {"max_tokens": 2, "stream": stream}
    data = f"{json.dumps(body)}{padding}".encode()
    sent = {"Content-Type": "application/json", _EXPLAIN: "1", **(headers or {})}
    try:
        async with session.post(
            url.rstrip("/") + _CHAT,
            data=BytesIO(data),
            headers=sent,
        ) as answer:
            pieces = bytearray()
            async for piece in answer.content.iter_any():
                pieces += piece
                if len(pieces) > _MOST_ANSWER_BYTES:
                    return Answer(0, f"an answer of over {_MOST_ANSWER_BYTES} bytes")
            said = pieces.decode("utf-8", "replace")
            worker, why = answer.headers.get(WORKER), answer.headers.get(_DECISION, "")
            return Answer(answer.status, said, worker, cached_of(said), overlap_of(why))
    except (ClientError, TimeoutError, OSError) as error:
        return Answer(0, f"{type(error).__name__} {error}")


def overlap_of(decision: str) -> int | None:
    """The blocks that a decision's worker has of the prompt; None: it is not said."""
    try:
        found = msgspec.json.decode(decision)["overlap_blocks"]
    except (msgspec.DecodeError, KeyError, TypeError):
        return None
    return found if isinstance(found, int) else None


def cached_of(text: str) -> float | None:
    """The part of its prompt that a whole answer says was cached; None: it says nothing."""
    try:
        usage = msgspec.json.decode(text)["usage"]
        cached, prompt = usage["prompt_tokens_details"]["cached_tokens"], usage["prompt_tokens"]
        return float(cached / prompt)
    except (msgspec.DecodeError, KeyError, TypeError, ZeroDivisionError):
        return None
