"""The KV connector that brings our storage tiers into TensorRT-LLM.

TensorRT-LLM imports this module as `kv_connector_config` says. The scheduler's class is created on
rank 0, the worker's class on each rank. This module only translates TensorRT-LLM's calls;
``kv_scheduler`` and ``kv_worker`` do the work. It supports both KV cache managers of TensorRT-LLM.
It has not been tested with the real TensorRT-LLM, only written against its published interface.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Sequence
from typing import Any

import torch

from commutator.contract.block import CacheIdentity
from commutator_engine_kit.kv import KvConnector
from commutator_engine_kit.model_identity import served_identity
from commutator_trtllm.kv_memory import EngineMemory, layout_regions, pool_region
from commutator_trtllm.kv_scheduler import ConnectorMetadata, TierScheduler
from commutator_trtllm.kv_staging import Claims, HostBlocks, Ranks, StageServer
from commutator_trtllm.kv_worker import TierWorkerSide
from commutator_trtllm.options import check_llm_args, read_options

try:
    from tensorrt_llm._torch.pyexecutor.connectors import kv_cache_connector as published
except ModuleNotFoundError:  # older versions
    from tensorrt_llm._torch.pyexecutor import kv_cache_connector as published

_addresses: dict[str, Sequence[str]] = {}
"""Addresses of the ranks' StageServers by server name, from rank 0's worker to the scheduler."""


class CommutatorKvScheduler(published.KvCacheConnectorScheduler):  # type: ignore[misc]
    """`connector_scheduler_class`."""

    def __init__(self, llm_args: Any) -> None:
        super().__init__(llm_args)
        self._options = read_options(os.environ)
        check_llm_args(llm_args)
        self._scheduler = TierScheduler(
            block_size=llm_args.kv_cache_config.tokens_per_block, wait_s=self._options.wait_s
        )
        self._ranks: Ranks | None = None

    def wait_for_initialization(self) -> None:
        self._ranks = Ranks(_addresses[self._options.worker])

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int, bool]:
        if self._ranks is None or _is_more_than_tokens(request):
            return 0, False
        request_id = request.request_id
        stage = self._scheduler.arrived(
            request_id, request.get_tokens(0), num_computed_tokens, _salt(request)
        )
        if stage is None:
            return 0, False
        return self._scheduler.staged(request_id, stage, self._ranks.stage(stage)), False

    def update_state_after_alloc(self, request: Any, block_ids: list[int]) -> None:
        """Does nothing: ``build_connector_meta`` gets all blocks, also those of later chunks."""

    def cancel_load(self, request: Any, start: int, end: int) -> None:
        self._scheduler.cancelled(request.request_id, start, end)

    def build_connector_meta(self, scheduler_output: Any) -> ConnectorMetadata:
        return self._scheduler.orders(
            scheduler_output.new_requests, scheduler_output.cached_requests
        )

    def request_finished(self, request: Any, cache_block_ids: list[int]) -> bool:
        self._scheduler.ended(request.request_id)
        return False  # blocks to store were copied before

    def request_reset(self, request: Any) -> None:
        self._scheduler.ended(request.request_id)

    def shutdown(self) -> None:
        """Close the connections. TensorRT-LLM does not call this; its process just ends."""
        if self._ranks is not None:
            self._ranks.close()
            self._ranks = None


class CommutatorKvWorker(published.KvCacheConnectorWorker):  # type: ignore[misc]
    """`connector_worker_class`."""

    def __init__(self, llm_args: Any) -> None:
        super().__init__(llm_args)
        self._options = read_options(os.environ)
        check_llm_args(llm_args)
        self._connector: KvConnector | None = None
        self._stage_server: StageServer | None = None
        self._side: TierWorkerSide | None = None
        self._orders = ConnectorMetadata()
        self._metadata: object = None

    def register_kv_caches(self, kv_cache_tensor: torch.Tensor) -> None:
        shape = f"{kv_cache_tensor.dtype} {tuple(kv_cache_tensor.shape[1:])}"
        self._register([pool_region(kv_cache_tensor)], shape)

    def register_kv_cache_layout(self, layout: Any) -> None:
        (group,) = layout.groups[:1]
        buffers = [region.buffers for region in (*group.regions, *group.replicated_regions)]
        self._register(layout_regions(layout), repr(buffers))

    def start_load_kv(self, stream: Any) -> None:
        # TensorRT-LLM binds metadata only in steps with requests; none may be carried out twice.
        orders, self._metadata = self._metadata, None
        self._orders = orders if isinstance(orders, ConnectorMetadata) else ConnectorMetadata()
        self._working.begin(self._orders, stream)

    def wait_for_layer_load(self, layer_idx: int, stream: Any) -> None:
        """Does nothing: loads precede the forward pass on the same stream."""

    def save_kv_layer(self, layer_idx: int, stream: Any) -> None:
        """Does nothing: whole blocks are stored after the last layer."""

    def wait_for_save(self, stream: Any) -> None:
        orders, self._orders = self._orders, ConnectorMetadata()
        self._working.end(orders, stream)
        self._working.poll()

    def get_finished(
        self, finished_gen_req_ids: list[int], started_loading_req_ids: list[int]
    ) -> tuple[list[int], list[int]]:
        self._working.poll()
        return [], []  # all loads and saves are ordered on the engine's stream

    def shutdown(self) -> None:
        """Close the tiers. Also called when the process ends."""
        atexit.unregister(self.shutdown)
        if self._stage_server is not None:
            self._stage_server.close()
        if self._connector is not None:
            self._connector.close()
        self._stage_server = self._connector = self._side = None

    def _register(self, regions: Sequence[torch.Tensor], shape: str) -> None:
        self.shutdown()
        options, args, rank = self._options, self._llm_args, _rank()
        memory = EngineMemory(regions, options.staging)
        identity = _identity(args, f"{memory.layout}: {shape}", rank)
        name = options.worker if args.tensor_parallel_size == 1 else f"{options.worker}-tp{rank}"
        connector = KvConnector(options.tiers, memory.arena, identity, worker_id=name)
        self._connector = connector
        connector.start()
        connector.poll_on_own_thread()  # TensorRT-LLM publishes no events about other media
        host = HostBlocks(memory.arena.count)
        claims = Claims(connector, host)
        self._side = TierWorkerSide(connector, memory, host, claims)
        self._stage_server = StageServer(claims.stage)
        atexit.register(self.shutdown)
        _addresses[options.worker] = _gather(self._stage_server.address)

    @property
    def _working(self) -> TierWorkerSide:
        assert self._side is not None, "register_kv_caches comes first"
        return self._side


def _rank() -> int:
    """This process's rank in the server."""
    from tensorrt_llm._utils import mpi_rank

    return int(mpi_rank())


