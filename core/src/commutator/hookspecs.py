"""Every hook of Commutator, in the order in which a deployment calls them.

A plugin is a module (or an object) named by an entry point in the group ``commutator``. It marks
its functions with ``commutator.hookimpl`` and names only the arguments it needs: within one
contract version arguments may be added here, never removed or reordered.

    registration   once, at start          engine_register, router_register,
                                           route_stage_register, disagg_register,
                                           fairness_register, tier_register,
                                           eviction_register, observer_register,
                                           authenticator_register, limiter_register,
                                           door_register, protocol_register, parser_register,
                                           operations_register, registry_register,
                                           launcher_register, event_bus_register,
                                           planner_register, tuning_register
    the command line                       command_register
    workers        as they come and go     worker_up, worker_down
    a request      in this order           request_received, request_queued, request_routed,
                                           disagg_decided, kv_handed_over, request_first_token,
                                           request_migrated, request_finished or request_failed,
                                           request_answered

Hooks are called in the process and event loop where the event happens, so they must not block.
Observing hooks are called one after another. An exception is logged with the plugin's name: the
request and the other plugins are not affected.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import pluggy

if TYPE_CHECKING:  # for annotations alone: listing commands imports this module, and nothing else
    from commutator.contract.commands import CommandRegister
    from commutator.contract.disagg import DisaggAnswer, HandoverOutcome
    from commutator.contract.observer import AnsweredRequest
    from commutator.contract.registration import (
        AuthenticatorRegister,
        DisaggRegister,
        DoorRegister,
        EngineRegister,
        EventBusRegister,
        EvictionRegister,
        FairnessRegister,
        LauncherRegister,
        LimiterRegister,
        ObserverRegister,
        OperationsRegister,
        ParserRegister,
        PlannerRegister,
        ProtocolRegister,
        RegistryRegister,
        RouterRegister,
        StageRegister,
        TierRegister,
        TuningRegister,
    )
    from commutator.contract.request import RequestOutcome, RequestSummary
    from commutator.contract.routing import Decision
    from commutator.contract.worker import WorkerRecord

__all__ = ["PROJECT", "hookimpl"]

PROJECT = "commutator"
"""The name of the entry point group and of the pluggy project."""

_hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)
"""Marks a plugin's function as the hook of the same name. Hook wrappers are refused."""


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
    """Called once at start, in every process. Offer disaggregation policies.

    ``register(kind, config_class, factory, stability="alpha")``: ``config_class`` subclasses
    ``DisaggregationConfig``; ``factory(config)`` makes one ``DisaggPolicy`` for each model.
    Collect-all; must not block.
    """


