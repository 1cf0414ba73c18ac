"""Tells a worker where others of its model lend KV blocks: the engine knows no registry."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from commutator.engine.contract import EngineClient
from commutator.errors import EngineError
from commutator.runtime.lease import Up
from commutator.runtime.registry import Registry
from commutator.types import WorkerRecord

__all__ = ["KvPeers", "peer_addresses"]

log = logging.getLogger(__name__)


def peer_addresses(records: Iterable[WorkerRecord], mine: WorkerRecord) -> list[str]:
    """Where the other workers of the same model lend blocks, in a fixed order."""
    return sorted(
        record.info.kv_exchange.address
        for record in records
        if record.worker_id != mine.worker_id
        and record.model == mine.model
        and record.info.kv_exchange is not None
        and record.info.kv_exchange.address is not None
    )


class KvPeers:
    """The workers that live, and what a worker was told of them last."""

    def __init__(self) -> None:
        self.live: dict[str, WorkerRecord] = {}
        self._told: list[str] = []

    async def follow(self, registry: Registry) -> None:
        """Until cancelled."""
        async for changes in registry.watch():
            for change in changes:
                if isinstance(change, Up):
                    self.live[change.record.worker_id] = change.record
                else:
                    self.live.pop(change.worker_id, None)

    def started(self) -> None:
        """The worker is a new process, which was told nothing."""
        self._told = []

    async def tell(self, client: EngineClient, mine: WorkerRecord) -> None:
        """Tell the worker if anything changed. What fails is tried again with the next call."""
        if mine.info.kv_exchange is None:
            return
        addresses = peer_addresses(self.live.values(), mine)
        if addresses == self._told:
            return
        try:
            await client.kv_admin("peers", {"addresses": addresses})
        except EngineError as error:
            log.warning("%s was not told of its peers: %s", mine.worker_id, error)
        else:
            self._told = addresses
