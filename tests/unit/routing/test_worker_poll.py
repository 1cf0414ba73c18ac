"""The front door asks for counters of hand-overs once there is a prefill worker, and survives."""

from __future__ import annotations

from typing import Any, cast

from attrs import define, evolve, field

from commutator.contract.worker import (
    EngineInfo,
    KvTransferInfo,
    PullStatistics,
    Role,
    TransferStatistics,
    WorkerRecord,
)
from commutator.errors import EngineUnavailableError
from commutator.routing.workers import LiveWorker, LiveWorkers, WorkerPoll

INFO = EngineInfo(
    kind="k",
    version="0",
    model="m",
    max_model_len=100,
    block_size=4,
    kv_capacity_blocks=10,
    handover=KvTransferInfo(protocol="p", identity="i", block_size=4, token_bytes=8),
)


@define
class Client:
    counted: TransferStatistics | None
    asked: int = 0

    async def handover_statistics(self, *, timeout_s: float) -> TransferStatistics:
        self.asked += 1
        if self.counted is None:
            raise EngineUnavailableError("gone")
        return self.counted

    async def refused_connections(self, *, timeout_s: float) -> dict[str, int]:
        if self.counted is None:
            raise EngineUnavailableError("gone")
        return {"token API": self.counted.pulls.succeeded}


@define
class View:
    workers: list[LiveWorker] = field(factory=list)

    def all(self) -> list[LiveWorker]:
        return self.workers


def worker(name: str, client: Client, role: Role, info: EngineInfo = INFO) -> LiveWorker:
    record = WorkerRecord(
        worker_id=name, engine="e", kind="k", model="m", address="a:1", info=info, role=role
    )
    return LiveWorker(record, cast(Any, client), connected=True)


async def test_no_worker_is_polled_without_a_prefill_worker_and_failures_are_left_out() -> None:
    counted = TransferStatistics(pulls=PullStatistics(succeeded=3))
    clients = [Client(counted), Client(None), Client(counted)]
    view = View([worker("d", clients[0], Role.BOTH)])
    poll = WorkerPoll(cast(LiveWorkers, view), tiers=False)
    await poll.ask()
    assert not clients[0].asked
    view.workers += [
        worker("p", clients[1], Role.PREFILL),
        worker("other", clients[2], Role.BOTH, evolve(INFO, handover=None)),
    ]
    await poll.ask()
    assert poll.transfers == {"d": counted}
    assert [client.asked for client in clients] == [1, 1, 0]
    # The prefill worker takes another role: its and the others' counters go on being told.
    view.workers = view.workers[:1]
    await poll.ask()
    assert poll.transfers == {"d": counted}
