"""What the two workers of a request are told: each engine has its own way, and routing follows it.

Two ways exist. *Sequential*: the prefill leg ends with an object that the decode leg is begun with
(vLLM, TensorRT-LLM). *Concurrent*: both legs begin at once and find each other (SGLang, our own).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from attrs import frozen

from commutator.types import GenerateRequest, HandoverInfo, WorkerRecord

__all__ = ["HandoverLegs", "HandoverStyle", "mismatch"]


@frozen
class HandoverLegs:
    """One request, and the two workers that serve it."""

    handover_id: str
    """Unique for each try: a repeated one has another."""
    request: GenerateRequest
    """As a single worker would get it."""
    prefill: WorkerRecord
    decode: WorkerRecord
    prefill_rank: int = 0
    decode_rank: int = 0
    timeout_s: float = 60.0
    """How long the decode leg may wait for the KV."""


class HandoverStyle(ABC):
    """Makes both legs of a request. Pure: it does no I/O and keeps nothing between requests."""

    sequential: ClassVar[bool]
    """Whether the decode leg begins only once the prefill leg has ended."""

    @abstractmethod
    def prefill_request(self, legs: HandoverLegs) -> GenerateRequest:
        """What the prefill worker is sent. What it generates is not the client's."""

    @abstractmethod
    def decode_request(
        self, legs: HandoverLegs, handed: Mapping[str, Any] | None
    ) -> GenerateRequest:
        """What the decode worker is sent; its stream is the client's.

        ``handed`` is the ``handover`` of the prefill leg's last delta; None in a concurrent style,
        and where a sequential prefill worker said nothing, which raises EngineHandoverError.
        """

    def mismatch(self, prefill: HandoverInfo, decode: HandoverInfo) -> str | None:
        """Why one's KV cannot be the other's; None if it can. Other sizes can be converted by some.

        Default: everything but the address must be the same.
        """
        return mismatch(prefill, decode, "protocol", "identity", "block_size", "token_bytes",
                        "tensor_parallel_size")  # fmt: skip


def mismatch(prefill: HandoverInfo, decode: HandoverInfo, *names: str) -> str | None:
    """The first of the named fields in which they differ, as words; None if they do not."""
    for name in names:
        here, there = getattr(prefill, name), getattr(decode, name)
        if here != there:
            return f"{name} is {here} at the prefill worker and {there} at the decode worker"
    return None
