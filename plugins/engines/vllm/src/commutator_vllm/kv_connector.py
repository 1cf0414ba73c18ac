"""The KV connector that brings our storage tiers into vLLM, which imports this module by name.

vLLM creates one connector in its scheduler process and one in each worker process. This module
only translates vLLM's calls; ``kv_scheduler`` and ``kv_worker`` do the work. Written for vLLM 0.32.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

import vllm
from attrs import frozen
from vllm.distributed import get_pp_group, get_tensor_model_parallel_rank
from vllm.distributed.kv_events import BlockRemoved as VllmRemoved
from vllm.distributed.kv_events import BlockStored as VllmStored
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from commutator import Memory
from commutator.contract.block import (
    BlockRemoved,
    BlockStored,
    CacheIdentity,
    CacheLevel,
    KvEvent,
    cache_level,
)
from commutator.errors import ConfigError, TransferError
from commutator.kv_events import group_fields
from commutator_engine_kit.connector_worker import cuda_fence, no_fence
from commutator_engine_kit.kv import KvConnector
from commutator_engine_kit.model_identity import model_facts, served_identity
from commutator_engine_kit.nixl import load_nixl
from commutator_vllm.connector_metadata import ConnectorMetadata, WorkerReport, merged
from commutator_vllm.kv_groups import group_problems, groups_of
from commutator_vllm.kv_memory import arena_of
from commutator_vllm.kv_scheduler import Blocks, TierScheduler
from commutator_vllm.kv_worker import TierWorkerSide

with suppress(TransferError):  # the tiers report a missing NIXL
    load_nixl()  # before vLLM's own connectors load theirs: a process can have only one build

_OTHER_SOURCE = CacheHitSource.EXTERNAL_UNSPECIFIED
_SOURCES: dict[CacheLevel | None, CacheHitSource] = {
    CacheLevel.HOST: CacheHitSource.HOST,
    CacheLevel.DISK: CacheHitSource.DISK,
}
_WHERE = "kv_transfer_config of CommutatorConnector"


@frozen
class _Metadata(KVConnectorMetadata):  # type: ignore[misc]
    orders: ConnectorMetadata


@frozen
class _WorkerMetadata(KVConnectorWorkerMetadata):  # type: ignore[misc]
    report: WorkerReport

    def aggregate(self, other: _WorkerMetadata) -> _WorkerMetadata:
        return _WorkerMetadata(merged(self.report, other.report))


class CommutatorConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Options: ``tiers``, a file with a `tiers:` section or the section itself; ``worker``, a name.

    The name must be unique among running servers. ``SupportsHMA`` keeps vLLM's hybrid KV cache
    manager on, so that each kind of layer has blocks of its own.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        options = dict(self._kv_transfer_config.kv_connector_extra_config)
        self._tiers = options.pop("tiers", None)
        self._worker_id = str(options.pop("worker", "vllm"))
        _check(vllm_config, kv_cache_config, self._tiers, sorted(options))
        self._groups = groups_of(kv_cache_config)
        self._scheduler: TierScheduler | None = None
        self._worker: TierWorkerSide | None = None
        if role == KVConnectorRole.SCHEDULER:
            self._scheduler = TierScheduler(
                groups=self._groups,
                num_blocks=kv_cache_config.num_blocks,
                workers=vllm_config.parallel_config.world_size,
                lag=1 if vllm_config.scheduler_config.async_scheduling else 0,
            )

    @property
    def requires_kv_delivery(self) -> bool:
        return False  # a block that was not stored is computed again

    # In the scheduler

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        self._scheduling.pool = _Pool(gpu_block_pool)

    def on_new_request(self, request: Any) -> None:
        self._scheduling.arrived(request)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        tokens = self._scheduling.match(request, num_computed_tokens)
        return tokens, bool(tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._scheduling.allocated(request, blocks.get_block_ids(), num_external_tokens)

    def get_external_cache_hit_sources(
        self, request: Any, num_external_tokens: int
    ) -> dict[CacheHitSource, int]:
        sources: dict[CacheHitSource, int] = {}
        by_medium = self._scheduling.sources_of(request, num_external_tokens)
        for medium, tokens in by_medium.items():
            source = _SOURCES.get(cache_level(medium), _OTHER_SOURCE)
            sources[source] = sources.get(source, 0) + tokens
        return sources

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        scheduler = self._scheduling
        scheduler.preempted(scheduler_output.preempted_req_ids or ())
        state = scheduler_output.kv_connector_block_state

        def blocks_of(request_id: str) -> Blocks:
            return state.get_block_ids(request_id) or ()

        scheduled = scheduler_output.num_scheduled_tokens
        return _Metadata(
            scheduler.orders(scheduled, blocks_of, time.monotonic(), state.boundary_state_offloads)
        )

    def update_connector_output(self, connector_output: Any) -> None:
        self._scheduling.loaded(
            connector_output.finished_recving or (), connector_output.failed_recving or ()
        )
        metadata = connector_output.kv_connector_worker_meta
        if isinstance(metadata, _WorkerMetadata):
            self._scheduling.reported(metadata.report)

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._scheduling.finished(request, block_ids, time.monotonic())
        return False, None

    def has_pending_push_work(self) -> bool:
        return self._scheduling.busy

    def has_pending_block_frees(self) -> bool:
        return self._scheduling.frees_blocks_soon(time.monotonic())

    def take_events(self) -> Iterable[Any]:
        return [_event(event) for event in self._scheduling.take_events()]

    def reset_cache(self) -> bool | None:
        self._scheduling.reset()
        return True

    # In a worker

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        arena, layout = arena_of(kv_caches, self._kv_cache_config.num_blocks)
        identity = cache_identity(self._vllm_config, layout, self._groups[0].block_size)
        worker_id = worker_of(self._worker_id, self._vllm_config)
        news = threading.Event()
        connector = KvConnector(
            self._tiers,
            arena,
            identity,
            worker_id=worker_id,
            groups=self._groups,
            wake=news.set,
        )
        connector.start()
        on_gpu = arena.memory is Memory.VRAM
        self._worker = TierWorkerSide(
            connector, news, cuda_fence if on_gpu else no_fence, reports_events=is_first_rank()
        )

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._working.begin(self._orders)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Does nothing: a request is computed only after its loads have finished."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Does nothing: whole blocks are stored after the last layer."""

    def wait_for_save(self) -> None:
        self._working.end(self._orders)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        loaded, failed = self._working.take_loaded(self._orders)
        return KVConnectorTransferResults(finished_recving=loaded, failed_recving=failed)

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        return _WorkerMetadata(self._working.report())

    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.close()

    @property
    def _scheduling(self) -> TierScheduler:
        assert self._scheduler is not None, "this is the scheduler's side"
        return self._scheduler

    @property
    def _working(self) -> TierWorkerSide:
        assert self._worker is not None, "register_kv_caches comes first"
        return self._worker

    @property
    def _orders(self) -> ConnectorMetadata:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, _Metadata)
        return metadata.orders


