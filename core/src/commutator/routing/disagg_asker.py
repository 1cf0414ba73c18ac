"""Asks a policy about prefill elsewhere. One that fails must not cost requests."""

from __future__ import annotations

import logging

from commutator.routing.disagg import DisaggAnswer, DisaggPolicy, DisaggQuestion

__all__ = ["POLICY_FAILED", "DisaggAsker"]

log = logging.getLogger(__name__)

POLICY_FAILED = "policy failed"
_LOG_EVERY = 1000


class DisaggAsker:
    """When the policy raises, or answers something else than an answer, the prefill is local."""

    def __init__(self, policy: DisaggPolicy) -> None:
        self._policy = policy
        self._failures = 0

    def ask(self, question: DisaggQuestion) -> DisaggAnswer:
        cause: Exception | None = None
        try:
            answer: object = self._policy.decide(question)
            if isinstance(answer, DisaggAnswer):
                return answer
            problem = f"answered {answer!r:.100}"
        except Exception as error:  # noqa: BLE001 - third-party code may raise anything
            problem, cause = f"raised {type(error).__name__}: {error}", error
        if self._failures % _LOG_EVERY == 0:
            log.error("disaggregation policy %s %s; prefill stays with decode (failure %d, each "
                      "%dth is told)", type(self._policy).__name__, problem, self._failures + 1,
                      _LOG_EVERY, exc_info=cause)  # fmt: skip
        self._failures += 1
        return DisaggAnswer(False, POLICY_FAILED)
