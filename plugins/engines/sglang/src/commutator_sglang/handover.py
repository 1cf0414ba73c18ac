"""SGLang's own disaggregation: both servers get the request at once, with the same room number.

The decode server sends the addresses of its pages for the room to the prefill server's bootstrap
service, and the prefill server writes the KV there. The prefill server samples the first token and
sends it along.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, ClassVar

from attrs import evolve

from commutator import GenerateRequest, HandoverRequest, HandoverStyle
from commutator.errors import EngineHandoverError

ANSWER_WITHIN_S = "answer_within_s"
"""Our own parameter: seconds that the decode server may take to start. Not sent to SGLang."""
_ROOM_BITS = 63
"""SGLang stores room numbers as signed 64-bit integers."""


class RoomHandover(HandoverStyle):
    """Concurrent: the servers find each other by the prefill server's address and the room."""

    sequential: ClassVar[bool] = False

    def prefill_request(self, handover: HandoverRequest) -> GenerateRequest:
        return evolve(handover.request, handover=_parameters(handover), data_parallel_rank=None)

    def decode_request(
        self, handover: HandoverRequest, handed: Mapping[str, Any] | None
    ) -> GenerateRequest:
        del handed
        parameters = {**_parameters(handover), ANSWER_WITHIN_S: handover.timeout_s}
        if handover.prefill.info.data_parallel_size > 1:
            parameters["disagg_prefill_dp_rank"] = handover.prefill_rank
        return evolve(handover.request, handover=parameters)


def _parameters(handover: HandoverRequest) -> dict[str, Any]:
    info = handover.prefill.info.handover
    if info is None or info.address is None:
        raise EngineHandoverError(
            f"worker {handover.prefill.worker_id} reports no disaggregation_bootstrap_port"
        )
    host, _, port = info.address.rpartition(":")
    ranks = handover.prefill.info.data_parallel_size
    return {
        "bootstrap_host": host,
        "bootstrap_port": int(port),
        "bootstrap_room": room_of(handover.handover_id, ranks, handover.prefill_rank),
    }


def room_of(handover_id: str, ranks: int, rank: int) -> int:
    """A 63-bit number whose remainder modulo ``ranks`` is the prefill ``rank``."""
    digest = hashlib.sha256(handover_id.encode()).digest()
    drawn = int.from_bytes(digest[:8], "big") >> (64 - _ROOM_BITS)
    room = drawn - drawn % ranks + rank
    return room if room < 1 << _ROOM_BITS else room - ranks