class _Pool:
    """Holds blocks by their reference count, as vLLM does for a shared prefix."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self.null_block: int = pool.null_block.block_id

    def hold(self, blocks: Sequence[int]) -> None:
        self._pool.touch([self._pool.blocks[block] for block in blocks])

    def released(self, blocks: Sequence[int]) -> None:
        # The last block of a chain is to be evicted first.
        self._pool.free_blocks([self._pool.blocks[block] for block in reversed(blocks)])


def _check(config: Any, kv_cache_config: Any, tiers: Any, unknown: list[str]) -> None:
    """Raises ConfigError for settings that are unsupported or would be ignored."""
    problems = [f"kv_connector_extra_config: unknown option {name}" for name in unknown]
    if not tiers:
        problems.append("kv_connector_extra_config: set `tiers` to the path of a YAML file")
    if config.kv_transfer_config.kv_load_failure_policy != "recompute":
        problems.append(
            "kv_load_failure_policy must be recompute, because loads of blocks can fail"
        )
    if not config.cache_config.enable_prefix_caching:
        problems.append("the tiers need prefix caching: remove --no-enable-prefix-caching")
    parallel = config.parallel_config
    problems += [
        f"{name} above 1 is not supported"
        for name in ("decode_context_parallel_size", "prefill_context_parallel_size")
        if getattr(parallel, name, 1) > 1
    ]
    problems += group_problems(kv_cache_config)
    if problems:
        raise ConfigError(problems, _WHERE)


def _event(event: KvEvent) -> Any:
    if isinstance(event, BlockStored):
        has_kinds = "kv_cache_spec_kind" in VllmStored.__struct_fields__  # not in older versions
        salted = None if event.cache_salt is None else (event.cache_salt,)
        return VllmStored(
            block_hashes=list(event.block_hashes),
            parent_block_hash=event.parent_block_hash,
            token_ids=list(event.token_ids),
            block_size=event.block_size,
            lora_id=None,
            medium=event.medium,
            lora_name=event.adapter,
            extra_keys=None if salted is None else [salted] * len(event.block_hashes),
            **(group_fields(event) if has_kinds else {}),
        )
    assert isinstance(event, BlockRemoved)
    return VllmRemoved(block_hashes=list(event.block_hashes), medium=event.medium)


def cache_identity(config: Any, layout: str, block_size: int) -> CacheIdentity:
    """The identity for a VllmConfig; ``layout`` describes the worker's tensors.

    Hashes all weights, unless the name of their directory is a commit.
    """
    model, parallel = config.model_config, config.parallel_config
    is_random = str(config.load_config.load_format) == "dummy"
    tensor = f"{get_tensor_model_parallel_rank()}/{parallel.tensor_parallel_size}"
    pipeline = f"{get_pp_group().rank_in_group}/{parallel.pipeline_parallel_size}"
    return served_identity(
        "vllm",
        model=model.model,
        revision=model.revision,
        tokenizer=model.tokenizer,
        random_seed=model.seed if is_random else None,
        dtype=f"{model.dtype} {config.cache_config.cache_dtype}",
        facts={
            "model": model_facts(model.hf_config),
            "quantization": model.quantization,
            "speculative": repr(getattr(config.speculative_config, "method", None)),
            "vllm": vllm.__version__,
            "layout": layout,
        },
        block_size=block_size,
        parallel_rank=f"tensor {tensor} pipeline {pipeline}",
    )


def is_first_rank() -> bool:
    """Whether this rank reports KV events; those of the other ranks are the same."""
    return bool(get_tensor_model_parallel_rank() == get_pp_group().rank_in_group == 0)


def worker_of(name: str, config: Any) -> str:
    """The worker name ``name`` with the rank added: each rank has its own tiers."""
    parallel = config.parallel_config
    if parallel.data_parallel_size > 1:
        name += f"-dp{parallel.data_parallel_rank}"
    if parallel.world_size > 1:
        name += f"-tp{get_tensor_model_parallel_rank()}-pp{get_pp_group().rank_in_group}"
    return name
