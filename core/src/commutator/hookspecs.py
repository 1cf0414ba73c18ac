"""The contract: every hook of Commutator, in the order in which a deployment meets them.

A plugin is a module (or an object) named by an entry point in the group ``commutator``. It marks
its functions with ``commutator.hookimpl`` and names only the arguments it needs: arguments may be
added here, never reordered or removed within a major version.

    registration   once, at start          engine_register, router_register,
                                           route_stage_register, disagg_register,
                                           tier_register, eviction_register
    workers        as they come and go     worker_up, worker_down
    a request      in this order           request_received, request_routed, request_first_token,
                                           request_migrated, request_finished or request_failed

Hooks are called in the process and event loop where the event happens, so they must not block.
An exception in an observing hook is logged and dropped: it never fails a request.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from commutator.plugins import (
        DisaggRegister,
        EngineRegister,
        EvictionRegister,
        RouterRegister,
        StageRegister,
        TierRegister,
    )
    from commutator.routing.contract import Decision
    from commutator.types import RequestOutcome, RequestSummary, WorkerRecord

__all__ = ["PROJECT", "hookimpl"]

PROJECT = "commutator"

_hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


# ---------------------------------------------------------------- registration


@_hookspec
def engine_register(register: EngineRegister) -> None:
    """Called once at start, in every process. Offer engine kinds.

    ``register(kind, config_class, connector, stability="alpha")``: ``config_class`` subclasses
    ``EngineConfig``; ``connector`` is an instance of ``EngineConnector``. Import heavy libraries
    inside the connector's methods, not here. Collect-all; must not block.
    """


@_hookspec
def router_register(register: RouterRegister) -> None:
    """Called once at start, in every process. Offer routing policies.

    ``register(kind, config_class, factory, stability="alpha")``: ``config_class`` subclasses
    ``RouterConfig``; ``factory(config)`` makes one ``RoutingPolicy`` for each model. Collect-all;
    must not block.
    """


@_hookspec
def route_stage_register(register: StageRegister) -> None:
    """Called once at start, in every process. Offer stages for the `pipeline` policy.

    ``register(kind, stage_class, stability="alpha")``: ``stage_class`` is an attrs class that
    subclasses ``Filter``, ``Scorer`` or ``Picker``; its fields are its options. Collect-all; must
    not block.
    """


@_hookspec
def disagg_register(register: DisaggRegister) -> None:
    """Called once at start, in every process. Offer policies of prefill and decode apart.

    ``register(kind, config_class, factory, stability="alpha")``: ``config_class`` subclasses
    ``DisaggregationConfig``; ``factory(config)`` makes one ``DisaggPolicy`` for each model.
    Collect-all; must not block.
    """


@_hookspec
def tier_register(register: TierRegister) -> None:
    """Called once at start, in every process. Offer storage tiers for KV blocks.

    ``register(kind, config_class, factory, stability="alpha")``: ``config_class`` subclasses
    ``TierConfig``; ``factory(config)`` makes the tier. Collect-all; must not block.
    """


@_hookspec
def eviction_register(register: EvictionRegister) -> None:
    """Called once at start, in every process. Offer eviction policies for the tiers' blocks.

    ``register(kind, config_class, factory, stability="alpha")``: ``config_class`` subclasses
    ``EvictionConfig``; ``factory(config, capacity_blocks)`` makes one ``EvictionPolicy`` for a tier
    of that size. Collect-all; must not block.
    """


# --------------------------------------------------------------------- workers


@_hookspec
def worker_up(worker: WorkerRecord) -> None:
    """Called in each front door when a worker can be routed to. Observing; must not block."""


@_hookspec
def worker_down(worker: WorkerRecord, reason: str) -> None:
    """Called in each front door when a worker leaves routing. Observing; must not block.

    ``reason`` is one of the registry's words: "lease expired", "stopped", "draining", "failed".
    """


# ------------------------------------------------------------------- a request


@_hookspec
def request_received(request: RequestSummary) -> None:
    """Called in the front door once a request was validated and tokenized. Observing."""


@_hookspec
def request_routed(request: RequestSummary, decision: Decision) -> None:
    """Called in the front door when a worker was chosen, before it is asked. Observing.

    Called again for each further worker, after ``request_migrated``.
    """


@_hookspec
def request_first_token(request: RequestSummary, worker_id: str, ttft_s: float) -> None:
    """Called in the front door with the first token; seconds count from its arrival. Observing."""


@_hookspec
def request_migrated(
    request: RequestSummary,
    from_worker: str,
    to_worker: str,
    reason: str,
    generated_tokens: int,
) -> None:
    """Called in the front door when a request goes on at another worker. Observing.

    ``reason``: "connection_lost", "incomplete_stream", "lease_expired" or, when the worker did not
    take the request, "overloaded". ``generated_tokens`` were answered before; it may be none.
    """


@_hookspec
def request_finished(request: RequestSummary, outcome: RequestOutcome) -> None:
    """Called in the front door when the engine finished the request. Observing."""


@_hookspec
def request_failed(request: RequestSummary, error: BaseException) -> None:
    """Called in the front door when the request ended without an answer. Observing.

    ``error`` is ``asyncio.CancelledError`` when the client went away.
    """
