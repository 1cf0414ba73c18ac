"""KV events on the wire, and the buses that carry them from engines to front doors."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from commutator.contract.block import BlockRemoved, BlocksCleared, BlockStored, KvEvent
    from commutator.contract.event_bus import (
        EventBus,
        EventBusConfig,
        EventChannel,
        EventOutlet,
        EventStream,
        KeptMessages,
        Message,
    )
    from commutator.contract.registration import EventBusRegister
    from commutator.kv_events.codec import decode_batch, encode_batch
    from commutator.kv_events.publisher import EventPublisher, bind_private
    from commutator.kv_events.sealed import SEAL_BYTES, seal_message, unseal_message

__all__ = [
    "SEAL_BYTES",
    "BlockRemoved",
    "BlockStored",
    "BlocksCleared",
    "EventBus",
    "EventBusConfig",
    "EventBusRegister",
    "EventChannel",
    "EventOutlet",
    "EventPublisher",
    "EventStream",
    "KeptMessages",
    "KvEvent",
    "Message",
    "bind_private",
    "decode_batch",
    "encode_batch",
    "seal_message",
    "unseal_message",
]

_HOMES = (
    "commutator.contract.block",
    "commutator.contract.event_bus",
    "commutator.contract.registration",
    "commutator.kv_events.codec",
    "commutator.kv_events.publisher",
    "commutator.kv_events.sealed",
)


def __getattr__(name: str) -> Any:
    if name in __all__:
        for home in map(import_module, _HOMES):
            if name in home.__all__:
                return getattr(home, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
