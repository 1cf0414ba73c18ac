"""Fairness: whose request is next when several principals' requests wait for busy workers."""

from __future__ import annotations

from abc import ABC, abstractmethod

from attrs import frozen

from commutator.contract.settings import setting

__all__ = ["FairnessConfig", "FairnessPolicy"]


class FairnessPolicy(ABC):
    """Orders the flows of one queue. Does no I/O and reads no clock; each call costs O(1).

    A flow is what gets a share of the workers: by default all requests of one principal. The queue
    serves the flow of the smallest ``rank`` first and, within a flow, the lowest priority value,
    then the earliest arrival. Flows of equal rank are served as if they were one.

    One instance serves one queue: of one model in one front-door process. The same instance
    serves replays in virtual time.
    """

    def flow(self, principal: str | None) -> str | None:
        """The flow of a principal's requests; always the same for the same principal.

        ``principal`` is None where nobody is asked who they are. Default: one flow for each.
        """
        return principal

    def arrived(self, flow: str | None, weight: float) -> None:
        """A request of ``flow``, of which no other waits, needs a worker.

        Called also for requests that get one at once. ``weight``: the principal's share in
        proportion to others' weights, above 0. Default: does nothing.
        """

    def admitted(self, flow: str | None) -> None:
        """A request of ``flow`` got its worker. Default: does nothing."""

    def charge(
        self, flow: str | None, weight: float, prompt_tokens: int, generated_tokens: int
    ) -> None:
        """The workers compute tokens for ``flow``, whether or not a request of it waits.

        Called with the prompt's tokens that are not cached when a worker gets the request, and with
        each batch of generated tokens as it comes. ``prompt_tokens`` is negative where more of an
        earlier prompt was cached than expected. Default: does nothing.
        """

    @abstractmethod
    def rank(self, flow: str | None) -> float:
        """A flow with a smaller rank is served first. Asked for flows that have ``arrived``.

        The queue asks again after a call of one of the methods above for the same flow only.
        """


@frozen(kw_only=True)
class FairnessConfig:
    """Options of every fairness policy; each policy plugin adds its own."""

    kind: str = setting("The fairness plugin.")
