"""KV events on the wire. Engines publish them; front doors subscribe to them."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from commutator.contract.block import BlockRemoved, BlocksCleared, BlockStored, KvEvent
    from commutator.kv_events.codec import decode_batch, encode_batch
    from commutator.kv_events.publisher import EventPublisher, bind_private

__all__ = [
    "BlockRemoved",
    "BlockStored",
    "BlocksCleared",
    "EventPublisher",
    "KvEvent",
    "bind_private",
    "decode_batch",
    "encode_batch",
]

_HOMES = (
    "commutator.contract.block",
    "commutator.kv_events.codec",
    "commutator.kv_events.publisher",
)


def __getattr__(name: str) -> Any:
    if name in __all__:
        for home in map(import_module, _HOMES):
            if name in home.__all__:
                return getattr(home, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
