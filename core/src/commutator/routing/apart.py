"""Whether one request is prefilled elsewhere, and what came of it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from attrs import asdict

from commutator.engine.contract import TokenStream
from commutator.routing.disagg import DisaggAnswer, DisaggQuestion
from commutator.routing.handover_stream import HandoverStream
from commutator.routing.placer import Placed
from commutator.types import GenerateRequest, RequestSummary

if TYPE_CHECKING:
    from commutator.routing.prefill_pool import PrefillPool

__all__ = ["Apart"]


class Apart:
    """A request at its decode worker that a policy was asked about."""

    def __init__(
        self,
        pool: PrefillPool,
        summary: RequestSummary,
        decode: Placed,
        hashes: Sequence[int],
        question: DisaggQuestion,
        answer: DisaggAnswer,
    ) -> None:
        self.answer = answer
        self._pool = pool
        self._summary = summary
        self._decode = decode
        self._hashes = hashes
        self._question = question
        self._stream: HandoverStream | None = None
        self._began_s = time.perf_counter()

    def begin(self, request: GenerateRequest) -> TokenStream:
        """The client's stream, whichever way was chosen."""
        if not self.answer.separate:
            return self._decode.route.worker.client.generate(request)
        self._stream = HandoverStream(
            self._pool, self._summary, request, self._decode, self._hashes
        )
        return self._stream

    def first_token(self) -> None:
        """The decode worker has sent it. Measures prefill there, if that was the way."""
        if self._stream is None:
            ahead = self._question.decode_load.active_prefill_tokens
            tokens = ahead + self._decode.ticket.prefill_tokens
            self._pool.meter.local_prefill.add(tokens, time.perf_counter() - self._began_s)

    def explain(self) -> dict[str, Any]:
        """For people: the decision with its numbers, and how the hand-over went."""
        explained: dict[str, Any] = {
            "separate": self.answer.separate,
            "reason": self.answer.reason,
            "terms": {name: round(value, 6) for name, value in self.answer.terms.items()},
        }
        if (stream := self._stream) is not None:
            explained |= {
                "prefill_worker_id": stream.prefill_worker,
                "prefill_waited_s": round(stream.waited_s, 6),
                "outcome": stream.outcome,
                "failed": [asdict(failed) for failed in stream.failed],
            }
        return explained
