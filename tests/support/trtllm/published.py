"""The base classes of KV connectors, with TensorRT-LLM's published signatures and behaviour.

``connector`` is our module ``kv_connector``, imported as if TensorRT-LLM were installed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Any

__all__ = ["KvCacheConnectorScheduler", "KvCacheConnectorWorker", "connector"]

_MODULE = "tensorrt_llm._torch.pyexecutor.connectors.kv_cache_connector"


class KvCacheConnectorScheduler:
    """The scheduler's base class."""

    supports_attention_dp: bool = False

    def __init__(self, llm_args: Any) -> None:
        self._llm_args = llm_args

    def wait_for_initialization(self) -> None:
        """Called when all workers have registered their memory."""

    def update_state_after_alloc(self, request: Any, block_ids: list[int]) -> None:
        raise NotImplementedError

    def update_state_after_alloc_by_layer_group(
        self, request: Any, block_ids_by_layer_group: list[list[int]]
    ) -> None:
        (block_ids,) = block_ids_by_layer_group
        self.update_state_after_alloc(request, block_ids)

    def request_finished(self, request: Any, cache_block_ids: list[int]) -> bool:
        raise NotImplementedError

    def request_finished_by_layer_group(
        self, request: Any, cache_block_ids_by_layer_group: list[list[int]]
    ) -> bool:
        (cache_block_ids,) = cache_block_ids_by_layer_group
        return self.request_finished(request, cache_block_ids)

    def cancel_load(self, request: Any, start: int, end: int) -> None:
        """Tokens of a claim will not be used."""

    def request_reset(self, request: Any) -> None:
        """A request lost its blocks and will run again."""


class KvCacheConnectorWorker:
    """The worker's base class."""

    supports_attention_dp: bool = False

    def __init__(self, llm_args: Any) -> None:
        self._llm_args = llm_args
        self._metadata: object = None

    def bind_connector_meta(self, metadata: object) -> None:
        self._metadata = metadata

    def get_connector_meta(self) -> object:
        return self._metadata

    def _clear_connector_meta(self) -> None:
        self._metadata = None

    def register_forward_pass_callable(self) -> Callable[[], None] | None:
        return None


def _import_connector() -> ModuleType:
    parts = _MODULE.split(".")
    modules = {name: ModuleType(name) for name in (".".join(parts[: n + 1]) for n in range(5))}
    vars(modules[_MODULE]).update(
        KvCacheConnectorScheduler=KvCacheConnectorScheduler,
        KvCacheConnectorWorker=KvCacheConnectorWorker,
    )
    sys.modules.update(modules)
    try:
        return import_module("commutator_trtllm.kv_connector")
    finally:
        for name in modules:
            del sys.modules[name]


connector = _import_connector()