def _gather(value: str) -> list[str]:
    """The values of all ranks, by rank. Every rank must call it; it waits for all of them."""
    from tensorrt_llm._utils import mpi_allgather

    values: list[str] = mpi_allgather(value)
    return values


def _identity(llm_args: Any, layout: str, rank: int) -> CacheIdentity:
    """The identity of this rank's blocks, whose pieces ``layout`` describes. Hashes all weights.

    It includes the printed form of TensorRT-LLM's options, so that options that are unknown here
    can only cause misses.
    """
    import tensorrt_llm

    cache = llm_args.kv_cache_config
    return served_identity(
        "tensorrt_llm",
        model=str(llm_args.model),
        revision=getattr(llm_args, "revision", None),
        tokenizer=llm_args.tokenizer if isinstance(llm_args.tokenizer, str) else None,
        dtype=f"{llm_args.dtype} {cache.dtype}",
        facts={
            "tensorrt_llm": str(tensorrt_llm.__version__),
            "layout": layout,
            "quantization": repr(getattr(llm_args, "quant_config", None)),
            "attention": repr(getattr(llm_args, "attn_backend", None)),
            "load_format": repr(getattr(llm_args, "load_format", None)),
        },
        block_size=cache.tokens_per_block,
        parallel_rank=f"tensor {rank}/{llm_args.tensor_parallel_size}",
    )


def _salt(request: Any) -> str | None:
    """The request's cache salt. Older versions have only a number for it."""
    salt: str | None = getattr(request, "cache_salt", None)
    number = getattr(request, "cache_salt_id", None)
    return f"number {number}" if salt is None and number is not None else salt


def _is_more_than_tokens(request: Any) -> bool:
    """Whether its KV depends on more than tokens and salt, or it is only a warm-up request."""
    names = (
        *("is_dummy_request", "is_attention_dp_dummy", "is_cuda_graph_dummy"),
        *("lora_task_id", "multimodal_hashes", "multimodal_positions", "multimodal_lengths"),
        *("multimodal_embedding", "mrope_rotary_cos_sin", "prompt_embedding_table"),
    )
    values = (getattr(request, name, None) for name in names)
    return any(
        value is not None
        and value is not False
        and not (hasattr(value, "__len__") and not len(value))
        for value in values
    )
