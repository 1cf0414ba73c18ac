"""A policy plugin that fails must not fail requests."""

from __future__ import annotations

import logging
import math

from commutator.contract.fairness import FairnessPolicy

__all__ = ["Guarded"]

log = logging.getLogger(__name__)

_LOG_EVERY = 1000


class Guarded(FairnessPolicy):
    """Passes every call on. A call that raises, or a rank that is no number, counts as rank 0.

    The first of every 1,000 failures is logged.
    """

    def __init__(self, policy: FairnessPolicy) -> None:
        self._policy = policy
        self._failures = 0

    def flow(self, principal: str | None) -> str | None:
        try:
            return self._policy.flow(principal)
        except Exception as error:  # noqa: BLE001 - third-party code may raise anything
            self._failed("flow", error)
            return principal

    def arrived(self, flow: str | None, weight: float) -> None:
        try:
            self._policy.arrived(flow, weight)
        except Exception as error:  # noqa: BLE001 - as above
            self._failed("arrived", error)

    def admitted(self, flow: str | None) -> None:
        try:
            self._policy.admitted(flow)
        except Exception as error:  # noqa: BLE001 - as above
            self._failed("admitted", error)

    def charge(
        self, flow: str | None, weight: float, prompt_tokens: int, generated_tokens: int
    ) -> None:
        try:
            self._policy.charge(flow, weight, prompt_tokens, generated_tokens)
        except Exception as error:  # noqa: BLE001 - as above
            self._failed("charge", error)

    def rank(self, flow: str | None) -> float:
        try:
            rank = float(self._policy.rank(flow))
            if math.isfinite(rank):
                return rank
            problem: Exception = ValueError(f"{rank} is no rank; return a finite number")
        except Exception as error:  # noqa: BLE001 - as above
            problem = error
        self._failed("rank", problem)
        return 0.0

    def _failed(self, method: str, error: Exception) -> None:
        if self._failures % _LOG_EVERY == 0:
            log.error("fairness policy %s failed in %s; its flows count as equal "
                      "(failure %d, one in %d is logged)",
                      type(self._policy).__name__, method, self._failures + 1, _LOG_EVERY,
                      exc_info=error)  # fmt: skip
        self._failures += 1
