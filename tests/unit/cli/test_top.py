"""`commutator top`: what it draws of a snapshot, and what a restart of the front door does."""

from __future__ import annotations

import asyncio
import io
import tempfile
from collections.abc import Iterator
from typing import Any

import pytest
from click.testing import CliRunner
from rich.console import Console
from tests.support.front_door import FakeDispatcher, front_door
from tests.support.principals import gate_of

from commutator.cli.main import main
from commutator.contract.principal import Principal
from commutator.errors import CommutatorError
from commutator_console.front_door import LostError
from commutator_console.top import followed
from commutator_console.view import History, view

LATENCY = {"count": 3, "mean_s": 0.2, "p50_s": 0.25, "p95_s": 1.5}


def worker(name: str, **more: Any) -> dict[str, Any]:
    load = {
        "running": 2, "waiting": 5, "kv_used_blocks": 30, "kv_cached_blocks": 20,
        "kv_capacity_blocks": 100, "draining": False,
    }  # fmt: skip
    tier = {"name": "dram", "medium": "CPU", "up": True, "blocks": 1, "capacity_blocks": 4}
    return {
        "worker_id": name, "model": "m", "kind": "sim", "engine": "sim", "version": "1", "pid": 77,
        "host": "", "role": "both", "state": "ready", "requests": 3, "load": load, "tiers": [tier],
        "cause": None, "since_unix_s": None, "next_start_unix_s": None,
    } | more  # fmt: skip


def snapshot(**more: Any) -> dict[str, Any]:
    return {
        "time_unix_s": 1.0, "window_s": 10.0, "version": "0.1.0", "status": "ready",
        "models": ["m"], "doors": [{"door": "frontend-0", "draining": False, "running": 1}],
        "doors_not_shown": 0,
        "requests": {
            "running": 4, "queued": 1, "waiting": 2, "per_s": 12.5, "refused_per_s": 0.0,
            "failed_per_s": 0.0, "routed_per_s": 1.0, "prompt_tokens_per_s": 81234.0,
            "cached_tokens_per_s": 1.0, "output_tokens_per_s": 250.0, "migrations_per_s": 0.0,
            "ttft": LATENCY, "itl": {**dict.fromkeys(LATENCY), "count": 0},
        },
        "cache": {"hit_rate": 0.5, "by_tier": [{"tier": "device", "hit_rate": 0.5}]},
        "workers": [worker("w-0")], "workers_left_out": 0, "planner": None, "problems": [],
        "flows": [{"source": "device", "target": "dram", "blocks_per_s": 2.0}],
        "handovers": [{"prefill": "p-0", "decode": "d-0", "per_s": 1.0, "bytes_per_s": 5e6,
                       "failed": 0}],
        "principals": [], "principals_left_out": 0,
        "recent": [{
            "request_id": "r", "time_unix_s": 1.0, "model": "m", "principal": None,
            "prompt_tokens": 100, "worker_id": "w-0", "policy": "kv", "reason": "cheapest of 2",
            "state": "done", "ttft_s": 0.5, "duration_s": 1.0, "cached_tokens": 80,
            "generated_tokens": 9, "prefill_worker": None, "disaggregation": None,
            "migrated_from": [], "error": None,
        }],
        "events": [{"time_unix_s": 1.0, "kind": "worker up", "text": "w-0"}],
        "warnings": ["w-0: events were lost"],
    } | more  # fmt: skip


def drawn(
    shown: dict[str, Any], *, height: int = 40, lost: str | None = None, width: int = 140
) -> str:
    history = History()
    history.add(shown)
    out = io.StringIO()
    Console(file=out, width=width, color_system=None).print(
        view(shown, history, height, width, lost)
    )
    return out.getvalue()


def test_everything_that_the_page_shows_is_drawn() -> None:
    text = drawn(snapshot())
    for expected in (
        "● ready", "12", "250 ms", "p95 1.50 s", "81.2k prompt", "3 waiting", "w-0", " 77 ",
        " 50%", "dram 25%", "cheapest of 2", "80%", "9 tokens", "device → dram 2 blocks/s",
        "p-0 ⇒ d-0 1/s 5 MB/s", "worker up: w-0", "events were lost",
    ):  # fmt: skip
        assert expected in text, expected


def test_a_worker_that_fails_and_what_the_planner_wants_are_drawn() -> None:
    failing = worker(
        "w-1", state="failing", cause="exited with status 1: no memory", since_unix_s=91.0,
        next_start_unix_s=104.0, load=None, tiers=[], pid=None,
    )  # fmt: skip
    role = {"role": "both", "desired": 3, "proposed": 3, "ready": 1, "starting": 1, "draining": 0,
            "reason": "3 workers for 2.5 requests/s"}  # fmt: skip
    planner = {
        "kind": "slo", "mode": "advise", "acts": True, "interval_s": 5.0, "plans": 7,
        "time_unix_s": 99.0, "roles": [role], "actions": [], "warnings": ["too slow a target"],
        "recent": [{"time": 98.0, "text": "+2 both: a burst"}],
    }  # fmt: skip
    shown = snapshot(
        time_unix_s=100.0, workers=[worker("w-0"), failing], planner=planner,
        problems=["worker w-1 is failing: exited with status 1: no memory"],
    )  # fmt: skip
    text = drawn(shown)
    for expected in (
        "● failing", "w-1  9 s ago: exited with status 1: no memory; starts again in 4 s",
        "slo advises only, every 5 s", "both: 3 wanted, 1 ready, 1 starting, 0 draining; 3 workers",
        "too slow a target", "+2 both: a burst", "worker w-1 is failing",
    ):  # fmt: skip
        assert expected in text, expected
    many = [failing | {"worker_id": f"w-{number}"} for number in range(50)]
    assert len(drawn(shown | {"workers": many}, height=40).splitlines()) <= 40
    silent = {"acts": False, "roles": [], "actions": [], "warnings": [], "recent": []}
    assert "Planner  none answers" in drawn(snapshot(planner=silent))


