"""Messages between the two sides of the KV connector.

In each step orders go to the workers, and reports come back. vLLM pickles them between its
processes, so they hold plain values only.
"""

from __future__ import annotations

from attrs import define, field, frozen

from commutator.contract.block import KvEvent
from commutator_engine_kit.connector_worker import Chain


@frozen
class LookupRequest:
    """Asks up to which boundary a request's prompt can be resumed, with what the tiers can load.

    The device has the blocks of all groups for the first ``first`` tokens; no boundary beyond
    ``limit`` tokens is wanted.
    """

    number: int
    request_id: str
    first: int
    limit: int
    tokens_per_s: float | None


@frozen
class Load:
    """Load what was planned for lookup ``number``, but nothing that ends by ``first`` tokens."""

    number: int
    request_id: str
    device_blocks: tuple[tuple[int, ...], ...]
    """The blocks of each group, in the order of the prompt."""
    first: int


@frozen
class Store:
    """Store a request's blocks of one group. The forward pass of this step may compute them."""

    number: int
    request_id: str
    group: int
    first: int
    """The number of the first of them in the prompt."""
    device_blocks: tuple[int, ...]


@define(kw_only=True)
class ConnectorMetadata:
    """Orders from the scheduler to every worker, to be carried out in the order of the fields."""

    reset: bool = False
    """Whether to evict all blocks from the tiers."""
    chains: list[Chain] = field(factory=list)
    drops: list[int] = field(factory=list)
    """Lookups whose plan or load is cancelled."""
    lookups: list[LookupRequest] = field(factory=list)
    loads: list[Load] = field(factory=list)
    stores: list[Store] = field(factory=list)
    forget: list[str] = field(factory=list)
    """Requests that have ended."""
    computes: bool = False
    """Whether the step computes anything."""

    @property
    def is_urgent(self) -> bool:
        """Whether it must be sent even when no request needs a step."""
        return bool(self.reset or self.drops or self.stores or self.forget)


@frozen
class LookupResult:
    """The answer to lookup ``number``."""

    number: int
    boundary: int
    """In tokens; as ``first`` of the lookup when nothing is worth loading."""
    media: tuple[str, ...] = ()
    """The media of the blocks to load of the group that keeps the whole prompt, if there is one;
    otherwise of all."""
    shared: int = 0
    """The last boundary up to which the groups that need the whole prefix have it, in tokens."""


@frozen
class WorkerReport:
    """From a worker to the scheduler."""

    answers: tuple[LookupResult, ...] = ()
    stored: tuple[int, ...] = ()
    """Stores that no longer need their device blocks."""
    events: tuple[KvEvent, ...] = ()


def merged(one: WorkerReport, other: WorkerReport) -> WorkerReport:
    """One report of the reports of two workers in one step."""
    return WorkerReport(
        one.answers + other.answers, one.stored + other.stored, one.events + other.events
    )
