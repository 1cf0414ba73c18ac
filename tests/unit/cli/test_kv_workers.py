"""Asking workers about their tiers: who answers, and what is said of the others."""

from __future__ import annotations

import json
from typing import Any

import pytest
from click.testing import CliRunner, Result

from commutator.cli import kv_workers
from commutator.cli.kv_workers import Worker
from commutator.cli.main import main
from commutator.engine.contract import NO_TIERS
from commutator.errors import EngineError, EngineUnavailableError

INTACT = {
    "tier": "dram",
    "blocks": 7,
    "intact": 7,
    "corrupt": 0,
    "gone": 0,
    "unreadable": 0,
    "bytes": 7,
    "seconds": 0.1,
    "problem": None,
}
DONE: dict[str, Any] = {"evict": {"dram": 7}, "verify": [INTACT]}
ANSWERS: dict[str, Any] = {
    "a:1": DONE,
    "b:1": EngineUnavailableError("no answer within 3600 s"),
    "c:1": EngineError(NO_TIERS),
}
EVICT, VERIFY = ("evict", "--all"), ("verify",)


class FakeClient:
    def __init__(self, address: str) -> None:
        self._answer = ANSWERS[address]

    async def kv_admin(self, what: str, arguments: Any, *, timeout_s: float) -> Any:
        if isinstance(self._answer, EngineError):
            raise self._answer
        return self._answer[what]

    async def close(self) -> None:
        pass


@pytest.fixture(autouse=True)
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Worker]:
    """The workers that are there; a test may remove some."""
    workers = [Worker(f"w-{n}", "m", address) for n, address in enumerate(ANSWERS)]
    monkeypatch.setattr(kv_workers, "TokenApiClient", FakeClient)
    monkeypatch.setattr(
        kv_workers,
        "find_workers",
        lambda url, key, one: [w for w in workers if one in (None, w.worker_id)],
    )
    return workers


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["kv", *arguments])


def test_who_does_not_answer_is_told_beside_the_answers() -> None:
    done = run(*EVICT)
    assert done.stdout == "w-0: removed 7 blocks from dram\n"
    assert "w-1: no answer within 3600 s" in done.stderr
    assert f"w-2: {NO_TIERS}" in done.stderr


@pytest.mark.parametrize("command", [EVICT, VERIFY])
@pytest.mark.parametrize("form", [(), ("--json",)])
def test_a_worker_that_did_not_do_it_is_a_failure(
    command: tuple[str, ...], form: tuple[str, ...]
) -> None:
    done = run(*command, *form)
    assert done.exit_code == 1, done.output
    assert "w-0" in done.stdout, "what others did is shown nevertheless"
    if form:
        assert json.loads(done.stdout) == {"w-0": DONE[command[0]]}


@pytest.mark.parametrize("command", [EVICT, VERIFY])
def test_a_worker_without_tiers_has_nothing_to_do(
    asked: list[Worker], command: tuple[str, ...]
) -> None:
    del asked[1]
    done = run(*command)
    assert done.exit_code == 0, done.output
    assert f"w-2: {NO_TIERS}" in done.stderr


def test_no_answer_at_all_is_an_error() -> None:
    done = run("evict", "--all", "--worker", "w-2")
    assert done.exit_code == 1
    assert "no worker answers about its tiers" in done.output


@pytest.mark.parametrize(
    "arguments",
    [
        ["kv", "verify", "--timeout"],
        ["worker", "drain", "w-0", "--wait"],
        ["worker", "role", "w-0", "both", "--wait"],
        ["replay", __file__, __file__, "--target-ttft"],
        ["replay", __file__, __file__, "--rates"],
    ],
)
@pytest.mark.parametrize("number", ["nan", "-5"])
def test_what_is_no_length_of_time_is_refused(arguments: list[str], number: str) -> None:
    done = CliRunner().invoke(main, [*arguments, number])
    assert done.exit_code == 2, done.output
    assert arguments[-1] in done.stderr
