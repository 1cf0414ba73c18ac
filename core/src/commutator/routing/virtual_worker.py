"""A worker for the routing code whose engine exists in virtual time only."""

from __future__ import annotations

from attrs import frozen

from commutator.engine.contract import EngineClient, TokenStream
from commutator.engine.virtual import VirtualEngine
from commutator.errors import EngineError
from commutator.routing.trace import TRACE_BLOCK_TOKENS
from commutator.routing.view import LiveWorker
from commutator.types import EngineInfo, EngineLoad, GenerateRequest, Role, WorkerRecord

__all__ = ["VirtualWorker", "virtual_live_worker"]


def virtual_live_worker(
    worker_id: str, block_size: int = TRACE_BLOCK_TOKENS, role: Role = Role.BOTH
) -> LiveWorker:
    """A worker that can be routed to, with nothing behind it."""
    info = EngineInfo("virtual", "1", "model", 1 << 20, block_size, 1 << 20)
    record = WorkerRecord(worker_id, "virtual", "virtual", "model", "", info, role=role)
    return LiveWorker(record, _NoClient(), connected=True)


@frozen(eq=False)
class VirtualWorker:
    """An engine, and the record by which it can be routed to."""

    worker_id: str
    engine: VirtualEngine
    live: LiveWorker

    @classmethod
    def make(cls, worker_id: str, engine: VirtualEngine, role: Role = Role.BOTH) -> VirtualWorker:
        return cls(worker_id, engine, virtual_live_worker(worker_id, engine.block_size, role))

    @property
    def role(self) -> Role:
        return self.live.record.role


class _NoClient(EngineClient):
    """There is nothing to talk to."""

    async def start(self) -> EngineInfo:
        raise EngineError("a virtual worker cannot be connected to")

    def generate(self, request: GenerateRequest) -> TokenStream:
        raise EngineError("a virtual worker generates nothing")

    async def load(self) -> EngineLoad:
        return EngineLoad()

    async def close(self) -> None:
        pass
