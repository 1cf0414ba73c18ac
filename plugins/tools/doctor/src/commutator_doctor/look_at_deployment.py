"""Asks a running front door for the facts of its deployment."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from email.utils import parsedate_to_datetime
from typing import Any

from attrs import frozen

from commutator.errors import CommutatorError
from commutator_console.front_door import FrontDoor, LostError
from commutator_doctor.deployment import Deployment, Trial
from commutator_doctor.metrics import Metrics

_FEW = 20
"""Requests in a window; with fewer, the counters since the start say more."""
_PROMPT = "The capital of France is"
_ANSWER_TOKENS = 16
_TIMEOUT_S = 120.0
_MOST_METRICS = 64 << 20


@frozen
class Seen:
    """What was read of a deployment."""

    facts: Deployment
    metrics_page: str = ""
    clock_off_s: float | None = None
    """This machine's clock less the front door's."""


def look_at_deployment(
    door: FrontDoor,
    *,
    window_s: float,
    ask: bool,
    resumes_anywhere: Mapping[str, bool],
    sleep: Callable[[float], None] = time.sleep,
) -> Seen:
    """Reads health and metrics, twice if there is traffic; ``ask`` sends test requests, too."""
    begun, begun_unix_s = time.monotonic(), time.time()
    try:
        with door.ask("/live") as answer:
            date = answer.headers.get("Date")
            answer.read(_MOST_METRICS)
        answer_s = time.monotonic() - begun
    except CommutatorError as error:
        return Seen(Deployment(url=door.url, problem=str(error).splitlines()[0]))
    off_s = None if date is None else begun_unix_s - parsedate_to_datetime(date).timestamp()
    # HTTP cuts the time to whole seconds.
    clock_off_s = None if off_s is None else min(off_s, 0.0) if off_s < 1 else off_s - 1
    try:
        health = door.health()
        page = _page(door)
    except CommutatorError as error:
        closed = str(error).splitlines()[0]
        facts = Deployment(url=door.url, closed=closed, answer_s=answer_s)
        return Seen(facts, "", clock_off_s)
    total, covered = Metrics.parse(page), None
    metrics = total
    if window_s > 0 and _served(total):
        sleep(window_s)
        try:
            page = _page(door)
        except CommutatorError as error:
            return Seen(Deployment(url=door.url, problem=str(error).splitlines()[0]))
        now = Metrics.parse(page)
        since = now.since(total)
        metrics, covered = (since, window_s) if _served(since) >= _FEW else (now, None)
    models = [str(name) for name in health.get("models", ())]
    facts = Deployment(
        url=door.url,
        health=health,
        metrics=metrics,
        window_s=covered,
        answer_s=answer_s,
        templates=dict(_templates(door, models)),
        trials=tuple(_trials(door, models)) if ask else (),
        tiers=_tiers(door),
        resumes_anywhere=resumes_anywhere,
    )
    return Seen(facts, page, clock_off_s)


def _served(metrics: Metrics) -> float:
    return metrics.sum("time_to_first_token_seconds_count")


def _page(door: FrontDoor) -> str:
    with door.ask("/metrics", at_admin=True) as answer:
        return answer.read(_MOST_METRICS).decode("utf-8", "replace")


def _templates(door: FrontDoor, models: list[str]) -> Iterator[tuple[str, bool]]:
    for model in models:
        try:
            _, said = door.call(f"/tokenizer_info?model={model}")
        except CommutatorError:
            continue
        yield model, bool(said.get("chat_template"))


def _trials(door: FrontDoor, models: list[str]) -> Iterator[Trial]:
    for model in models:
        body = {
            "model": model,
            "prompt": _PROMPT,
            "max_tokens": _ANSWER_TOKENS,
            "temperature": 0,
        }
        begun, texts, tokens, seconds = time.monotonic(), [], 0, 0.0
        try:
            for _ in range(2):
                with door.ask("/v1/completions", body, timeout_s=_TIMEOUT_S) as answer:
                    said = json.loads(answer.read(_MOST_METRICS))
                texts.append(str(said["choices"][0]["text"]))
                if not seconds:
                    seconds = time.monotonic() - begun
                    tokens = int(said.get("usage", {}).get("completion_tokens", 0))
        except LostError as error:
            yield Trial(model=model, problem=str(error).splitlines()[0])
        except CommutatorError as error:
            text = str(error).splitlines()[0]
            if " answered 5" in text or " answered 429" in text:
                yield Trial(model=model, problem=text)
            # Other refusals: the model makes no text.
        except (ValueError, KeyError, IndexError, TypeError) as error:
            yield Trial(model=model, problem=f"no answer of OpenAI's form: {error!r}")
        else:
            yield Trial(model=model, texts=tuple(texts), tokens=tokens, seconds=seconds)


def _tiers(door: FrontDoor) -> Mapping[str, Any]:
    try:
        found: Mapping[str, Any] = door.administer("GET", "/admin/tiers/statistics")
    except CommutatorError:
        return {}
    return found
