"""TensorRT-LLM's queues of events and statistics, each of which is returned only once."""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Sequence
from typing import Any

from commutator.contract.block import BlockRemoved, BlocksCleared, BlockStored, KvEvent
from commutator.contract.worker import EngineLoad, EventSource

__all__ = ["EventQueue", "StatisticsQueue", "removed", "stored"]

WINDOW = 2048


class EventQueue:
    """KV events in TensorRT-LLM's form. Takes the place of the reference engine's publisher."""

    source: EventSource | None = None

    def __init__(
        self, *, max_size: int = 65536, blocks_per_level: Sequence[int] = (100, 0)
    ) -> None:
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._waiting: deque[dict[str, Any]] = deque(maxlen=max_size)
        self._held: dict[int | bytes, None] = {}
        self._add({"type": "created", "num_blocks_per_cache_level": list(blocks_per_level)})

    def publish(self, events: Sequence[KvEvent]) -> None:
        """From the engine's thread."""
        with self._lock:
            for event in events:
                match event:
                    case BlockStored():
                        self._held |= dict.fromkeys(event.block_hashes)
                        self._add(stored(event))
                    case BlockRemoved():
                        for name in event.block_hashes:
                            self._held.pop(name, None)
                        self._add(removed(event.block_hashes))
                    case BlocksCleared():
                        self._add(removed(list(self._held)))
                        self._held.clear()

    def take(self) -> list[dict[str, Any]]:
        """All entries since the last call."""
        with self._lock:
            taken = list(self._waiting)
            self._waiting.clear()
        return taken

    def close(self) -> None:
        """Does nothing: a queue has no socket."""

    def _add(self, data: dict[str, Any]) -> None:
        number = next(self._numbers)
        self._waiting.append({"event_id": number, "data": data, "window_size": WINDOW})


def stored(event: BlockStored) -> dict[str, Any]:
    """The data of an event that says that blocks can be reused."""
    size = event.block_size
    pieces = [event.token_ids[i : i + size] for i in range(0, len(event.token_ids), size)]
    return {
        "type": "stored",
        "parent_hash": event.parent_block_hash,
        "blocks": [
            {
                "type": "stored_block",
                "block_hash": name,
                "tokens": [
                    {"type": "unique_token", "token_id": token, "token_extra_id": 0}
                    for token in tokens
                ],
                "cache_level": 0,
                "priority": 35,
            }
            for name, tokens in zip(event.block_hashes, pieces, strict=True)
        ],
    }


def removed(hashes: Sequence[int | bytes]) -> dict[str, Any]:
    """The data of an event that says that blocks are gone."""
    return {"type": "removed", "block_hashes": list(hashes)}


class StatisticsQueue:
    """One entry for each step of the engine, and for each change of its state."""

    def __init__(self, tokens_per_block: int) -> None:
        self._tokens_per_block = tokens_per_block
        self._waiting: deque[dict[str, Any]] = deque(maxlen=1000)
        self._last: EngineLoad | None = None

    def add(self, load: EngineLoad) -> None:
        """The engine has made a step."""
        self._last = load
        used, most = load.kv_used_blocks, load.kv_capacity_blocks
        self._waiting.append(
            {
                "numActiveRequests": load.running,
                "numQueuedRequests": load.waiting,
                "iterLatencyMS": 1.5,
                "kvCacheStats": {
                    "maxNumBlocks": most,
                    "usedNumBlocks": used,
                    "freeNumBlocks": most - used,
                    "tokensPerBlock": self._tokens_per_block,
                },
                "inflightBatchingStats": {"numPausedRequests": 0, "numCtxTokens": 0},
            }
        )

    def look(self, load: EngineLoad) -> None:
        """Add it if it has changed, and the engine has made a step."""
        if self._last is not None and load != self._last:
            self.add(load)

    def take(self) -> list[dict[str, Any]]:
        """All entries since the last call."""
        taken = list(self._waiting)
        self._waiting.clear()
        return taken
