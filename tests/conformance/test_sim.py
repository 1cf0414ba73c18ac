"""The sim engine passes the shipped suite at every speed, but for what needs a model."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from commutator.contract.disagg import HandoverStyle
from commutator.contract.engine import EngineClient
from commutator.engine.client import TokenApiClient
from commutator_engine_kit.kv.transfer.protocol import PullHandover
from commutator_engine_kit.server import TokenApiServer
from commutator_sim.config import SimConfig, SimTier
from commutator_sim.engine import SimEngine
from commutator_testing.engines import EngineContract


class SimContract(EngineContract):
    capabilities = frozenset({"stop_tokens", "logprobs", "prefix_cache"})
    config: SimConfig

    @asynccontextmanager
    async def running(self) -> AsyncIterator[EngineClient]:
        server = TokenApiServer(SimEngine(self.config, model="sim", max_model_len=8192))
        port = await server.start("127.0.0.1", 0)
        try:
            yield TokenApiClient(f"127.0.0.1:{port}")
        finally:  # what is skipped leaves by an exception
            await server.stop()

    def another_client(self, client: EngineClient) -> EngineClient:
        assert isinstance(client, TokenApiClient)
        return TokenApiClient(client.address)

    def handover_style(self, lease_s: float) -> HandoverStyle:
        return PullHandover(lease_s)


class TestUnlimited(SimContract):
    config = SimConfig(kind="sim", speedup="unlimited")


class TestUnlimitedTokenByToken(SimContract):
    config = SimConfig(kind="sim", speedup=0, burst_tokens=1)


class TestScaledTime(SimContract):
    config = SimConfig(kind="sim", speedup=20)


class TestSmallAndTiered(SimContract):
    config = SimConfig(
        kind="sim",
        speedup=50,
        kv_capacity_blocks=600,
        max_running_requests=3,
        max_tokens_per_step=40,
        tiers=(
            SimTier(kind="host", capacity_blocks=20, bandwidth_bytes_per_s=2e10),
            SimTier(kind="disk", capacity_blocks=100, bandwidth_bytes_per_s=2e9),
        ),
    )