def test_a_thousand_workers_leave_room_and_the_troubled_come_first() -> None:
    many = [worker(f"w-{number:04}", requests=number) for number in range(1000)]
    many[500]["state"] = "unreachable"
    text = drawn(snapshot(workers=many, workers_left_out=7), height=40)
    assert len(text.splitlines()) <= 40
    assert "Workers (1007)" in text
    assert "unreachable" in text
    assert "w-0999" in text
    assert "w-0001" not in text


def test_what_is_not_known_is_drawn_too() -> None:
    unknown = dict.fromkeys(LATENCY)
    requests = {**snapshot()["requests"], "ttft": unknown, "per_s": None}
    text = drawn(
        snapshot(
            requests=requests, workers=[worker("w", load=None, pid=None, tiers=[])], flows=[],
            handovers=[], events=[], warnings=[], recent=[], doors_not_shown=2,
        ),
        lost="connection refused",
    )  # fmt: skip
    assert "connection refused, trying again" in text
    assert "only frontend-0; 2 more not shown" in text


@pytest.mark.security
def test_names_and_reasons_do_not_steer_the_terminal() -> None:
    evil = "\x1b]0;owned\x07\x1b[2J[bold red]x[/]\u202e"
    row = {**snapshot()["recent"][0], "worker_id": evil, "reason": evil, "state": evil}
    text = drawn(
        snapshot(
            workers=[worker(evil, state=evil, role=evil)], models=[evil], version=evil,
            status=evil, recent=[row], warnings=[evil],
            events=[{"time_unix_s": 1.0, "kind": evil, "text": evil}],
            flows=[{"source": evil, "target": evil, "blocks_per_s": 1.0}],
        ),
        lost=evil,
    )  # fmt: skip
    assert "\x1b" not in text
    assert "\x07" not in text
    assert "\u202e" not in text
    assert "[bold red]x[/]" in text  # it is text, not markup


def test_a_front_door_that_restarts_is_followed_again() -> None:
    runs: Iterator[list[Any]] = iter(
        [[1, LostError("gone\nhint")], [LostError("refused")], [2, None], [3]]
    )

    def live() -> Iterator[dict[str, Any]]:
        for step in next(runs):
            if isinstance(step, Exception):
                raise step
            if step is not None:
                yield {"n": step}

    slept: list[float] = []
    found = followed(live, slept.append)
    assert [next(found) for _ in range(6)] == [
        ({"n": 1}, None),
        ({"n": 1}, "gone"),
        ({"n": 1}, "refused"),
        ({"n": 2}, None),
        ({"n": 2}, "the front door ended the stream"),
        ({"n": 3}, None),
    ]
    assert slept == [1.0, 1.0, 1.0]


def test_a_front_door_that_was_never_there_is_an_error() -> None:
    def live() -> Iterator[dict[str, Any]]:
        raise LostError("nobody is there")

    with pytest.raises(CommutatorError, match="nobody is there"):
        next(followed(live))


ROOT = Principal(name="root", permissions=frozenset({"admin"}))
USER = Principal(name="user")


async def run(*arguments: str) -> tuple[int, str]:
    runner = CliRunner(env={"COLUMNS": "140"})
    result = await asyncio.to_thread(runner.invoke, main, ["top", "--once", *arguments])
    return result.exit_code, result.output


@pytest.mark.parametrize("with_socket", [True, False])
async def test_without_keys_the_socket_or_this_machine_is_asked(with_socket: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/frontend-0.sock" if with_socket else None
        async with front_door(FakeDispatcher(), local_socket=path) as door:
            code, text = await run("--url", door.url)
    assert code == 0, text
    assert "fake-0" in text


async def test_with_keys_that_of_an_administrator_is_needed() -> None:
    async with front_door(FakeDispatcher(), gate=gate_of(ROOT, USER)) as door:
        assert (await run("--url", door.url, "--api-key", "root"))[0] == 0
        code, text = await run("--url", door.url, "--api-key", "user")
        assert (code, '"admin"' in text) == (1, True)
        code, text = await run("--url", door.url)
        assert (code, "COMMUTATOR_API_KEY" in text) == (1, True)


async def test_nobody_at_the_address_is_an_error_in_one_line() -> None:
    code, text = await run("--url", "http://127.0.0.1:9")
    assert code == 1
    assert "is `commutator serve` running?" in text


def test_before_the_first_decision_the_table_says_so() -> None:
    assert "none seen yet" in drawn(snapshot(recent=[]), width=80)
    assert "none seen yet" not in drawn(snapshot())


def test_names_and_states_are_whole_in_a_narrow_terminal() -> None:
    """Of 80 characters; what is shortened there is the rest."""
    workers = [worker("reference-0"), worker("reference-1", state="starting")]
    text = drawn(snapshot(workers=workers), width=80)
    for expected in ("reference-0", "reference-1", "● ready", "● starting", "In flight", "Queue"):
        assert expected in text
