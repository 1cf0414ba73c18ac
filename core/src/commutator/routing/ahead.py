"""Asks the likely worker of a request that waits to bring its KV blocks up from slow tiers."""

from __future__ import annotations

import asyncio
import logging

from commutator.errors import CommutatorError
from commutator.routing.overlap import Overlap
from commutator.routing.view import LiveWorker
from commutator.types import GenerateRequest

__all__ = ["Ahead", "is_worth_asking"]

log = logging.getLogger(__name__)

_TIMEOUT_S = 5.0


def is_worth_asking(overlap: Overlap) -> bool:
    """Whether blocks of the prompt lie in the worker's tiers, behind those on its device."""
    return overlap.blocks > overlap.device


class Ahead:
    """Nobody waits for the answers: a request goes on without, wherever it goes."""

    def __init__(self) -> None:
        self._asking: set[asyncio.Task[None]] = set()

    def ask(self, worker: LiveWorker, overlap: Overlap, request: GenerateRequest) -> None:
        """Begin to ask, if it is worth it."""
        if is_worth_asking(overlap):
            task = asyncio.get_running_loop().create_task(self._ask(worker, request))
            self._asking.add(task)
            task.add_done_callback(self._asking.discard)

    async def _ask(self, worker: LiveWorker, request: GenerateRequest) -> None:
        prompt = {
            "token_ids": request.token_ids,
            "cache_salt": request.cache_salt,
            "lora_name": request.lora_name,
        }
        try:
            await worker.client.kv_admin("prefetch", prompt, timeout_s=_TIMEOUT_S)
        except CommutatorError as error:
            log.debug("worker %s looks not ahead: %s", worker.record.worker_id, error)
