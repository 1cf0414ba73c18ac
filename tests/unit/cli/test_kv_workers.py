"""Asking workers about their tiers: who answers, and what is said of the others."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from attrs import asdict
from click.testing import CliRunner, Result
from tests.support.front_door import FakeDispatcher, front_door

from commutator.cli.main import main
from commutator.contract.worker import TierVerification
from commutator.errors import EngineError, EngineUnavailableError, EngineWithoutTiersError
from commutator_http import administration

INTACT = TierVerification(
    tier="dram",
    blocks=7,
    intact=7,
    corrupt=0,
    gone=0,
    unreadable=0,
    bytes=7,
    seconds=0.1,
    problem=None,
)
DONE: dict[str, Any] = {"evict": {"dram": 7}, "verify": [asdict(INTACT)]}
ANSWERS: dict[str, EngineError | None] = {
    "a:1": None,
    "b:1": EngineUnavailableError("no answer within 3600 s"),
    "c:1": EngineWithoutTiersError(),
}
EVICT, VERIFY = ("evict", "--all"), ("verify",)


class FakeClient:
    def __init__(self, address: str) -> None:
        self._answer = ANSWERS[address]

    async def kv_evict(self, tier: str | None, *, timeout_s: float) -> Mapping[str, int]:
        if self._answer is not None:
            raise self._answer
        return {"dram": 7}

    async def kv_verify(self, tier: str | None, *, timeout_s: float) -> Sequence[TierVerification]:
        if self._answer is not None:
            raise self._answer
        return [INTACT]

    async def close(self) -> None:
        pass


@pytest.fixture(autouse=True)
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, str | None]:
    """The addresses of the workers that are there; a test may remove some."""
    monkeypatch.setattr(administration, "TokenApiClient", FakeClient)
    return {f"w-{n}": address for n, address in enumerate(ANSWERS)}


async def run(asked: dict[str, str | None], *arguments: str) -> Result:
    """A command in a thread, as the front door runs in this one."""
    # Paths of Unix sockets are short, and pytest's folders are not.
    with tempfile.TemporaryDirectory() as folder:
        socket = f"{folder}/door.sock"
        async with front_door(FakeDispatcher(addresses=asked), local_socket=socket) as door:
            command = ["kv", *arguments, "--url", door.url]
            return await asyncio.to_thread(CliRunner().invoke, main, command)


async def test_workers_that_do_not_answer_are_listed_beside_the_answers(
    asked: dict[str, str | None],
) -> None:
    done = await run(asked, *EVICT)
    assert done.stdout == "w-0: removed 7 blocks from dram\n"
    assert "w-1: no answer within 3600 s" in done.stderr
    assert "w-2: this worker has no storage tiers" in done.stderr


@pytest.mark.parametrize("command", [EVICT, VERIFY])
@pytest.mark.parametrize("form", [(), ("--json",)])
async def test_a_worker_that_did_not_do_it_is_a_failure(
    asked: dict[str, str | None], command: tuple[str, ...], form: tuple[str, ...]
) -> None:
    done = await run(asked, *command, *form)
    assert done.exit_code == 1, done.output
    assert "w-0" in done.stdout, "what others did is shown nevertheless"
    if form:
        assert json.loads(done.stdout) == {"w-0": DONE[command[0]]}


@pytest.mark.parametrize("command", [EVICT, VERIFY])
async def test_a_worker_without_tiers_has_nothing_to_do(
    asked: dict[str, str | None], command: tuple[str, ...]
) -> None:
    del asked["w-1"]
    done = await run(asked, *command)
    assert done.exit_code == 0, done.output
    assert "w-2: this worker has no storage tiers" in done.stderr


async def test_no_answer_at_all_is_an_error(asked: dict[str, str | None]) -> None:
    done = await run(asked, "evict", "--all", "--worker", "w-2")
    assert done.exit_code == 1
    assert "No tiers are configured. Add `tiers:` to your file." in done.output
    done = await run(asked, "evict", "--all", "--worker", "w-1")
    assert done.exit_code == 1
    assert "the request failed at every worker:\n  w-1: no answer within 3600 s" in done.output


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
