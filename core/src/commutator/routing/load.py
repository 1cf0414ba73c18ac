"""In-flight accounting: what each worker has been sent and has not yet given back. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from attrs import define, field

from commutator.routing.contract import WorkerLoad

__all__ = ["InFlightLoad", "Ticket"]

_NOTHING = WorkerLoad()


@define
class Ticket:
    """One request on one worker, from dispatch to its end."""

    worker_id: str
    prompt_tokens: int
    block_size: int
    prefill_tokens: int
    """Prompt tokens that the worker has to compute, as far as is known."""
    generated_tokens: int = 0
    prefilling: bool = True

    @property
    def blocks(self) -> int:
        """KV blocks that the prompt and the answer so far fill or have begun."""
        return -(-(self.prompt_tokens + self.generated_tokens) // self.block_size)


@define
class _Totals:
    requests: int = 0
    prefill_tokens: int = 0
    blocks: int = 0
    load: WorkerLoad | None = None
    """The same for policies; None when it changed since it was last asked for."""


@define
class InFlightLoad:
    """Sums the tickets of each worker.

    Prefill tokens count from dispatch to the first token; blocks grow with the answer; both go
    when the ticket is released, on whichever way the request ended. What other front doors have in
    flight comes on top, in ``of``.
    """

    on_fall: Callable[[], None] | None = None
    """Called whenever some worker's load has fallen."""
    peers: int = 0
    """How many other front doors tell of their load."""
    _totals: dict[str, _Totals] = field(factory=dict)
    _of_peers: Mapping[str, WorkerLoad] = field(factory=dict)

    def dispatch(
        self, worker_id: str, prompt_tokens: int, block_size: int, cached_tokens: int = 0
    ) -> Ticket:
        """A request was sent; ``cached_tokens`` of its prompt lie in the worker's cache.

        ``block_size``: in tokens, the same for every worker, so that their loads compare.
        """
        prefill_tokens = max(0, prompt_tokens - cached_tokens)
        ticket = Ticket(worker_id, prompt_tokens, block_size, prefill_tokens)
        totals = self._totals.setdefault(worker_id, _Totals())
        totals.requests += 1
        totals.prefill_tokens += prefill_tokens
        totals.blocks += ticket.blocks
        totals.load = None
        return ticket

    def expect(self, ticket: Ticket, prefill_tokens: int) -> None:
        """The worker has to compute so many tokens of the prompt, other than was known before."""
        if not ticket.prefilling:
            return
        totals = self._totals.get(ticket.worker_id)
        less = ticket.prefill_tokens - prefill_tokens
        ticket.prefill_tokens = prefill_tokens
        if totals is not None:
            totals.prefill_tokens -= less
            totals.load = None
        if less > 0 and self.on_fall is not None:
            self.on_fall()

    def progress(self, ticket: Ticket, new_tokens: int) -> None:
        """The worker sent ``new_tokens`` more tokens for this ticket."""
        totals = self._totals.get(ticket.worker_id)
        before = ticket.blocks
        if ticket.prefilling and new_tokens:
            ticket.prefilling = False
            if totals is not None:
                totals.prefill_tokens -= ticket.prefill_tokens
                totals.load = None
            if self.on_fall is not None:
                self.on_fall()
        ticket.generated_tokens += new_tokens
        if totals is not None and (grown := ticket.blocks - before):
            totals.blocks += grown
            totals.load = None

    def release(self, ticket: Ticket) -> None:
        """The request ended. Call exactly once for each ticket."""
        totals = self._totals.get(ticket.worker_id)
        if totals is None:
            return  # the worker was forgotten, and its load with it
        totals.requests -= 1
        totals.blocks -= ticket.blocks
        totals.load = None
        if ticket.prefilling:
            totals.prefill_tokens -= ticket.prefill_tokens
        if not totals.requests:
            del self._totals[ticket.worker_id]
        if self.on_fall is not None:
            self.on_fall()

    def set_peers(self, loads: Mapping[str, WorkerLoad], count: int) -> None:
        """What ``count`` other front doors together have in flight, by worker."""
        self._of_peers = loads
        self.peers = count
        if self.on_fall is not None:
            self.on_fall()

    def own(self, worker_id: str) -> WorkerLoad:
        """What this front door has in flight on the worker."""
        totals = self._totals.get(worker_id)
        if totals is None:
            return _NOTHING
        if totals.load is None:
            totals.load = WorkerLoad(totals.requests, totals.prefill_tokens, totals.blocks)
        return totals.load

    def all_own(self) -> dict[str, WorkerLoad]:
        """The same of every worker that has anything in flight from here."""
        return {worker_id: self.own(worker_id) for worker_id in self._totals}

    def of(self, worker_id: str) -> WorkerLoad:
        """What all front doors have in flight on the worker, as far as is known."""
        if not self._of_peers:
            return self.own(worker_id)
        return self.own(worker_id) + self._of_peers.get(worker_id, _NOTHING)
