"""vLLM's AsyncLLM as the token API uses it. Written for vLLM 0.32.

vLLM's HTTP endpoints add a task, a queue and a generator for each request, and JSON for each token.
Here a request is registered with AsyncLLM's output processor directly, which calls back.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import msgspec
import vllm
from attrs import evolve
from pydantic import TypeAdapter
from vllm.entrypoints.serve.lora.protocol import (
    LoadLoRAAdapterRequest,
    UnloadLoRAAdapterRequest,
)
from vllm.exceptions import GracefulHTTPError, VLLMClientError
from vllm.inputs.engine import tokens_input
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.metrics.loggers import AggregateStatLoggerBase

from commutator import AdapterIdentity, EngineInfo, EngineLoad, GenerateRequest
from commutator.errors import (
    EngineError,
    EngineOverloadedError,
    EngineUnavailableError,
    RequestError,
)
from commutator_engine_kit.completions import ModelCard, ModelList
from commutator_engine_kit.model_identity import adapter_digest, changed_files
from commutator_vllm.discovery import CacheFacts, KvEventSource, engine_info, event_source
from commutator_vllm.messages import sampling_fields
from commutator_vllm.token_engine import Outputs

_sampling = TypeAdapter(SamplingParams).validate_python
"""As vLLM's HTTP API reads the same fields."""


class AsyncLlmEngine:
    """What the token API asks of AsyncLLM. Used from one event loop."""

    def __init__(self, state: Any, tasks: Any, host: str) -> None:
        """``state`` is that of vLLM's app: its engine, its arguments and its adapters."""
        self._llm = state.engine_client
        self._models = state.openai_serving_models
        self._tasks = tasks
        self._verified: set[str] = set()
        """Adapters that were loaded from the files that their digest is of."""
        self._stats = _SchedulerStats()
        self._llm.logger_manager.stat_loggers.append(self._stats)
        self.info = _info(self._llm, state.args, host)
        settings = self._llm.vllm_config.structured_outputs_config
        self._llguidance = settings.backend == "guidance"
        self._sees_thoughts = bool(settings.reasoning_parser) and not settings.enable_in_reasoning

    @classmethod
    async def of(cls, state: Any, host: str) -> AsyncLlmEngine:
        """Raises ValueError for a server that cannot serve the token API."""
        if state.engine_client.logger_manager is None:
            raise ValueError("--disable-log-stats hides the load from routing; remove it")
        return cls(state, await state.engine_client.get_supported_tasks(), host)

    def knows(self, adapter: AdapterIdentity) -> bool:
        """Whether this adapter is loaded. Raises RequestError when it cannot be loaded, either."""
        if adapter.source is not None:
            return adapter.digest in self._verified
        if adapter.digest in self._models.lora_requests:
            return True
        if not self._models.lora_resolvers:
            raise RequestError(_no_adapter(adapter))
        return False

    async def load_adapter(self, adapter: AdapterIdentity) -> None:
        """Load an adapter, under its digest as name, from its folder or by vLLM's resolvers.

        Raises RequestError when vLLM cannot load it or has none, EngineError when its files have
        changed.
        """
        name, why = adapter.digest, ""
        if adapter.source is None:
            await self._models.resolve_lora(name)
        else:
            asked = LoadLoRAAdapterRequest(lora_name=name, lora_path=adapter.source)
            found = await self._models.load_lora_adapter(asked)
            why = "" if isinstance(found, str) else f": {found.error.message}"
        if name not in self._models.lora_requests:
            raise RequestError(_no_adapter(adapter) + why)
        if adapter.source is not None:
            digest = await asyncio.to_thread(adapter_digest, Path(adapter.source))
            if digest != name:  # of what vLLM has just read
                await self._models.unload_lora_adapter(UnloadLoRAAdapterRequest(lora_name=name))
                raise EngineError(changed_files(adapter))
            self._verified.add(name)

    def register(self, request: GenerateRequest, outputs: Outputs) -> Any:
        """Check a request and register where its outputs go. Returns what ``send`` takes.

        Sets ``outputs.request_id``. Raises RequestError, EngineOverloadedError, and
        EngineUnavailableError when the engine is dead.
        """
        llm = self._llm
        self._require_life()
        try:
            made = llm.input_processor.process_inputs(
                request.request_id,
                tokens_input(list(request.token_ids), cache_salt=request.cache_salt),
                _sampling_params(request, self._sees_thoughts, self._llguidance),
                supported_tasks=self._tasks,
                lora_request=self._models.lora_requests[request.adapter.digest]
                if request.adapter
                else None,
                trace_headers=None
                if request.traceparent is None
                or llm.observability_config.otlp_traces_endpoint is None
                else {"traceparent": request.traceparent},
                priority=request.priority,
                data_parallel_rank=request.data_parallel_rank,
            )
            llm.check_admission(request_id=request.request_id)
        except GracefulHTTPError as error:  # full
            raise EngineOverloadedError(str(error)) from error
        except (VLLMClientError, ValueError, TypeError) as error:
            raise RequestError(str(error)) from error
        if request.constraint is not None:  # with a reasoning parser vLLM would guess
            made.reasoning_ended = not request.constraint.after
        llm.input_processor.assign_request_id(made)
        outputs.request_id = made.request_id
        llm.output_processor.add_request(made, None, None, 0, outputs)
        return made

    async def send(self, registered: Any) -> None:
        try:
            await self._llm.engine_core.add_request_async(registered)
        except EngineDeadError as error:
            raise EngineUnavailableError(str(error)) from error

    async def abort(self, request_id: str) -> None:
        await self._llm.abort(request_id, internal=True)

    def load(self) -> EngineLoad:
        """The load after the last step. Raises EngineUnavailableError when the engine is dead."""
        self._require_life()
        running, used = self._stats.running, self._stats.usage
        unfinished = self._llm.get_num_unfinished_requests()
        capacity = self.info.kv_capacity_blocks
        return EngineLoad(
            running=min(running, unfinished),
            waiting=max(0, unfinished - running),
            kv_used_blocks=round(used * capacity / self.info.data_parallel_size),
            kv_capacity_blocks=capacity,
        )

    async def reset_prefix_cache(self) -> None:
        # Blocks are free one step after their request's last token: vLLM resets nothing before.
        for _ in range(50):
            if await self._llm.reset_prefix_cache():
                return
            await asyncio.sleep(0.02)

    def _require_life(self) -> None:
        if self._llm.errored:
            raise EngineUnavailableError("vLLM's engine core is dead")