@_hookspec
def fairness_register(register: FairnessRegister) -> None:
    """Called once at start, in every process. Offer fairness policies: whose request is next.

    ``register(kind, config_class, factory, stability="alpha")``: ``config_class`` subclasses
    ``FairnessConfig``; ``factory(config)`` makes one ``FairnessPolicy`` for each model's queue in
    each front-door process. Collect-all; must not block.
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


@_hookspec
def observer_register(register: ObserverRegister) -> None:
    """Called once at start, in every process. Offer observers: metrics, audit logs, traces.

    ``register(kind, config_class, factory, stability="alpha")``: ``config_class`` subclasses
    ``ObserverConfig``; ``factory(config)`` makes one ``Observer`` for each `observers` entry in
    each front-door process. Collect-all; must not block. A plugin without options needs none: it
    may implement the observing hooks below itself.
    """


@_hookspec
def authenticator_register(register: AuthenticatorRegister) -> None:
    """Called once at start, in every process. Offer authenticators, which tell who sends a request.

    ``register(kind, config_class, factory, stability="alpha")``: ``config_class`` subclasses
    ``AuthenticatorConfig``; ``factory(config)`` makes one ``Authenticator`` for each `auth` entry
    in each front-door process. Collect-all; must not block.
    """


@_hookspec
def limiter_register(register: LimiterRegister) -> None:
    """Called once at start, in every process. Offer limiters, which count requests against limits.

    ``register(kind, config_class, factory, stability="alpha")``: ``config_class`` subclasses
    ``LimiterConfig``; ``factory(config)`` makes one ``Limiter`` in each front door, for its half
    there, and one in each supervisor, for its service. Collect-all; must not block.
    """


@_hookspec
def operations_register(register: OperationsRegister) -> None:
    """Called once at start, in every process. Offer operations: what operators see and do.

    ``register(kind, config_class, factory, stability="alpha")``: ``config_class`` subclasses
    ``OperationsConfig``; ``factory(config, context)`` makes one ``Operations`` for each entry of
    `operations` in each front-door process; its routes are on every door that serves operators.
    Import aiohttp inside the factory, not here. Collect-all; must not block.
    """


@_hookspec
def registry_register(register: RegistryRegister) -> None:
    """Called once at start, in every process. Offer registries, where workers are announced.

    ``register(kind, config_class, factory, stability="alpha")``: ``config_class`` subclasses
    ``RegistryConfig``; ``factory(config)`` makes the ``Registry`` of a deployment. Collect-all;
    must not block.
    """


@_hookspec
def launcher_register(register: LauncherRegister) -> None:
    """Called once at start, in every process. Offer launchers, which start processes.

    ``register(kind, config_class, factory, stability="alpha")``: ``config_class`` subclasses
    ``LauncherConfig``; ``factory(config, context)`` makes the ``Launcher`` of one run of a
    deployment, whose ``LauncherContext`` it gets. With a subclass of ``AgentLauncherConfig`` it
    makes an ``AgentLauncher``, which runs workers on other hosts; front doors are processes of
    this one then. Collect-all; must not block.
    """


@_hookspec
def event_bus_register(register: EventBusRegister) -> None:
    """Called once at start, in every process. Offer event buses, which carry KV events.

    ``register(kind, config_class, factory, stability="alpha")``: ``config_class`` subclasses
    ``EventBusConfig``; ``factory(config)`` makes one ``EventBus`` in each supervisor and each front
    door. Collect-all; must not block.
    """


@_hookspec
def door_register(register: DoorRegister) -> None:
    """Called once at start, in every process. Offer doors: transports, such as HTTP.

    ``register(kind, config_class, door, stability="alpha")``: ``config_class`` subclasses
    ``DoorConfig``; ``door`` is an instance of ``Door``. Import server libraries inside its methods,
    not here. Collect-all; must not block.
    """


@_hookspec
def protocol_register(register: ProtocolRegister) -> None:
    """Called once at start, in every process. Offer protocols: what clients speak on a door.

    ``register(kind, config_class, protocol, stability="alpha")``: ``config_class`` subclasses
    ``ProtocolConfig``; ``protocol`` is an instance of ``Protocol``. Collect-all; must not block.
    """


@_hookspec
def parser_register(register: ParserRegister) -> None:
    """Called once at start, in every process. Offer parsers: from a model's text to events.

    ``register(kind, config_class, factory, stability="alpha")``: ``config_class`` subclasses
    ``ParserConfig``; ``factory(config)`` makes one ``AnswerParser`` for each answer of a model
    whose `parser` names it. Collect-all; must not block.
    """


@_hookspec
def planner_register(register: PlannerRegister) -> None:
    """Called once at start, in every process. Offer planners: how many workers demand needs.

    ``register(kind, config_class, factory, stability="alpha")``: ``config_class`` subclasses
    ``PlannerConfig``; ``factory(config, context)`` makes one ``PlannerPolicy``, whose
    ``PlannerContext`` tells of the fleet. Collect-all; must not block.
    """


@_hookspec
def tuning_register(register: TuningRegister) -> None:
    """Called once at start, in every process. Offer tuning: which values options of policies have.

    ``register(kind, config_class, factory, stability="alpha")``: ``config_class`` subclasses
    ``TuningConfig``; ``factory(config, context)`` makes the ``Tuning`` of one run of a deployment.
    Collect-all; must not block.
    """


@_hookspec
def command_register(register: CommandRegister) -> None:
    """Called whenever the command line lists or looks for commands of plugins. Offer commands.

    ``register(name, help, load)``: ``name`` is the word after ``commutator``; ``load()`` returns
    the ``click.Command`` and is called only when it is used. In a module of its own, which an entry
    point in the group ``commutator.commands`` names and which implements no other hook: it is
    imported for every ``commutator --help``, so it imports ``hookimpl`` and little else.
    Collect-all; must not block.
    """


# --------------------------------------------------------------------- workers


@_hookspec
def worker_up(worker: WorkerRecord) -> None:
    """Called in each front door when a worker can be routed to. Observing; must not block.

    Called again when a worker that was draining takes requests again.
    """


@_hookspec
def worker_down(worker: WorkerRecord, reason: str) -> None:
    """Called in each front door when a worker leaves routing. Observing; must not block.

    ``reason``: "lease expired", "stopped", "draining", "failed" or "retired".
    """


# ------------------------------------------------------------------- a request


@_hookspec
def request_received(request: RequestSummary) -> None:
    """Called in the front door once a request was validated and tokenized. Observing.

    Every request that was received ends in exactly one ``request_finished`` or ``request_failed``.
    """


@_hookspec
def request_queued(
    request: RequestSummary, queue: Literal["router", "prefill"], waited_s: float
) -> None:
    """Called in the front door when a request that had to wait for a worker has one. Observing.

    ``queue``: "router" where every worker was busy, "prefill" where every prefill worker was.
    ``waited_s`` is the time in that queue, in seconds. Not called for a request that did not wait.
    """


@_hookspec
def request_routed(request: RequestSummary, decision: Decision) -> None:
    """Called in the front door when a worker was chosen, before it gets the request. Observing.

    Called again for each further worker, after ``request_migrated``.
    """


@_hookspec
def disagg_decided(request: RequestSummary, answer: DisaggAnswer) -> None:
    """Called in the front door when the disaggregation policy has answered. Observing.

    Only for models with a disaggregation policy and a prefill worker; once for each worker that
    ``request_routed`` names.
    """


@_hookspec
def kv_handed_over(request: RequestSummary, handover: HandoverOutcome) -> None:
    """Called in the front door when both sides of a hand-over have ended. Observing.

    Once for each try to prefill the request at another worker, successful or not.
    """


@_hookspec
def request_first_token(request: RequestSummary, worker_id: str, ttft_s: float) -> None:
    """Called in the front door with the first token of the answer. Observing.

    ``ttft_s``: seconds since the request arrived at routing; time in queues counts.
    """


@_hookspec
def request_migrated(
    request: RequestSummary, from_worker: str, to_worker: str, reason: str, generated_tokens: int
) -> None:
    """Called in the front door when another worker continues a request. Observing.

    ``reason``: "connection_lost", "incomplete_stream", "lease_expired", "drained" when the worker
    was stopped while it drained, or "overloaded" when it refused the request.
    ``generated_tokens``: length of the answer so far, 0 or more.
    """


@_hookspec
def request_finished(request: RequestSummary, outcome: RequestOutcome) -> None:
    """Called in the front door when the engine finished the request. Observing."""


@_hookspec
def request_failed(request: RequestSummary, error: BaseException, worker_id: str | None) -> None:
    """Called in the front door when the request ended without a complete answer. Observing.

    ``error`` is ``asyncio.CancelledError`` when the client disconnected. ``worker_id`` is the
    worker that served it last, None when no worker was chosen.
    """


@_hookspec
def request_answered(answered: AnsweredRequest) -> None:
    """Called in the front door when a client's request ended, however. Observing.

    Once for each request of a client, after what the hooks above say about its answers. Refused
    requests and acts of administration come here too, and nowhere else; probes do not.
    """
