"""Streams of greedy prompts that arrive at a steady rate at several front doors."""

from __future__ import annotations

import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Self

from attrs import define, field

__all__ = ["Outcome", "SteadyTraffic", "stream"]

TOKENS = 120
_ANSWER_TIMEOUT_S = 30.0


@define
class Outcome:
    """What became of one request. Times are seconds of the monotonic clock."""

    door: str
    prompt: str
    began_s: float = field(factory=time.monotonic)
    worker: str = ""
    """That which the front door chose first; "" when the request was refused."""
    text: str = ""
    longest_gap_s: float = 0.0
    """Between two pieces of the stream."""
    problem: str = ""
    """Why it is not a whole answer; "" when it is."""


def stream(door: str, prompt: str) -> Outcome:
    """Ask the front door at an address for a greedy answer."""
    body = {
        "model": "m", "prompt": prompt, "max_tokens": TOKENS, "temperature": 0,
        "ignore_eos": True, "stream": True,
    }  # fmt: skip
    outcome = Outcome(door, prompt)
    request = urllib.request.Request(
        f"http://{door}:8000/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    done = False
    try:
        with urllib.request.urlopen(request, timeout=_ANSWER_TIMEOUT_S) as answer:
            outcome.worker = answer.headers["X-Commutator-Worker"]
            last_s = time.monotonic()
            for line in answer:
                if line.startswith(b"data: {"):
                    now_s = time.monotonic()
                    outcome.longest_gap_s = max(outcome.longest_gap_s, now_s - last_s)
                    last_s = now_s
                    piece = json.loads(line[6:])
                    if "error" in piece:
                        outcome.problem = str(piece["error"])
                        return outcome
                    outcome.text += piece["choices"][0]["text"]
                done = done or line.startswith(b"data: [DONE]")
    except urllib.error.HTTPError as error:
        outcome.problem = f"{error.code}: {error.read()[:300]!r}"
    except OSError as error:
        outcome.problem = str(error) or type(error).__name__
    else:
        outcome.problem = "" if done else "cut off"
    return outcome


class SteadyTraffic:
    """Asks one front door after the other, in a block, for answers to known prompts.

    ``expected`` has the whole answer to each prompt, as it is without faults.
    """

    def __init__(self, doors: Sequence[str], expected: Mapping[str, str], per_s: float) -> None:
        self._doors = doors
        self._expected = expected
        self._pause_s = 1.0 / per_s
        self._pool = ThreadPoolExecutor(64)
        self._asked: list[Future[Outcome]] = []
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
        self._stop.set()
        self._pacing.join()
        self._pool.shutdown()

    def _pace(self) -> None:
        prompts = list(self._expected)
        number = 0
        while not self._stop.is_set():
            door = self._doors[number % len(self._doors)]
            prompt = prompts[number // len(self._doors) % len(prompts)]
            self._asked.append(self._pool.submit(stream, door, prompt))
            number += 1
            self._stop.wait(self._pause_s)

    def outcomes(self) -> list[Outcome]:
        """Those of all requests, once no more are sent and each has ended."""
        self._stop.set()
        return [asked.result() for asked in self._asked]

    def lost(self, outcomes: Sequence[Outcome], *, but_at: str = "") -> list[Outcome]:
        """Those that did not get the expected text, except at the front door ``but_at``."""
        return [
            one
            for one in outcomes
            if one.door != but_at and (one.problem or one.text != self._expected[one.prompt])
        ]