class _SchedulerStats(AggregateStatLoggerBase):  # type: ignore[misc]
    """Keeps the load that the scheduler of each rank reports with its steps."""

    def __init__(self) -> None:
        self._latest: dict[int, Any] = {}

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:  # fmt: skip
        if scheduler_stats is not None:
            self._latest[engine_idx] = scheduler_stats

    def log_engine_initialized(self) -> None:
        """Has nothing to log."""

    @property
    def running(self) -> int:
        return sum(stats.num_running_reqs for stats in self._latest.values())

    @property
    def usage(self) -> float:
        """Of the KV caches: 1 for each that is full."""
        return float(sum(stats.kv_cache_usage for stats in self._latest.values()))


def _no_adapter(adapter: AdapterIdentity) -> str:
    return f"this vLLM server has no adapter {adapter}"


def _sampling_params(request: GenerateRequest, sees_thoughts: bool, llguidance: bool) -> Any:
    """Raises ValueError for what vLLM does not accept."""
    if request.cache_salt == "":
        raise ValueError("cache_salt: it is empty")  # vLLM itself would take it for none
    params = _sampling(sampling_fields(request, llguidance=llguidance, thoughts=sees_thoughts))
    if params.n != 1:
        raise ValueError("n: one answer for each request; ask several times")
    params.output_kind = RequestOutputKind.DELTA
    if request.handover is not None:
        params.extra_args = {
            **(params.extra_args or {}),
            "kv_transfer_params": dict(request.handover),
        }
    return params


def _info(llm: Any, args: Any, host: str) -> EngineInfo:
    cache = llm.vllm_config.cache_config
    card = ModelCard(args.served_model_name[0], llm.model_config.max_model_len)
    facts = CacheFacts(
        block_size=cache.hash_block_size or cache.block_size,
        capacity_blocks=cache.num_gpu_blocks,
        ranks=len(llm.engine_core.engine_ranks_managed),
        caches_prefixes=bool(cache.enable_prefix_caching),
    )
    sources = {
        str(rank): msgspec.convert(source, KvEventSource, from_attributes=True)
        for rank, source in llm.get_kv_event_sources().items()
    }
    events = event_source(sources, f"http://{host}", None)
    info = engine_info(vllm.__version__, ModelList([card]), facts, events)
    return evolve(info, pid=os.getpid(), adapters=llm.vllm_config.lora_config is not None)
