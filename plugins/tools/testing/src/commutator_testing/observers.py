"""The conformance suite for observers: subclass it, define a fixture, run pytest."""

from __future__ import annotations

import asyncio

from commutator import (
    AnsweredRequest,
    Decision,
    DisaggAnswer,
    FinishReason,
    HandoverOutcome,
    Observer,
    RequestOutcome,
    RequestSummary,
)
from commutator.errors import EngineUnavailableError
from commutator_testing.shared import make_record


class ObserverContract:
    """What every observer must do. A fixture ``observer`` returns one that is not started."""

    documented_in = "Observer in docs/reference/contract/observer.md and docs/reference/hooks.md"

    def test_it_watches_a_deployment_from_start_to_stop(self, observer: Observer) -> None:
        """No hook raises, whatever happens; nothing is awaited between start and stop."""
        self.observe_everything(observer)

    def test_it_stops_when_nothing_happened(self, observer: Observer) -> None:
        async def life() -> None:
            await observer.start()
            await observer.stop()

        asyncio.run(life())

    def observe_everything(self, observer: Observer) -> None:
        """Start it, call each hook for a request "served" and one "lost", and stop it."""

        async def life() -> None:
            await observer.start()
            self._watch(observer)
            await observer.stop()

        asyncio.run(life())

    def _watch(self, observer: Observer) -> None:
        worker = make_record("w-0")
        decision = Decision(worker_id="w-0", policy="test", reason="the only one")
        observer.worker_up(worker)
        served, lost = (
            RequestSummary(request_id=name, model="m", prompt_tokens=12, max_tokens=8)
            for name in ("served", "lost")
        )
        observer.request_received(served)
        observer.request_queued(served, "router", 0.1)
        observer.request_routed(served, decision)
        observer.disagg_decided(served, DisaggAnswer(separate=True, reason="long prompt"))
        observer.kv_handed_over(
            served,
            HandoverOutcome(
                prefill_worker="p-0", decode_worker="w-0", prefill="done", decode="done",
                handover_s=0.01, size_bytes=1024, cancel_s=None,
            ),
        )  # fmt: skip
        observer.request_first_token(served, "w-0", 0.2)
        observer.request_migrated(served, "w-1", "w-0", "connection_lost", 4)
        observer.request_finished(
            served,
            RequestOutcome(
                worker_id="w-0", finish_reason=FinishReason.LENGTH, generated_tokens=8,
                cached_tokens=0, duration_s=0.5,
            ),
        )  # fmt: skip
        observer.request_received(lost)
        observer.request_routed(lost, decision)
        observer.worker_down(worker, "lease expired")
        observer.request_failed(lost, EngineUnavailableError("w-0 stopped"), "w-0")
        observer.request_answered(
            AnsweredRequest(
                request_id="refused", principal="ada", peer="127.0.0.1", method="POST",
                path="/v1/completions", model="m", status=429, reason="requests_per_minute",
                workers=(), prompt_tokens=0, cached_tokens=0, generated_tokens=0, duration_s=0.001,
            )
        )  # fmt: skip
