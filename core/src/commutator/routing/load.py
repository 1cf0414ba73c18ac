"""In-flight accounting: the requests, prefill tokens and KV blocks in flight at each worker.

Does no I/O.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from attrs import define, field

from commutator.contract.routing import WorkerLoad

__all__ = [
    "InFlightLoad",
    "Ticket",
]

_NOTHING = WorkerLoad()


@define
class Ticket:
    """One request at one worker, from dispatch to its end."""

    worker_id: str
    prompt_tokens: int
    block_size: int
    prefill_tokens: int
    """Prompt tokens that the worker is expected to compute."""
    generated_tokens: int = 0
    prefilling: bool = True
    on_served: Callable[[int, int], None] | None = None
    """Called with the prompt and generated tokens that the worker computes for it, beyond the
    expected ``prefill_tokens``; prompt tokens are negative where fewer are computed."""

    @property
    def blocks(self) -> int:
        """KV blocks that the prompt and the answer so far use, the last one perhaps in part."""
        return -(-(self.prompt_tokens + self.generated_tokens) // self.block_size)


@define
class _Totals:
    requests: int = 0
    prefill_tokens: int = 0
    blocks: int = 0
    load: WorkerLoad | None = None
    """The totals as policies see them; None when they have changed since it was last made."""


@define
class InFlightLoad:
    """Sums the tickets of each worker.

    Prefill tokens count from dispatch to the first token; blocks grow with the answer; both are
    subtracted when the ticket is released, however the request ended. ``of`` adds what other front
    doors have in flight.
    """

    on_fall: Callable[[], None] | None = None
    """Called whenever a worker's load has fallen."""
    peers: int = 0
    """The number of other front doors that share their load."""
    _totals: dict[str, _Totals] = field(factory=dict)
    _of_peers: Mapping[str, WorkerLoad] = field(factory=dict)

    def dispatch(
        self, worker_id: str, prompt_tokens: int, block_size: int, cached_tokens: int = 0
    ) -> Ticket:
        """Count a request that was sent; the worker has ``cached_tokens`` of its prompt cached.

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
        """Correct the number of prompt tokens that the worker has to compute."""
        if not ticket.prefilling:
            return
        totals = self._totals.get(ticket.worker_id)
        less = ticket.prefill_tokens - prefill_tokens
        ticket.prefill_tokens = prefill_tokens
        if less and ticket.on_served is not None:
            ticket.on_served(-less, 0)
        if totals is not None:
            totals.prefill_tokens -= less
            totals.load = None
        if less > 0 and self.on_fall is not None:
            self.on_fall()

    def progress(self, ticket: Ticket, new_tokens: int) -> None:
        """Count ``new_tokens`` more tokens that the worker sent for this ticket."""
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
        if new_tokens and ticket.on_served is not None:
            ticket.on_served(0, new_tokens)
        if totals is not None and (grown := ticket.blocks - before):
            totals.blocks += grown
            totals.load = None

    def release(self, ticket: Ticket) -> None:
        """Subtract an ended request. Call exactly once for each ticket."""
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
        """Set what ``count`` other front doors together have in flight, by worker."""
        self._of_peers = loads
        self.peers = count
        if self.on_fall is not None:
            self.on_fall()

    def own(self, worker_id: str) -> WorkerLoad:
        """What this front door has in flight at the worker."""
        totals = self._totals.get(worker_id)
        if totals is None:
            return _NOTHING
        if totals.load is None:
            totals.load = WorkerLoad(
                active_requests=totals.requests,
                active_prefill_tokens=totals.prefill_tokens,
                active_decode_blocks=totals.blocks,
            )
        return totals.load

    def all_own(self) -> dict[str, WorkerLoad]:
        """``own`` of every worker at which this front door has requests in flight."""
        return {worker_id: self.own(worker_id) for worker_id in self._totals}

    def of(self, worker_id: str) -> WorkerLoad:
        """What all front doors that share their load have in flight at the worker."""
        if not self._of_peers:
            return self.own(worker_id)
        return self.own(worker_id) + self._of_peers.get(worker_id, _NOTHING)
