"""What the two sides of the KV connector say to each other: orders down, reports up, each step.

vLLM pickles them between its scheduler's process and those of its workers, so they hold plain
values only.
"""

from __future__ import annotations

from attrs import frozen

from commutator.kv import KvEvent

__all__ = ["Answer", "Ask", "Chain", "Load", "Orders", "Report", "Store", "merged"]


@frozen
class Chain:
    """The next full blocks of a request, of which more follow; the first time also its facts."""

    request_id: str
    token_ids: tuple[int, ...]
    prompt_blocks: int
    lora: tuple[str, str] | None
    """Name and path."""
    cache_salt: str | None


@frozen
class Ask:
    """How many of a request's first ``blocks`` could be loaded from number ``first`` on."""

    number: int
    request_id: str
    first: int
    blocks: int
    tokens_per_s: float | None


@frozen
class Load:
    """Load what was planned for a question, without the first ``skip``."""

    number: int
    request_id: str
    device_blocks: tuple[int, ...]
    skip: int


@frozen
class Store:
    """Keep blocks of a request; this step's forward pass may compute them."""

    number: int
    request_id: str
    first: int
    device_blocks: tuple[int, ...]


@frozen(kw_only=True)
class Orders:
    """From the scheduler to every worker, to be carried out in this order."""

    reset: bool = False
    chains: tuple[Chain, ...] = ()
    drops: tuple[int, ...] = ()
    """Questions whose plan or load nobody wants any more."""
    asks: tuple[Ask, ...] = ()
    loads: tuple[Load, ...] = ()
    stores: tuple[Store, ...] = ()
    forget: tuple[str, ...] = ()
    """Requests that are over."""
    computes: bool = False
    """Whether the step computes anything."""


@frozen
class Answer:
    """To a question: these blocks are planned, each from such a medium."""

    number: int
    media: tuple[str, ...]


@frozen
class Report:
    """From a worker to the scheduler."""

    answers: tuple[Answer, ...] = ()
    stored: tuple[int, ...] = ()
    """Stores that need their blocks no longer."""
    events: tuple[KvEvent, ...] = ()


def merged(one: Report, other: Report) -> Report:
    """What several workers reported in one step."""
    return Report(one.answers + other.answers, one.stored + other.stored, one.events + other.events)
