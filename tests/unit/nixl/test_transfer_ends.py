"""A transfer that has ended is over for good, whatever fails afterwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from attrs import define, field
from tests.support.transfer import Buffer

from commutator.contract.tier import Direction, Memory, Span
from commutator.errors import TransferError
from commutator_engine_kit.nixl.agent import Request, Transfer, TransferAgent, TransferPath


@define
class Handle:
    release: Callable[[], None]


@define
class Nixl:
    """Everything is there at once, but cannot be counted."""

    state: str = "DONE"
    released: int = field(init=False, default=0)
    can_release: bool = True

    def transfer(self, handle: Handle) -> str:
        return self.state

    def get_xfer_telemetry(self, handle: Handle) -> Any:
        raise RuntimeError("NIXL_ERR_NO_TELEMETRY")

    def release(self) -> None:
        self.released += 1
        if not self.can_release:
            raise RuntimeError("NIXL_ERR_REPOST_ACTIVE")


def posted(nixl: Nixl) -> tuple[Transfer, list[Transfer]]:
    ended: list[Transfer] = []
    request = Request(TransferPath(Direction.READ, Memory.DRAM, Memory.DRAM, "UCX"), [], [])
    return Transfer(1, request, nixl, Handle(nixl.release), ended.append), ended


def test_bytes_that_cannot_be_counted_have_arrived_all_the_same() -> None:
    nixl = Nixl()
    transfer, ended = posted(nixl)
    transfer.post()
    assert transfer.done()
    assert (nixl.released, ended, transfer.moved_bytes) == (1, [transfer], 0)


def test_a_handle_that_cannot_be_released_ends_its_transfer_too() -> None:
    transfer, ended = posted(Nixl(can_release=False))
    with pytest.raises(TransferError, match="release a transfer"):
        transfer.post()
    assert ended == [transfer]


def test_an_agent_without_telemetry_moves_and_closes(
    agent: TransferAgent, memory: Buffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> Any:
        raise RuntimeError("NIXL_ERR_NO_TELEMETRY")

    monkeypatch.setattr(agent._nixl, "get_xfer_telemetry", fails)
    start = memory.region.span.address
    transfer = agent.start(
        TransferPath(Direction.WRITE, Memory.DRAM, Memory.DRAM, "UCX"),
        [Span(start, 4096)],
        [Span(start + 8192, 4096)],
    )
    transfer.wait(10)
    agent.close(1.0)
