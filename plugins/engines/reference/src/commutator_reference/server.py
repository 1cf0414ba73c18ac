"""Runs the engine under the token API's server: its thread, KV events and memory sizes."""

from __future__ import annotations

import logging
import os
import threading
import uuid
from functools import partial
from importlib.metadata import version
from pathlib import Path

import torch
from attrs import evolve

from commutator import EngineInfo, GenerateRequest
from commutator.contract.worker import TierContents, TransferStatistics
from commutator.errors import ConfigError
from commutator.tokenizer import load_text_model, locate_model
from commutator_engine_kit import Emit, EngineStart, EventPublisher, TokenEngine
from commutator_engine_kit.kv import KvAdmin, KvConnector
from commutator_engine_kit.pytorch import prepare_pytorch
from commutator_reference.config import ReferenceConfig
from commutator_reference.constraints import KINDS, Grammars
from commutator_reference.decoder import DecoderModel
from commutator_reference.engine import ReferenceEngine
from commutator_reference.families import FAMILIES, load_decoder, model_type
from commutator_reference.handover import Handover
from commutator_reference.lora import Adapters, load_adapter
from commutator_reference.model import LlamaModel, load_model
from commutator_reference.preflight import missing_for_handover
from commutator_reference.sampler import OPTIONS
from commutator_reference.weights import cache_identity

log = logging.getLogger(__name__)

_WHERE = "reference engine"


class ReferenceServer(ReferenceEngine, TokenEngine):
    """Loads the model, then runs the engine on one thread until ``stop``."""

    def __init__(self, config: ReferenceConfig, start: EngineStart) -> None:
        """Raises ConfigError when the model or the KV arena cannot be as configured."""
        model = start.model
        device, dtype = prepare_pytorch(
            config.device,
            config.dtype,
            threads=config.threads,
            replicas=config.replicas,
            where=_WHERE,
        )
        missing = missing_for_handover(prefix_caching=config.prefix_caching)
        if missing is not None and config.role != "both":
            raise ConfigError([f"role: {config.role} needs a hand-over: {missing}"], _WHERE)
        path = locate_model(model.source)
        loaded = _load(path, device, dtype)
        num_blocks = config.kv_cache_bytes // loaded.block_bytes(config.block_size)
        if num_blocks < 1:
            raise ConfigError(
                [f"kv_cache_bytes: {config.kv_cache_bytes} bytes hold not even one KV block"],
                _WHERE,
            )
        self._publisher = (
            EventPublisher(keep_messages=config.kv_events_kept) if config.kv_events else None
        )
        text = load_text_model(model.source)
        ends = loaded.config.eos_token_ids
        self._loras = _adapters(loaded, config)
        self._constraints = Grammars(text.tokenizer.to_str, loaded.config.vocab_size, ends)
        super().__init__(
            loaded,
            config,
            num_blocks,
            max_model_len=model.max_model_len,
            decode=text.decode,
            encode=partial(text.encode, add_special_tokens=False),
            grammars=self._constraints,
            adapters=self._loras,
            on_kv_events=None if self._publisher is None else self._publisher.publish,
        )
        self._connector: KvConnector | None = None
        self._admin: KvAdmin | None = None
        if start.tiers or missing is None:
            layout, size = self.arena.layout, self.block_size
            identity = cache_identity(model.name, path, layout, block_size=size, dtype=dtype)
        if missing is None:
            handover = Handover(
                identity,
                self.arena,
                self.pool,
                agent_name=f"handover/{start.worker_id}/{uuid.uuid4().hex}",
                wake=self.wake,
                host=start.host,
                parameters=config.ucx_parameters,
            )
            self.use_handover(handover)
        if start.tiers:
            self._connector = KvConnector(
                start.tiers,
                self.arena.block_arena,
                identity,
                worker_id=start.worker_id,
                groups=self.arena.groups,
                reports_evictions=True,
                wake=self.wake,
            )
            self._connector.start()
            self.use_tiers(self._connector)
            self._admin = KvAdmin(self._connector, self.locate, self._device_contents)
        self._info = EngineInfo(
            kind="reference",
            version=version("commutator-reference"),
            model=model.name,
            max_model_len=self.max_model_len,
            block_size=self.block_size,
            kv_capacity_blocks=num_blocks,
            caches_prefixes=config.prefix_caching,
            kv_events=None if self._publisher is None else self._publisher.source,
            pid=os.getpid(),
            continues_answers=True,
            continues_constraints=True,
            constraints=KINDS,
            adapters=self._loras is not None,
            prompt_logprobs=True,
            request_options=OPTIONS,
            kv_exchange=None if self._connector is None else self._connector.exchange,
        )
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, emit: Emit) -> EngineInfo:
        if self._handover is not None:
            self._handover.start()
            self._info = evolve(self._info, handover=self._handover.info)
        self._thread = threading.Thread(target=self._run, args=(emit,), name="engine", daemon=True)
        self._thread.start()
        return self._info

    def _run(self, emit: Emit) -> None:
        """Run the engine until ``stop``. An error ends the process; its supervisor restarts it."""
        try:
            self.run(emit, self._stopping)
        except Exception:
            log.critical(
                "engine: block accounting failed; the process ends, and its supervisor restarts it",
                exc_info=True,
            )
            os._exit(os.EX_SOFTWARE)

    def _device_contents(self) -> TierContents:
        load, on_cpu = self.load(), self.arena.tensor.device.type == "cpu"
        blocks = load.kv_used_blocks + load.kv_cached_blocks
        return TierContents(
            tier="device",
            medium="CPU" if on_cpu else "GPU",
            up=True,
            blocks=blocks,
            pinned=load.kv_used_blocks,
            bytes=blocks * self.arena.block_arena.block_bytes,
            capacity_blocks=load.kv_capacity_blocks,
        )

    @property
    def kv_admin(self) -> KvAdmin | None:
        return self._admin

    def transfer_statistics(self) -> TransferStatistics:
        return TransferStatistics() if self._handover is None else self._handover.statistics()

    def takes_long(self, request: GenerateRequest) -> bool:
        if request.constraint is not None:
            return True
        adapter, loras = request.adapter, self._loras
        return adapter is not None and loras is not None and not loras.has(adapter.digest)

    def stop(self) -> None:
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()
        self._constraints.close()
        if self._handover is not None:
            self._handover.stop()
        if self._connector is not None:
            self._connector.close()
        if self._publisher is not None:
            self._publisher.close()


def _adapters(model: LlamaModel | DecoderModel, config: ReferenceConfig) -> Adapters | None:
    """None for the families of ``decoder``, which are computed without adapters."""
    if not isinstance(model, LlamaModel):
        return None
    load = partial(
        load_adapter,
        model=model.config,
        max_rank=config.max_adapter_rank,
        device=model.device,
        dtype=model.dtype,
    )
    return Adapters(load, config.adapter_places)


def _load(path: Path, device: torch.device, dtype: torch.dtype) -> LlamaModel | DecoderModel:
    if path.is_dir() and model_type(path) in FAMILIES:
        return load_decoder(path, device=device, dtype=dtype)
    return load_model(path, device=device, dtype=dtype)
