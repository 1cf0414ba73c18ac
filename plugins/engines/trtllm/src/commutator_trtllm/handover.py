"""TensorRT-LLM's own disaggregation: first a context server, then a generation server.

The parameters in the context server's answer are relayed unchanged, except for the request's type
and number. They include an opaque state with the location of the KV, which only servers read.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, ClassVar, Final

from attrs import evolve

from commutator import GenerateRequest, HandoverRequest, HandoverStyle, KvTransferInfo
from commutator.errors import EngineHandoverError

CONTEXT_ONLY: Final = "context_only"
"""The type of a prefill request."""
WHOLE: Final[Mapping[str, Any]] = {"request_type": "context_and_generation"}
"""The parameters when there is no KV to hand over: the decode worker serves the whole request."""


class ContextFirst(HandoverStyle):
    """Sequential: the decode request carries the parameters from the context server's answer."""

    sequential: ClassVar[bool] = True

    def prefill_request(self, handover: HandoverRequest) -> GenerateRequest:
        # Otherwise unchanged: a context server ends a request after its first token.
        number = request_number(handover.handover_id)
        parameters = {"request_type": CONTEXT_ONLY, "disagg_request_id": number}
        return evolve(handover.request, handover=parameters)

    def decode_request(
        self, handover: HandoverRequest, handed: Mapping[str, Any] | None
    ) -> GenerateRequest:
        if handed is None:
            raise EngineHandoverError(
                f"worker {handover.prefill.worker_id} answered without disaggregated_params: set "
                "its `cache_transceiver_config`, see `python -m commutator_trtllm.options`"
            )
        if handed == WHOLE:
            return handover.request
        number = request_number(handover.handover_id)
        parameters = {**handed, "request_type": "generation_only", "disagg_request_id": number}
        return evolve(handover.request, handover=parameters)


def request_number(handover_id: str) -> int:
    """The 64-bit signed integer that identifies the request to both servers.

    It is always large, because servers number their own requests from 0.
    """
    digest = hashlib.blake2b(handover_id.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 2 | 1 << 62


def handover_info(model: str, version: str, block_size: int) -> KvTransferInfo:
    """How a server with a cache transceiver hands KV over. Sizes that are not reported are 0."""
    identity = f"{model} TensorRT-LLM {version}"
    return KvTransferInfo(
        protocol="trtllm-context-first", identity=identity, block_size=block_size, token_bytes=0
    )
