"""Prefill and decode apart with vLLM's own NixlConnector: first the prefill leg, then the decode.

What the prefill server says is relayed as it is: its fields change between versions. It keeps the
blocks under a lease of its own (30 s), and servers that do not fit refuse each other by themselves.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from attrs import evolve

from commutator.engine.handover import HandoverLegs, HandoverStyle
from commutator.errors import EngineHandoverError
from commutator.types import GenerateRequest, HandoverInfo

__all__ = ["NixlHandover", "handover_info"]

_FOR_ANOTHER = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


class NixlHandover(HandoverStyle):
    """Sequential: the decode leg begins with what the prefill leg ended with."""

    sequential: ClassVar[bool] = True

    def prefill_request(self, legs: HandoverLegs) -> GenerateRequest:
        request = legs.request
        sampling = evolve(request.sampling, max_tokens=1, min_tokens=0, top_logprobs=None, stop=())
        return evolve(request, sampling=sampling, generated_prefix=0, handover=_FOR_ANOTHER)

    def decode_request(
        self, legs: HandoverLegs, handed: Mapping[str, Any] | None
    ) -> GenerateRequest:
        if handed is None:
            raise EngineHandoverError(
                f"{legs.prefill.worker_id} gave no kv_transfer_params: it needs "
                "--kv-transfer-config with the NixlConnector"
            )
        return evolve(legs.request, handover=handed)


def handover_info(model: str, version: str, block_size: int) -> HandoverInfo:
    """For servers that run with the NixlConnector. Sizes that vLLM does not tell are 0."""
    return HandoverInfo("vllm-nixl", f"{model} vLLM {version}", block_size, token_bytes=0)
