"""``commutator planner`` says what the planner wants, why, and what it did."""

from __future__ import annotations

import time
from datetime import datetime
from typing import Any

import pytest
from click.testing import CliRunner

from commutator.cli.main import main
from commutator.errors import CommutatorError
from commutator_console.front_door import FrontDoor
from commutator_slo.cli.command import _unix_s

PLAN = {
    "time": 1_700_000_000.0,
    "observed": {
        "window_s": 5.0,
        "arrivals": {"both": {"requests": 9, "uncached_tokens": 700, "prompt_tokens": 900}},
        "workers": 2,
        "requests_in_flight": 4,
        "output_tokens": 150.0,
        "waiting_requests": 1,
        "oldest_wait_s": 2.0,
        "attained_ttft": 0.9,
        "attained_itl": None,
        "started_s": [12.5],
    },
    "roles": {
        "both": {"desired": 3, "proposed": 3, "ready": 2, "starting": 0, "draining": 0,
                 "reason": "need 3 (work 1.9)", "samples": 120, "residual": 0.031},
    },
    "actions": [{"kind": "launch", "role": "both", "worker_id": None, "outcome": "w-2 starts"}],
    "warnings": ["a target cannot be reached"],
}  # fmt: skip


def said(monkeypatch: pytest.MonkeyPatch, answer: Any, *arguments: str) -> tuple[str, list[str]]:
    asked: list[str] = []

    def administer(self: FrontDoor, method: str, path: str, *_: Any, **__: Any) -> Any:
        asked.append(path)
        return answer

    monkeypatch.setattr(FrontDoor, "administer", administer)
    done = CliRunner().invoke(main, ["planner", *arguments])
    return done.output, asked


def test_status(monkeypatch: pytest.MonkeyPatch) -> None:
    status = {"kind": "slo", "mode": "advise", "interval_s": 5.0, "plans": 7, "last": PLAN}
    text, asked = said(monkeypatch, status, "status")
    assert asked == ["/admin/planner"]
    assert text.splitlines() == [
        "slo advises only, every 5 s; 7 plans",
        (
            "both: 3 wanted, 2 ready, 0 starting, 0 draining; need 3 (work 1.9); "
            "speed of 120 samples, residual 3.1%"
        ),
        "warning: a target cannot be reached",
    ]


def test_explain(monkeypatch: pytest.MonkeyPatch) -> None:
    text, asked = said(monkeypatch, PLAN, "explain", "--at", "2023-11-14T00:00:00")
    (path,) = asked
    assert path.startswith("/admin/planner/explain?at=16999")
    assert text.splitlines()[1:] == [
        "  observed: 9 requests for both in 5 s, 700 of 900 prompt tokens not cached",
        "  4 requests in flight at 2 workers",
        "  1 requests wait for a worker, the oldest for 2.0 s",
        "  90.0% within ttft_s",
        "  a worker became ready after 12.5 s",
        (
            "  both: 3 wanted, 2 ready, 0 starting, 0 draining; need 3 (work 1.9); "
            "speed of 120 samples, residual 3.1%"
        ),
        "  action: launch both: w-2 starts",
        "  warning: a target cannot be reached",
    ]
    text, _ = said(monkeypatch, None, "explain")
    assert "has not made a plan yet" in text


def test_history(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [{"time": 1_700_000_000.0 + n, "text": f"+1 both: {n}"} for n in range(5)]
    text, _ = said(monkeypatch, lines, "history", "-n", "2")
    assert [line.split(" ", 1)[1] for line in text.splitlines()] == ["+1 both: 3", "+1 both: 4"]


def test_a_time_of_day_is_the_last_one() -> None:
    now_s = datetime.fromisoformat("2026-05-02T10:00:00").astimezone().timestamp()
    assert _unix_s("9:30", now_s) == now_s - 1800
    assert _unix_s("10:30:00", now_s) == now_s + 1800 - 86_400
    with pytest.raises(CommutatorError, match="expected a time"):
        _unix_s("soon", time.time())
