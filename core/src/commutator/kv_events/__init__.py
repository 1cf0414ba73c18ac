"""KV events on the wire: their encoding, and their publisher at an engine."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from commutator.kv_events.codec import (
        SEAL_BYTES,
        decode_batch,
        encode_batch,
        seal_message,
        unseal_message,
    )
    from commutator.kv_events.publisher import EventPublisher, bind_private

__all__ = [
    "SEAL_BYTES",
    "EventPublisher",
    "bind_private",
    "decode_batch",
    "encode_batch",
    "seal_message",
    "unseal_message",
]

_HOMES = ("commutator.kv_events.codec", "commutator.kv_events.publisher")


def __getattr__(name: str) -> Any:
    if name in __all__:
        for home in map(import_module, _HOMES):
            if name in home.__all__:
                return getattr(home, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
