"""Streams of greedy prompts that arrive at a steady rate at several front doors."""

from __future__ import annotations

import json
import math
import threading
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException
from types import TracebackType
from typing import Self

from attrs import define, field

__all__ = ["Outcome", "SteadyTraffic", "answer", "stream"]

TOKENS = 400
_ANSWER_TIMEOUT_S = 60.0
"""Between two pieces: longer than any host of these tests is paused."""
_MOST_AT_ONCE = 128


@define
class Outcome:
    """What became of one request. Times are seconds of the monotonic clock."""

    door: str
    prompt: str
    began_s: float = field(factory=time.monotonic)
    ended_s: float = math.inf
    worker: str = ""
    """The worker that the front door chose first; "" until it answers, or when it refuses."""
    text: str = ""
    longest_gap_s: float = 0.0
    """Without a piece of the stream: before the first, or between two."""
    problem: str = ""
    """Why it is not a whole answer; "" when it is."""
    tokens: int = TOKENS
    request_id: str = field(factory=lambda: uuid.uuid4().hex)
    """As in the front door's log."""

    def runs_at(self, host: str, at_s: float) -> bool:
        """Whether a worker of a host, or the worker of that id, was answering it at a moment."""
        here = f"{self.worker}-".startswith(f"{host}-")
        return here and self.began_s < at_s < self.ended_s


def stream(door: str, prompt: str, tokens: int = TOKENS) -> Outcome:
    """Ask the front door at an address for a greedy answer."""
    outcome = Outcome(door, prompt, tokens=tokens)
    answer(outcome)
    return outcome


def answer(outcome: Outcome) -> None:
    """Ask, and fill in what becomes of it as it comes."""
    try:
        _read(outcome)
    except urllib.error.HTTPError as error:
        outcome.problem = f"{error.code}: {error.read()[:300]!r}"
    except (OSError, HTTPException) as error:
        outcome.problem = str(error) or type(error).__name__
    outcome.ended_s = time.monotonic()


def _read(outcome: Outcome) -> None:
    body = {
        "model": "m", "prompt": outcome.prompt, "max_tokens": outcome.tokens,
        "temperature": 0, "ignore_eos": True, "stream": True,
    }  # fmt: skip
    request = urllib.request.Request(
        f"http://{outcome.door}:8000/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json", "X-Request-Id": outcome.request_id},
    )
    with urllib.request.urlopen(request, timeout=_ANSWER_TIMEOUT_S) as response:
        outcome.worker = response.headers["X-Commutator-Worker"]
        last_s = outcome.began_s
        for line in response:
            if line.startswith(b"data: [DONE]"):
                return
            if not line.startswith(b"data: {"):
                continue
            now_s = time.monotonic()
            outcome.longest_gap_s = max(outcome.longest_gap_s, now_s - last_s)
            last_s = now_s
            piece = json.loads(line[6:])
            if "error" in piece:
                outcome.problem = str(piece["error"])
                return
            outcome.text += piece["choices"][0]["text"]
    outcome.problem = "cut off"


class SteadyTraffic:
    """Asks one front door after the other, in a block, for answers to known prompts.

    ``expected`` has the whole answer to each prompt, as it is without faults.
    """

    def __init__(
        self,
        doors: Sequence[str],
        expected: Mapping[str, str],
        per_s: float,
        tokens: int = TOKENS,
    ) -> None:
        self._doors = doors
        self._expected = expected
        self._tokens = tokens
        self._pause_s = 1.0 / per_s
        self._pool = ThreadPoolExecutor(_MOST_AT_ONCE)
        self._asked: list[Outcome] = []
        self._stop = threading.Event()
        self._pacing = threading.Thread(target=self._pace)

    def __enter__(self) -> Self:
        self._pacing.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.outcomes()

    def _pace(self) -> None:
        prompts = list(self._expected)
        number = 0
        while not self._stop.is_set():
            door = self._doors[number % len(self._doors)]
            prompt = prompts[number // len(self._doors) % len(prompts)]
            outcome = Outcome(door, prompt, tokens=self._tokens)
            self._asked.append(outcome)
            self._pool.submit(answer, outcome)
            number += 1
            self._stop.wait(self._pause_s)

    def until_streaming_at(self, host: str, door: str = "", timeout_s: float = 60.0) -> None:
        """Wait for a stream, through ``door`` if that is given, from ``host`` as in ``runs_at``."""
        waiting_since_s = time.monotonic()
        while not self._streams(host, door):
            if time.monotonic() > waiting_since_s + timeout_s:
                raise TimeoutError(f"no stream from {host} through {door or 'any front door'}")
            time.sleep(0.02)

    def _streams(self, host: str, door: str) -> bool:
        now_s = time.monotonic()
        return any(
            door in ("", one.door) and one.text and one.runs_at(host, now_s)
            for one in self._asked.copy()
        )

    def outcomes(self) -> list[Outcome]:
        """Those of all requests, once no more are sent and each has ended."""
        self._stop.set()
        self._pacing.join()
        self._pool.shutdown()
        return self._asked

    def lost(self, outcomes: Sequence[Outcome], *, but_at: str = "") -> list[Outcome]:
        """Those that did not get the expected text, except at the front door ``but_at``."""
        return [
            one
            for one in outcomes
            if one.door != but_at and (one.problem or one.text != self._expected[one.prompt])
        ]
