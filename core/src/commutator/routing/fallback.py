"""Asks a policy. One that fails must not cost requests: they are served all the same."""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence

from commutator.errors import RoutingError
from commutator.routing.contract import Candidate, Decision, RouteRequest, RoutingPolicy

__all__ = ["FALLBACK", "Asker"]

log = logging.getLogger(__name__)

FALLBACK = "fallback"
"""The policy's name in decisions that the configured policy failed to make."""

_LOG_EVERY = 1000


class Asker:
    """Asks one policy and checks its answer.

    When the policy raises, or names a worker that is no candidate, the candidate with the fewest
    requests in flight gets the request; ``strict`` raises RoutingError instead.
    """

    def __init__(self, policy: RoutingPolicy, *, strict: bool) -> None:
        self._policy = policy
        self._strict = strict
        self._failures = 0

    def ask(
        self, request: RouteRequest, candidates: Sequence[Candidate], rng: random.Random
    ) -> tuple[Decision, int]:
        """The decision, and whom it means as an index of ``candidates``."""
        try:
            decision = self._policy.pick(request, candidates, rng)
            for number, candidate in enumerate(candidates):
                if candidate.worker_id == decision.worker_id:
                    return decision, number
            problem = f"picked {decision.worker_id!r}, which is no candidate"
            cause = None
        except Exception as error:  # noqa: BLE001 - third-party code may raise anything
            problem, cause = f"raised {type(error).__name__}: {error}", error
        problem = f"routing policy {type(self._policy).__name__} {problem}"
        if self._strict:
            raise RoutingError(problem) from cause
        if self._failures % _LOG_EVERY == 0:
            log.error("%s; the worker with the fewest requests is taken (failure %d, each %dth "
                      "is told)", problem, self._failures + 1, _LOG_EVERY,
                      exc_info=cause)  # fmt: skip
        self._failures += 1
        return _fewest_requests(candidates, rng, problem)


def _fewest_requests(
    candidates: Sequence[Candidate], rng: random.Random, problem: str
) -> tuple[Decision, int]:
    fewest = min(candidate.load.active_requests for candidate in candidates)
    idlest = [i for i, one in enumerate(candidates) if one.load.active_requests == fewest]
    number = rng.choice(idlest)
    reason = f"fewest requests ({fewest}), because {problem}"
    return Decision(candidates[number].worker_id, FALLBACK, reason), number
