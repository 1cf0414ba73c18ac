"""The KV connector for tests of their own power: alters a loaded block, as a request asks.

`kv_transfer_params` of a request may have `alter: [group, number]`: that block of the load, counted
from its last one, gets the bytes of another prompt's block after it was verified. Loads are never
refused as slower than computing, so that hits can be counted.
"""

from __future__ import annotations

from typing import Any

from attrs import frozen
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorTransferResults,
)

from commutator_engine_kit.kv import bytes_at
from commutator_vllm.kv_connector import CommutatorConnector, _Metadata

__all__ = ["AlteringConnector"]


@frozen
class _Altered(_Metadata):
    wanted: dict[str, tuple[int, int]]
    """The group and the number of each request's altered block."""


class _NoClock:
    """Never measures the speed of prefill."""

    tokens_per_s = None

    def step(self, *_: Any) -> None: ...


class AlteringConnector(CommutatorConnector):
    """The connector, and the alterations."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        if self._scheduler is not None:
            self._scheduler._clock = _NoClock()  # type: ignore[assignment]
        self._loads: dict[str, tuple[tuple[int, ...], ...]] = {}
        self._wanted: dict[str, tuple[int, int]] = {}
        self._others: dict[int, list[bytes]] = {}

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        made = super().build_connector_meta(scheduler_output)
        assert isinstance(made, _Metadata)
        requests = self._scheduling._requests
        wanted = {}
        for load in made.orders.loads:
            params = requests[load.request_id].vllm.kv_transfer_params or {}
            if alter := params.get("alter"):
                wanted[load.request_id] = (int(alter[0]), int(alter[1]))
        return _Altered(made.orders, wanted)

    def start_load_kv(self, forward_context: Any, **more: Any) -> None:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, _Altered)
        self._wanted |= metadata.wanted
        self._loads |= {load.request_id: load.device_blocks for load in metadata.orders.loads}
        super().start_load_kv(forward_context, **more)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        results = super().get_transfer_results(finished_req_ids)
        for request_id in results.finished_recving - results.failed_recving:
            blocks = self._loads.pop(request_id)
            wanted = self._wanted.pop(request_id, None)
            kept = {
                group: [self._read(block) for block in those[-4:]]
                for group, those in enumerate(blocks)
                if those
            }
            if wanted is not None:
                group, number = wanted
                chosen = blocks[group][-1 - number % len(blocks[group])]
                others = [one for one in self._others[group] if one != self._read(chosen)]
                self._write(chosen, others[number % len(others)])
            self._others |= kept
        return results

    def _pieces(self, block: int) -> Any:
        arena = self._working._connector._stack.arena
        return [bytes_at(piece) for piece in arena.pieces(arena.span(block))]

    def _read(self, block: int) -> bytes:
        return b"".join(self._pieces(block))

    def _write(self, block: int, content: bytes) -> None:
        start = 0
        for piece in self._pieces(block):
            piece[:] = content[start : start + len(piece)]
            start += len(piece)
