"""Orders from the scheduler's side of the KV connector to the workers' in each step.

TensorRT-LLM pickles them between its ranks, so they hold plain values only.
"""

from __future__ import annotations

from attrs import define, field, frozen

from commutator_engine_kit.connector_worker import Chain

__all__ = ["ConnectorMetadata", "Load", "Store"]


@frozen
class Load:
    """Copy staged blocks into the engine's; staged blocks that are not listed are freed."""

    number: int
    places: tuple[int, ...]
    """Indices of the staged blocks to copy, counted from the first."""
    device_blocks: tuple[int, ...]


@frozen
class Store:
    """Store the next blocks of a request, which are full once this step has been computed."""

    request_id: int
    first: int
    device_blocks: tuple[int, ...]


@define(kw_only=True)
class ConnectorMetadata:
    """Orders from the scheduler to every worker, to be carried out in the order of the fields."""

    forget: list[int] = field(factory=list)
    """Requests that have ended or restarted: other requests may get their blocks in this step."""
    drops: list[int] = field(factory=list)
    """Claims whose staged blocks are no longer needed."""
    loads: list[Load] = field(factory=list)
    chains: list[Chain] = field(factory=list)
    stores: list[Store] = field(factory=list)
