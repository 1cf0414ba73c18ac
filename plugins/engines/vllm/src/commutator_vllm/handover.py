"""Disaggregation with vLLM's NixlConnector: prefill first, then decode.

The parameters in the prefill server's answer are relayed unchanged, because their fields differ
between versions. The prefill server holds the blocks under its own lease (30 s). Servers with
incompatible KV caches refuse the transfer themselves.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from attrs import evolve

from commutator import GenerateRequest, HandoverRequest, HandoverStyle, KvTransferInfo
from commutator.errors import EngineHandoverError

_FOR_ANOTHER = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


class NixlHandover(HandoverStyle):
    """Sequential: the decode request carries the parameters from the prefill server's answer."""

    sequential: ClassVar[bool] = True

    def prefill_request(self, handover: HandoverRequest) -> GenerateRequest:
        request = handover.request
        sampling = evolve(request.sampling, max_tokens=1, min_tokens=0, top_logprobs=None, stop=())
        return evolve(request, sampling=sampling, generated_prefix=0, handover=_FOR_ANOTHER)

    def decode_request(
        self, handover: HandoverRequest, handed: Mapping[str, Any] | None
    ) -> GenerateRequest:
        if handed is None:
            raise EngineHandoverError(
                f"worker {handover.prefill.worker_id} answered without kv_transfer_params: run it "
                "with a --kv-transfer-config that has the NixlConnector"
            )
        return evolve(handover.request, handover=handed)


def handover_info(model: str, version: str, block_size: int) -> KvTransferInfo:
    """How a server with the NixlConnector hands KV over. Sizes that vLLM does not report are 0."""
    return KvTransferInfo(
        protocol="vllm-nixl",
        identity=f"{model} vLLM {version}",
        block_size=block_size,
        token_bytes=0,
    )
