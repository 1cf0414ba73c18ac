"""The front door asks for counters of hand-overs once there is a prefill worker, and survives."""

from __future__ import annotations

from typing import Any, cast

from attrs import define, evolve, field

from commutator.engine.handover import HandoverStatistics, PullStatistics
from commutator.errors import EngineUnavailableError
from commutator.routing.handover_poll import HandoverPoll
from commutator.routing.view import LiveWorker, WorkerView
from commutator.types import EngineInfo, HandoverInfo, Role, WorkerRecord

INFO = EngineInfo("k", "0", "m", 100, 4, 10, handover=HandoverInfo("p", "i", 4, 8))


@define
class Client:
    counted: HandoverStatistics | None
    asked: int = 0

    async def handover_statistics(self, *, timeout_s: float) -> HandoverStatistics:
        self.asked += 1
        if self.counted is None:
            raise EngineUnavailableError("gone")
        return self.counted


@define
class View:
    workers: list[LiveWorker] = field(factory=list)

    def all(self) -> list[LiveWorker]:
        return self.workers


def worker(name: str, client: Client, role: Role, info: EngineInfo = INFO) -> LiveWorker:
    record = WorkerRecord(name, "e", "k", "m", "a:1", info, role=role)
    return LiveWorker(record, cast(Any, client), connected=True)


async def test_nobody_is_asked_without_a_prefill_worker_and_failures_are_left_out() -> None:
    counted = HandoverStatistics(pulls=PullStatistics(succeeded=3))
    clients = [Client(counted), Client(None), Client(counted)]
    view = View([worker("d", clients[0], Role.BOTH)])
    poll = HandoverPoll(cast(WorkerView, view))
    await poll.ask()
    assert not clients[0].asked
    view.workers += [
        worker("p", clients[1], Role.PREFILL),
        worker("other", clients[2], Role.BOTH, evolve(INFO, handover=None)),
    ]
    await poll.ask()
    assert poll.statistics == {"d": counted}
    assert [client.asked for client in clients] == [1, 1, 0]
    # The prefill worker takes another role: its and the others' counters go on being told.
    view.workers = view.workers[:1]
    await poll.ask()
    assert poll.statistics == {"d": counted}
