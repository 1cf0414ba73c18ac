"""Asking workers about their tiers: who answers, and what is said of the others."""

from __future__ import annotations

from typing import Any

import pytest
from click.testing import CliRunner

from commutator.cli import kv_workers
from commutator.cli.kv_workers import Worker
from commutator.cli.main import main
from commutator.errors import EngineError, EngineUnavailableError

ANSWERS: dict[str, Any] = {
    "a:1": {"dram": 7},
    "b:1": EngineUnavailableError("connection refused"),
    "c:1": EngineError("this engine keeps no blocks in tiers"),
}


class FakeClient:
    def __init__(self, address: str) -> None:
        self._answer = ANSWERS[address]

    async def kv_admin(self, what: str, arguments: Any, *, timeout_s: float) -> Any:
        if isinstance(self._answer, EngineError):
            raise self._answer
        return self._answer

    async def close(self) -> None:
        pass


@pytest.fixture(autouse=True)
def _three_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    workers = [Worker(f"w-{n}", "m", address) for n, address in enumerate(ANSWERS)]
    monkeypatch.setattr(kv_workers, "TokenApiClient", FakeClient)
    monkeypatch.setattr(
        kv_workers,
        "find_workers",
        lambda url, key, one: [w for w in workers if one in (None, w.worker_id)],
    )


def test_who_does_not_answer_is_told_beside_the_answers() -> None:
    done = CliRunner().invoke(main, ["kv", "evict", "--all"])
    assert done.exit_code == 0, done.output
    assert done.stdout == "w-0: removed 7 blocks from dram\n"
    assert "w-1: connection refused" in done.stderr
    assert "w-2: this engine keeps no blocks in tiers" in done.stderr


def test_no_answer_at_all_is_an_error() -> None:
    done = CliRunner().invoke(main, ["kv", "evict", "--all", "--worker", "w-2"])
    assert done.exit_code == 1
    assert "no worker answers about its tiers" in done.output
