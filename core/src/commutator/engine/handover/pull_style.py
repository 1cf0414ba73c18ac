"""Our own style: the decode worker reads the blocks out of the prefill worker's memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from attrs import asdict, evolve

from commutator.engine.handover.geometry import convertible
from commutator.engine.handover.pull_words import DecodeWords, PrefillWords
from commutator.engine.handover.style import HandoverLegs, HandoverStyle, mismatch
from commutator.errors import EngineHandoverError
from commutator.types import GenerateRequest, HandoverInfo

__all__ = ["LEASE_S", "PROTOCOL", "PullHandover"]

PROTOCOL = "pull-1"
LEASE_S = 30.0
"""Long beside any question's way, short beside what a lost decode worker's blocks cost."""


class PullHandover(HandoverStyle):
    """Both legs begin at once, and the decode leg asks until the blocks are there."""

    sequential: ClassVar[bool] = False

    def __init__(self, lease_s: float = LEASE_S) -> None:
        """``lease_s`` is how long the prefill worker keeps blocks that nobody asks for."""
        self._lease_s = lease_s

    def prefill_request(self, legs: HandoverLegs) -> GenerateRequest:
        request = legs.request
        # If it generates anything at all, that is thrown away: how it is chosen does not matter.
        sampling = evolve(
            request.sampling,
            max_tokens=request.generated_prefix + 1,
            min_tokens=0,
            stop=(),
            stop_token_ids=(),
            top_logprobs=None,
        )
        rank = None if request.data_parallel_rank is None else legs.prefill_rank
        words = PrefillWords(legs.handover_id, self._lease_s)
        return evolve(request, sampling=sampling, data_parallel_rank=rank, handover=asdict(words))

    def decode_request(
        self, legs: HandoverLegs, handed: Mapping[str, Any] | None
    ) -> GenerateRequest:
        del handed
        info = legs.prefill.info.handover
        if info is None:
            raise EngineHandoverError(f"worker {legs.prefill.worker_id} hands no KV over")
        address = info.address or legs.prefill.address
        words = DecodeWords(legs.handover_id, address, info.block_size, legs.timeout_s)
        return evolve(legs.request, handover=asdict(words))

    def mismatch(self, prefill: HandoverInfo, decode: HandoverInfo) -> str | None:
        """Block sizes may differ when one divides the other; all else must be the same."""
        names = ("protocol", "identity", "token_bytes", "tensor_parallel_size")
        if (reason := mismatch(prefill, decode, *names)) is not None:
            return reason
        if not convertible(prefill.block_size, decode.block_size):
            return (
                f"block_size is {prefill.block_size} at the prefill worker and "
                f"{decode.block_size} at the decode worker: neither divides the other"
            )
        return None
