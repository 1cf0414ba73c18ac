"""In-flight accounting: the requests, prefill tokens and KV blocks in flight at each worker.

Does no I/O.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import takewhile

from attrs import define, field

from commutator.contract.routing import BusyConfig, WorkerLoad

_NOTHING = WorkerLoad()
_MOST_CHANGES = 1 << 16
"""Workers whose last change is remembered."""


def values_of(load: WorkerLoad) -> tuple[int, int, int]:
    """Requests, prefill tokens and blocks: the fields of a load in their order."""
    return load.active_requests, load.active_prefill_tokens, load.active_decode_blocks


def load_of(requests: int, prefill_tokens: int, blocks: int) -> WorkerLoad:
    """The inverse of ``values_of``."""
    return WorkerLoad(
        active_requests=requests,
        active_prefill_tokens=prefill_tokens,
        active_decode_blocks=blocks,
    )


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
    changes: int = 0
    """Counts the changes of any worker's load; see ``changed_since``."""
    _totals: dict[str, _Totals] = field(factory=dict)
    _of_peers: Mapping[str, WorkerLoad] = field(factory=dict)
    _changed: dict[str, int] = field(factory=dict)
    """The last change of each worker's load, in their order."""
    _forgotten: int = 0
    """Changes up to this one are not remembered."""

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
        self._note(worker_id, totals)
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
            self._note(ticket.worker_id, totals)
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
                self._note(ticket.worker_id, totals)
            if self.on_fall is not None:
                self.on_fall()
        ticket.generated_tokens += new_tokens
        if new_tokens and ticket.on_served is not None:
            ticket.on_served(0, new_tokens)
        if totals is not None and (grown := ticket.blocks - before):
            totals.blocks += grown
            self._note(ticket.worker_id, totals)

    def release(self, ticket: Ticket) -> None:
        """Subtract an ended request. Call exactly once for each ticket."""
        totals = self._totals.get(ticket.worker_id)
        if totals is None:
            return  # the worker was forgotten, and its load with it
        totals.requests -= 1
        totals.blocks -= ticket.blocks
        self._note(ticket.worker_id, totals)
        if ticket.prefilling:
            totals.prefill_tokens -= ticket.prefill_tokens
        if not totals.requests:
            del self._totals[ticket.worker_id]
        if self.on_fall is not None:
            self.on_fall()

    def set_peers(self, loads: Mapping[str, WorkerLoad], count: int) -> None:
        """Set what ``count`` other front doors together have in flight, by worker."""
        before, self._of_peers = self._of_peers, loads
        self.peers = count
        for worker_id in before.keys() | loads.keys():
            if before.get(worker_id) != loads.get(worker_id):
                self._note(worker_id, None)
        if self.on_fall is not None:
            self.on_fall()

    def changed_since(self, changes: int) -> Iterable[str] | None:
        """The workers whose load has changed since there were ``changes``, each once.

        None if that is not known any more: any load may have changed.
        """
        if changes < self._forgotten:
            return None
        newest = reversed(self._changed.items())
        return [name for name, _ in takewhile(lambda change: change[1] > changes, newest)]

    def _note(self, worker_id: str, totals: _Totals | None) -> None:
        """The worker's load has changed."""
        if totals is not None:
            totals.load = None
        self.changes += 1
        changed = self._changed
        changed.pop(worker_id, None)
        changed[worker_id] = self.changes
        if len(changed) > _MOST_CHANGES:
            self._forgotten = self.changes
            changed.clear()

    def own(self, worker_id: str) -> WorkerLoad:
        """What this front door has in flight at the worker."""
        totals = self._totals.get(worker_id)
        if totals is None:
            return _NOTHING
        if totals.load is None:
            totals.load = load_of(totals.requests, totals.prefill_tokens, totals.blocks)
        return totals.load

    def all_own(self) -> dict[str, WorkerLoad]:
        """``own`` of every worker at which this front door has requests in flight."""
        return {worker_id: self.own(worker_id) for worker_id in self._totals}

    def of_peers(self, worker_id: str) -> int:
        """Requests that other front doors have in flight at the worker."""
        return self._of_peers.get(worker_id, _NOTHING).active_requests

    def of(self, worker_id: str) -> WorkerLoad:
        """What all front doors that share their load have in flight at the worker."""
        if not self._of_peers:
            return self.own(worker_id)
        return self.own(worker_id) + self._of_peers.get(worker_id, _NOTHING)


def threshold_hit(config: BusyConfig, load: WorkerLoad, kv_capacity_blocks: int) -> str | None:
    """The option whose threshold this load has reached; None if the worker is not busy.

    ``kv_capacity_blocks`` is the capacity of the worker, or of one data-parallel rank, in the
    blocks of ``load``; 0 if unknown. A worker with nothing in flight is never busy, so that every
    request is served eventually.
    """
    requests = config.max_active_requests
    if requests is not None and load.active_requests >= requests:
        return "max_active_requests"
    tokens = config.active_prefill_tokens_threshold
    if tokens is not None and load.active_prefill_tokens > tokens:
        return "active_prefill_tokens_threshold"
    part = config.active_decode_blocks_threshold
    if part is None or kv_capacity_blocks == 0:
        return None
    over = load.active_decode_blocks > part * kv_capacity_blocks
    return "active_decode_blocks_threshold" if over else None
