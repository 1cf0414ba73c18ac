"""Prefill and decode apart as TensorRT-LLM does it: a context server, then a generation server.

What the context server says is relayed as it is, but for the request's type and number. The opaque
state in it says where the KV is; nobody but the servers reads it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, ClassVar, Final

from attrs import evolve

from commutator.engine.handover import HandoverLegs, HandoverStyle
from commutator.errors import EngineHandoverError
from commutator.types import GenerateRequest, HandoverInfo
from commutator_trtllm.bodies import CONTEXT_ONLY

__all__ = ["WHOLE", "ContextFirst", "handover_info", "request_number"]

WHOLE: Final[Mapping[str, Any]] = {"request_type": "context_and_generation"}
"""Handed where there is nothing to hand over: the decode worker serves the whole request."""


class ContextFirst(HandoverStyle):
    """Sequential: the decode leg begins with what the prefill leg ended with."""

    sequential: ClassVar[bool] = True

    def prefill_request(self, legs: HandoverLegs) -> GenerateRequest:
        # The request as it is: a context server ends it after the first token by itself.
        number = request_number(legs.handover_id)
        words = {"request_type": CONTEXT_ONLY, "disagg_request_id": number}
        return evolve(legs.request, handover=words)

    def decode_request(
        self, legs: HandoverLegs, handed: Mapping[str, Any] | None
    ) -> GenerateRequest:
        if handed is None:
            raise EngineHandoverError(
                f"{legs.prefill.worker_id} gave no disaggregated_params: it needs "
                "`cache_transceiver_config`, see `python -m commutator_trtllm.options`"
            )
        if handed == WHOLE:
            return legs.request
        number = request_number(legs.handover_id)
        words = {**handed, "request_type": "generation_only", "disagg_request_id": number}
        return evolve(legs.request, handover=words)


def request_number(handover_id: str) -> int:
    """The 64-bit signed integer by which both servers know the request; never a small one.

    Small numbers are those that servers give to requests of their own.
    """
    digest = hashlib.blake2b(handover_id.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 2 | 1 << 62


def handover_info(model: str, version: str, block_size: int) -> HandoverInfo:
    """For servers with a cache transceiver. Sizes that TensorRT-LLM does not tell are 0."""
    identity = f"{model} TensorRT-LLM {version}"
    return HandoverInfo("trtllm-context-first", identity, block_size, token_bytes=0)
