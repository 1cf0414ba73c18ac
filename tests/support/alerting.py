"""What a Prometheus would have recorded of a real front door, and what the rules make of it.

Alerts wait for minutes, and hours count in some. So each scrape, half a second after the one
before, stands for more seconds of Prometheus' time: the series are real and the clock of
``promtool test rules`` is virtual.
"""

from __future__ import annotations

import json
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.client import HTTPException
from pathlib import Path
from typing import Any, Self

from attrs import define, field, frozen
from prometheus_client.parser import text_string_to_metric_families
from tests.support.prometheus import program

__all__ = ["Clients", "Expected", "Recording", "Scrape", "input_series", "misfired", "recording"]

_PAUSE_S = 0.5
_TIMEOUT_S = 5.0
_INSTANCE = {"instance": "front-door", "job": "commutator"}
_RULES_EVERY_S = 15

Labels = tuple[tuple[str, str], ...]


@frozen
class Scrape:
    """One attempt; ``samples`` are those of the page, by name and labels, if it was answered."""

    samples: Mapping[tuple[str, Labels], float] | None

    @property
    def series(self) -> dict[tuple[str, Labels], float]:
        """As Prometheus stores it: with its own labels, and with ``up``."""
        own = tuple(_INSTANCE.items())
        found = {
            (name, tuple(sorted((*labels, *own)))): value
            for (name, labels), value in (self.samples or {}).items()
        }
        return found | {("up", own): float(self.samples is not None)}


@define
class Recording:
    """Scrapes in order, while they are made."""

    scrapes: list[Scrape] = field(factory=list)

    def wait(self, scrapes: int, timeout_s: float = 900.0) -> int:
        """Wait for so many more; returns how many there are then."""
        until, deadline_s = len(self.scrapes) + scrapes, time.monotonic() + timeout_s
        while len(self.scrapes) < until:
            assert time.monotonic() < deadline_s, f"{len(self.scrapes)} of {until} scrapes"
            time.sleep(0.05)
        return len(self.scrapes)

    def wait_for(self, what: Callable[[Mapping[str, float]], bool]) -> int:
        """Wait until ``what`` is true of the sums of the last scrape's samples, by name."""
        deadline_s = time.monotonic() + 600
        while True:
            count = self.wait(1)
            sums: dict[str, float] = {}
            for (name, _), value in (self.scrapes[-1].samples or {}).items():
                sums[name] = sums.get(name, 0.0) + value
            if what(sums):
                return count
            assert time.monotonic() < deadline_s, sums


@contextmanager
def recording(url: str, names: Collection[str]) -> Iterator[Recording]:
    """Scrapes the metrics with these names (as samples) until the block ends."""
    made, over = Recording(), threading.Event()

    def run() -> None:
        while not over.is_set():
            made.scrapes.append(_scrape(url, names))
            over.wait(_PAUSE_S)

    thread = threading.Thread(target=run, name="scrapes")
    thread.start()
    try:
        yield made
    finally:
        over.set()
        thread.join()


def _scrape(url: str, names: Collection[str]) -> Scrape:
    try:
        with urllib.request.urlopen(f"{url}/metrics", timeout=_TIMEOUT_S) as answer:
            page = answer.read().decode()
    except OSError:
        return Scrape(None)
    return Scrape(
        {
            (sample.name, tuple(sample.labels.items())): sample.value
            for family in text_string_to_metric_families(page)
            for sample in family.samples
            if sample.name in names
        }
    )


def input_series(scrapes: Sequence[Scrape]) -> list[dict[str, str]]:
    """The scrapes in promtool's notation; a series that a scrape no longer has becomes stale."""
    found: dict[tuple[str, Labels], list[str]] = {}
    for number, scrape in enumerate(scrapes):
        now = scrape.series
        for name in now:
            found.setdefault(name, ["_"] * number)
        for name, values in found.items():
            gone = "_" if not values or values[-1] in {"_", "stale"} else "stale"
            values.append(repr(now[name]) if name in now else gone)
    return [
        {"series": f"{name}{{{_selector(labels)}}}", "values": " ".join(values)}
        for (name, labels), values in found.items()
    ]


def _selector(labels: Labels) -> str:
    return ",".join(f"{key}={json.dumps(value)}" for key, value in labels)


@frozen
class Expected:
    """Which of the alerts ``among`` have been firing at any time up to a scrape."""

    scrapes: int
    among: frozenset[str]
    firing: frozenset[str]


def misfired(
    rules: Path, scrapes: Sequence[Scrape], step_s: int, expected: Sequence[Expected], folder: Path
) -> str:
    """What promtool reports when the rules, as they are, do otherwise; "" when they do as expected.

    ``step_s``: the time that passes for the rules from each scrape to the next.
    """
    path = folder / "rules_test.json"  # which is YAML, too
    test = {
        "interval": f"{step_s}s",
        "input_series": input_series(scrapes),
        "promql_expr_test": [_question(one, step_s) for one in expected],
    }
    everything = {
        "rule_files": [str(rules)],
        "evaluation_interval": f"{_RULES_EVERY_S}s",
        "tests": [test],
    }
    path.write_text(json.dumps(everything))
    done = subprocess.run(
        [program("promtool"), "test", "rules", str(path)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    return "" if done.returncode == 0 else done.stdout + done.stderr


def _question(expected: Expected, step_s: int) -> dict[str, Any]:
    now_s = (expected.scrapes - 1) * step_s
    chosen = f'alertstate="firing", alertname=~"{"|".join(sorted(expected.among))}"'
    return {
        "expr": f"group by (alertname) (max_over_time(ALERTS{{{chosen}}}[{now_s + 1}s]))",
        "eval_time": f"{now_s}s",
        "exp_samples": [
            {"labels": f'{{alertname="{alert}"}}', "value": 1} for alert in sorted(expected.firing)
        ],
    }


@define
class Clients:
    """Clients of one model that ask again as soon as they are answered, and a second after a no."""

    url: str
    model: str
    number: int
    words: int = 60
    new_tokens: int = 32
    topics: int = 4
    """Each client's prompts; they come again and again."""
    pause_s: float = 0.0
    """Between an answer and the next request."""
    _over: threading.Event = field(factory=threading.Event)
    _pool: ThreadPoolExecutor | None = None

    def __enter__(self) -> Self:
        self._pool = ThreadPoolExecutor(self.number)
        for client in range(self.number):
            self._pool.submit(self._talk, client)
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        assert self._pool is not None
        self._pool.shutdown()

    def _talk(self, client: int) -> None:
        turn = 0
        while not self._over.is_set():
            turn += 1
            topic = f"Conversation {self.model} {client} {turn % self.topics}. "
            body = {
                "model": self.model,
                "prompt": topic + "river " * self.words,
                "max_tokens": self.new_tokens,
                "ignore_eos": True,
                "stream": True,
            }
            if not self._ask(json.dumps(body).encode()):
                self._over.wait(1.0)
            elif self.pause_s:
                self._over.wait(self.pause_s)

    def _ask(self, body: bytes) -> bool:
        headers = {"Content-Type": "application/json"}
        asked = urllib.request.Request(f"{self.url}/v1/completions", body, headers)
        try:
            with urllib.request.urlopen(asked, timeout=60) as answer:
                for _ in answer:
                    if self._over.is_set():
                        break
        except (OSError, HTTPException):  # refusals of the front door are OSErrors, too
            return False
        return True
