"""Prefill and decode apart in SGLang's own way: both legs at once, which meet in a numbered room.

The decode server tells the prefill server's bootstrap service where the pages of the room go, and
the prefill server writes them there. Both are sent the same request: its first token is drawn by
the prefill server and goes along.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, ClassVar
from urllib.parse import urlsplit

from attrs import evolve

from commutator.engine.handover import HandoverLegs, HandoverStyle
from commutator.errors import EngineHandoverError
from commutator.types import GenerateRequest, HandoverInfo
from commutator_sglang.api import ServerInfo

__all__ = ["ANSWER_WITHIN_S", "RoomHandover", "handover_info", "room_of"]

ANSWER_WITHIN_S = "answer_within_s"
"""The one word of ours: how long the decode server may take to begin. SGLang is not sent it."""
_ROOM_BITS = 63
"""Rooms are signed 64-bit integers to SGLang."""


class RoomHandover(HandoverStyle):
    """Concurrent: the legs find each other by the prefill server's address and the room."""

    sequential: ClassVar[bool] = False

    def prefill_request(self, legs: HandoverLegs) -> GenerateRequest:
        return evolve(legs.request, handover=_words(legs), data_parallel_rank=None)

    def decode_request(
        self, legs: HandoverLegs, handed: Mapping[str, Any] | None
    ) -> GenerateRequest:
        del handed
        words = {**_words(legs), ANSWER_WITHIN_S: legs.timeout_s}
        if legs.prefill.info.data_parallel_size > 1:
            words["disagg_prefill_dp_rank"] = legs.prefill_rank
        return evolve(legs.request, handover=words)


def _words(legs: HandoverLegs) -> dict[str, Any]:
    info = legs.prefill.info.handover
    if info is None or info.address is None:
        raise EngineHandoverError(f"{legs.prefill.worker_id} tells no bootstrap port")
    host, _, port = info.address.rpartition(":")
    ranks = legs.prefill.info.data_parallel_size
    return {
        "bootstrap_host": host,
        "bootstrap_port": int(port),
        "bootstrap_room": room_of(legs.handover_id, ranks, legs.prefill_rank),
    }


def room_of(handover_id: str, ranks: int, rank: int) -> int:
    """A number of 63 bits; its remainder by the number of ``ranks`` is the prefill's ``rank``."""
    digest = hashlib.sha256(handover_id.encode()).digest()
    drawn = int.from_bytes(digest[:8], "big") >> (64 - _ROOM_BITS)
    room = drawn - drawn % ranks + rank
    return room if room < 1 << _ROOM_BITS else room - ranks


def handover_info(url: str, server: ServerInfo, model: str) -> HandoverInfo | None:
    """None for a server that does both. Sizes that SGLang does not tell are 0."""
    if server.disaggregation_mode not in {"prefill", "decode"}:
        return None
    host, port = urlsplit(url).hostname, server.disaggregation_bootstrap_port
    return HandoverInfo(
        protocol=f"sglang-{server.disaggregation_transfer_backend}",
        identity=f"{model} SGLang {server.version} {server.dtype} {server.kv_cache_dtype}",
        block_size=server.page_size,
        token_bytes=0,
        tensor_parallel_size=server.tp_size,
        address=None if port is None else f"{host}:{port}",
    )
