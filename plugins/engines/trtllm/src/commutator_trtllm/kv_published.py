"""The base classes of TensorRT-LLM's KV connectors: its own, or, where it is not, their likeness.

The likeness has the signatures that TensorRT-LLM publishes, and what its classes do by default, so
that the connector can be imported and driven by tests on a machine without TensorRT-LLM.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any

__all__ = ["SchedulerBase", "SchedulerLikeness", "WorkerBase", "WorkerLikeness"]

_PACKAGE = "tensorrt_llm"
_MODULES = (
    f"{_PACKAGE}._torch.pyexecutor.connectors.kv_cache_connector",
    f"{_PACKAGE}._torch.pyexecutor.kv_cache_connector",  # older versions
)


class SchedulerLikeness:
    """What ``KvCacheConnectorScheduler`` brings."""

    supports_attention_dp: bool = False

    def __init__(self, llm_args: Any) -> None:
        self._llm_args = llm_args

    def wait_for_initialization(self) -> None:
        """Called when all workers know their memory."""

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


class WorkerLikeness:
    """What ``KvCacheConnectorWorker`` brings."""

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


def _published(name: str) -> type | None:
    for module in _MODULES:
        try:
            found: type = getattr(import_module(module), name)
        except ModuleNotFoundError as error:
            if error.name is None or not error.name.startswith(_PACKAGE):
                raise
        else:
            return found
    return None


if TYPE_CHECKING:
    SchedulerBase = SchedulerLikeness
    WorkerBase = WorkerLikeness
else:
    SchedulerBase = _published("KvCacheConnectorScheduler") or SchedulerLikeness
    WorkerBase = _published("KvCacheConnectorWorker") or WorkerLikeness
