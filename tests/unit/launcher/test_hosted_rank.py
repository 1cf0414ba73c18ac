"""Two ranks on this machine, with real processes: they start together, and end together."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from pathlib import Path

import pytest

from commutator.contract.launcher import AgentPlan, AgentState
from commutator_ray.epochs import Beat, Epoch, Epochs, Member
from commutator_ray.hosted_rank import HostedRank

pytestmark = pytest.mark.slow
PATIENCE_S = 60.0


class Group:
    """Two ranks; what their agents report is in files named after the rank."""

    def __init__(self, folder: Path, **order: str) -> None:
        self.folder = folder
        self.epochs = Epochs(2, "e")
        self.ranks = [
            HostedRank(
                AgentPlan(
                    name="w-0",
                    engine="w",
                    generation="a",
                    module="commutator_testing.stand_in_agent",
                    files={"order.json": json.dumps({"report": str(folder / str(rank)), **order})},
                    grace_s=10,
                    nodes=2,
                ),
                Member(rank, f"m{rank}"),
                self._ask,
                address="127.0.0.1",
                control="127.0.0.1:1",
                on_line=lambda *_: None,
            )
            for rank in range(2)
        ]

    async def _ask(self, beat: Beat) -> Epoch | None:
        return self.epochs.hear(beat, time.monotonic())

    async def until_both_run(self, *before: int) -> list[int]:
        """The processes of both ranks, once none of them is one of ``before``."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                files = [self.folder / str(rank) for rank in range(2)]
                if all(file.exists() for file in files):
                    pids = [int(json.loads(file.read_text())["pid"]) for file in files]
                    if not set(pids) & set(before):
                        return pids
                await asyncio.sleep(0.05)


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.asyncio
async def test_when_one_process_ends_both_start_anew_and_stop_leaves_none(tmp_path: Path) -> None:
    group = Group(tmp_path)
    running = [asyncio.create_task(rank.run()) for rank in group.ranks]
    first = await group.until_both_run()
    os.kill(first[1], signal.SIGKILL)
    second = await group.until_both_run(*first)
    assert not any(map(is_alive, first))
    assert "SIGKILL" in (group.ranks[1].cause or "")
    for rank in group.ranks:
        rank.stop(10)
    await asyncio.gather(*running)
    assert not any(map(is_alive, second))
    assert (tmp_path / "0.ended").exists(), "it was asked to end"


@pytest.mark.asyncio
async def test_a_rank_that_can_never_start_has_failed(tmp_path: Path) -> None:
    group = Group(tmp_path, problem="no such model")
    await asyncio.wait_for(asyncio.gather(*(rank.run() for rank in group.ranks)), PATIENCE_S)
    assert [rank.state for rank in group.ranks] == [AgentState.FAILED] * 2
    assert group.ranks[0].cause == "no such model"
