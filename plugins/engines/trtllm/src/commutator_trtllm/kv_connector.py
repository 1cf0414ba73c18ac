"""Our KV manager and storage tiers inside TensorRT-LLM, which imports this module by its name.

`kv_connector_config` names it and its two classes. The scheduler's is on rank 0, a worker's on each
rank. Thin: what they do is in ``kv_scheduler`` and ``kv_worker``. It has not met the real
TensorRT-LLM: it is written against the interface that its repository publishes, with either of its
two KV cache managers.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Sequence
from typing import Any

import torch

from commutator.engine import EmbeddedTiers
from commutator_trtllm import kv_place
from commutator_trtllm.kv_claims import Claims, HostBlocks
from commutator_trtllm.kv_identity import cache_identity
from commutator_trtllm.kv_memory import EngineMemory, layout_regions, pool_region
from commutator_trtllm.kv_options import check_llm_args, read_options
from commutator_trtllm.kv_published import SchedulerBase, WorkerBase
from commutator_trtllm.kv_ranks import Ear, Ranks
from commutator_trtllm.kv_scheduler import TierScheduler
from commutator_trtllm.kv_words import Orders
from commutator_trtllm.kv_worker import TierWorkerSide

__all__ = ["CommutatorKvScheduler", "CommutatorKvWorker"]

_addresses: dict[str, Sequence[str]] = {}
"""Where the ranks' workers hear, by the server's name: from rank 0's worker to the scheduler."""


class CommutatorKvScheduler(SchedulerBase):
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
        """``build_connector_meta`` is told of all blocks, also of those that come with chunks."""

    def cancel_load(self, request: Any, start: int, end: int) -> None:
        self._scheduler.cancelled(request.request_id, start, end)

    def build_connector_meta(self, scheduler_output: Any) -> Orders:
        return self._scheduler.orders(
            scheduler_output.new_requests, scheduler_output.cached_requests
        )

    def request_finished(self, request: Any, cache_block_ids: list[int]) -> bool:
        self._scheduler.ended(request.request_id)
        return False  # what is kept was copied already

    def request_reset(self, request: Any) -> None:
        self._scheduler.ended(request.request_id)

    def shutdown(self) -> None:
        """For whoever stops it without ending the process; TensorRT-LLM does not."""
        if self._ranks is not None:
            self._ranks.close()
            self._ranks = None


class CommutatorKvWorker(WorkerBase):
    """`connector_worker_class`."""

    def __init__(self, llm_args: Any) -> None:
        super().__init__(llm_args)
        self._options = read_options(os.environ)
        check_llm_args(llm_args)
        self._tiers: EmbeddedTiers | None = None
        self._ear: Ear | None = None
        self._side: TierWorkerSide | None = None
        self._orders = Orders()

    def register_kv_caches(self, kv_cache_tensor: torch.Tensor) -> None:
        shape = f"{kv_cache_tensor.dtype} {tuple(kv_cache_tensor.shape[1:])}"
        self._register([pool_region(kv_cache_tensor)], shape)

    def register_kv_cache_layout(self, layout: Any) -> None:
        (group,) = layout.groups[:1]
        buffers = [region.buffers for region in (*group.regions, *group.replicated_regions)]
        self._register(layout_regions(layout), repr(buffers))

    def start_load_kv(self, stream: Any) -> None:
        # Bound anew only for steps with requests; none may be carried out twice.
        orders, self._metadata = self._metadata, None
        self._orders = orders if isinstance(orders, Orders) else Orders()
        self._working.begin(self._orders, stream)

    def wait_for_layer_load(self, layer_idx: int, stream: Any) -> None:
        """Loads come before the forward pass on its own stream."""

    def save_kv_layer(self, layer_idx: int, stream: Any) -> None:
        """Whole blocks are kept, after the last layer."""

    def wait_for_save(self, stream: Any) -> None:
        orders, self._orders = self._orders, Orders()
        self._working.end(orders, stream)
        self._working.poll()

    def get_finished(
        self, finished_gen_req_ids: list[int], started_loading_req_ids: list[int]
    ) -> tuple[list[int], list[int]]:
        self._working.poll()
        return [], []  # nothing is loaded or saved beside the engine's own stream

    def shutdown(self) -> None:
        """Called when the process ends, too."""
        atexit.unregister(self.shutdown)
        if self._ear is not None:
            self._ear.close()
        if self._tiers is not None:
            self._tiers.close()
        self._ear = self._tiers = self._side = None

    def _register(self, regions: Sequence[torch.Tensor], words: str) -> None:
        self.shutdown()
        options, args, rank = self._options, self._llm_args, kv_place.rank()
        memory = EngineMemory(regions, options.staging)
        identity = cache_identity(
            args,
            layout=f"{memory.layout}: {words}",
            block_size=args.kv_cache_config.tokens_per_block,
            rank=rank,
            version=kv_place.version(),
        )
        name = options.worker if args.tensor_parallel_size == 1 else f"{options.worker}-tp{rank}"
        self._tiers = tiers = EmbeddedTiers(options.tiers, memory.arena, identity, worker_id=name)
        tiers.start()
        host = HostBlocks(memory.arena.count)
        claims = Claims(tiers, host)
        self._side = TierWorkerSide(tiers, memory, host, claims)
        self._ear = Ear(claims.stage)
        atexit.register(self.shutdown)
        _addresses[options.worker] = kv_place.gather(self._ear.address)

    @property
    def _working(self) -> TierWorkerSide:
        assert self._side is not None, "register_kv_caches comes first"
        return self._side


def _salt(request: Any) -> str | None:
    """Requests with different salts share nothing. Older versions tell only a number for it."""
    salt: str | None = getattr(request, "cache_salt", None)
    number = getattr(request, "cache_salt_id", None)
    return f"number {number}" if salt is None and number is not None else salt


def _is_more_than_tokens(request: Any) -> bool:
    """What decides its KV is not only tokens and salt, or it is a request that only warms up."""
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
