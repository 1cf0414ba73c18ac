"""The exporter's questions: what is answered, and what is refused."""

from __future__ import annotations

import asyncio

import pytest
from tests.support.handover_rig import request, tiny_worker

from commutator.contract.request import GenerateRequest
from commutator.contract.worker import EngineInfo, EngineLoad, TransferStatistics
from commutator.engine.client import TokenApiClient
from commutator.errors import EngineError, EngineHandoverError, EngineUnavailableError
from commutator_engine_kit.kv.transfer.protocol import ExportState, ExportUpdate, WatchRequest
from commutator_engine_kit.kv.transfer.sources import Connection, Sources
from commutator_engine_kit.server import Emit, TokenApiServer, TokenEngine


class Plain(TokenEngine):
    """Knows nothing of hand-overs."""

    def start(self, emit: Emit) -> EngineInfo:
        return EngineInfo(
            kind="plain",
            version="0",
            model="m",
            max_model_len=10,
            block_size=1,
            kv_capacity_blocks=1,
        )

    def submit(self, key: int, request: GenerateRequest) -> None: ...

    def abort(self, key: int) -> None: ...

    def load(self) -> EngineLoad:
        return EngineLoad()

    def reset_prefix_cache(self) -> None: ...

    def stop(self) -> None: ...


async def test_questions_that_make_no_sense_are_refused_and_others_answered() -> None:
    async with tiny_worker() as worker:
        assert worker.record.info.handover is not None
        address = worker.record.info.handover.address
        assert address is not None
        exporter = Connection(address)
        await exporter.start()
        for what, arguments in (
            ("guess", {}),
            ("look_up", {}),
            ("watch", {"id": "x"}),
            ("watch", {"id": 1, "have": 0, "state": "unknown", "wait_s": 0.0}),
            ("release", {}),
        ):
            with pytest.raises(EngineHandoverError):
                await exporter.ask(what, arguments, timeout_s=60)
        sources = Sources()
        watch = WatchRequest("x", 0, ExportState.UNKNOWN, 0.01)
        news = await sources.ask(address, "watch", watch, ExportUpdate, timeout_s=60)
        assert news.state is ExportState.UNKNOWN
        # What is released before it begins is over, and its prefill is refused.
        assert await exporter.ask("release", {"id": "x"}, timeout_s=60) is None
        news = await sources.ask(address, "watch", watch, ExportUpdate, timeout_s=60)
        assert news.state is ExportState.FAILED
        with pytest.raises(EngineError, match="given the hand-over up"):
            await worker.tokens(request(range(5, 40), handover={"pull": "x", "lease_s": 60.0}))
        await worker.until_idle()
        assert (await worker.client.handover_statistics()).exports.active == 0
        await sources.close()
        await exporter.close()


async def test_a_connection_that_is_lost_fails_its_questions_and_is_made_again() -> None:
    async with tiny_worker() as worker:
        assert worker.record.info.handover is not None
        exporter = Connection(worker.record.info.handover.address or "")
        await exporter.start()
        watch = WatchRequest("x", 0, ExportState.UNKNOWN, 60.0)
        asking = asyncio.create_task(exporter.ask("watch", watch, timeout_s=60))
        await asyncio.sleep(0.05)
        await exporter.close()
        with pytest.raises(EngineUnavailableError, match="closed"):
            await asking
        with pytest.raises(EngineUnavailableError, match="not connected"):
            await exporter.ask("watch", watch, timeout_s=60)
        await exporter.start()
        assert await exporter.ask("release", {"id": "y"}, timeout_s=60) is None
        await exporter.close()
    with pytest.raises(EngineUnavailableError):
        await exporter.start()


async def test_an_engine_that_hands_nothing_over_counts_nothing() -> None:
    server = TokenApiServer(Plain())
    port = await server.start("127.0.0.1", 0)
    client = TokenApiClient(f"127.0.0.1:{port}", answer_timeout_s=60)
    try:
        assert await client.handover_statistics(timeout_s=60) == TransferStatistics()
    finally:
        await client.close()
        await server.stop()
