"""KV transfer between workers: from prefill to decode workers, and from a peer's tiers.

``protocol`` describes the messages. Engines that transfer KV by themselves do not use this package.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from commutator.faces import face

if TYPE_CHECKING:
    from commutator_engine_kit.kv.transfer.event_loop import EventLoopThread
    from commutator_engine_kit.kv.transfer.exporter import BlockExporter
    from commutator_engine_kit.kv.transfer.protocol import (
        GROUPS_PROTOCOL,
        PROTOCOL,
        BlockShapes,
        DecodeTransferParams,
        ExportedMemory,
        LentBlocks,
        LookupRequest,
        PrefillTransferParams,
        PullHandover,
        ReadyBlock,
        ReleaseRequest,
        handover_keys,
        handover_places,
        parse_transfer_params,
    )
    from commutator_engine_kit.kv.transfer.puller import Puller, PullResult, PullTimes
    from commutator_engine_kit.kv.transfer.reader import BlockReader, PromptBlock, ReadTarget
    from commutator_engine_kit.kv.transfer.sources import Sources

__all__ = [
    "GROUPS_PROTOCOL",
    "PROTOCOL",
    "BlockExporter",
    "BlockReader",
    "BlockShapes",
    "DecodeTransferParams",
    "EventLoopThread",
    "ExportedMemory",
    "LentBlocks",
    "LookupRequest",
    "PrefillTransferParams",
    "PromptBlock",
    "PullHandover",
    "PullResult",
    "PullTimes",
    "Puller",
    "ReadTarget",
    "ReadyBlock",
    "ReleaseRequest",
    "Sources",
    "handover_keys",
    "handover_places",
    "parse_transfer_params",
]

__getattr__ = face(__name__, __file__)
