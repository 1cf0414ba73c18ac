"""Every hook of Commutator, in the order in which a deployment calls them.

A plugin is a module (or an object) named by an entry point in the group ``commutator``. It marks
its functions with ``commutator.hookimpl`` and names only the arguments it needs: within one
contract version arguments may be added here, never removed or reordered.

    registration   once, at start          engine_register, router_register,
                                           route_stage_register, disagg_register,
                                           fairness_register, tier_register,
                                           eviction_register, observer_register,
                                           authenticator_register, limiter_register,
                                           door_register, protocol_register,
                                           response_store_register, parser_register,
                                           operations_register, registry_register,
                                           launcher_register, event_bus_register,
                                           planner_register, tuning_register,
                                           traffic_register
    the command line                       command_register
    workers        as they come and go     worker_up, worker_down
    a request      in this order           request_received, request_queued, request_routed,
                                           disagg_decided, kv_handed_over, request_first_token,
                                           request_migrated, request_finished or request_failed,
                                           request_answered

Those of registration and of the command line are here. Those of workers and requests are observing
hooks: the methods of ``commutator.contract.observer.Observer``, without ``self``.
Hooks are called in the process and event loop where the event happens, so they must not block.
Observing hooks are called one after another. An exception is logged with the plugin's name: the
request and the other plugins are not affected.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:  # for annotations alone: listing commands imports this module, and nothing else
    from commutator.contract.commands import CommandRegister
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
        ResponseStoreRegister,
        RouterRegister,
        StageRegister,
        TierRegister,
        TrafficRegister,
        TuningRegister,
    )

__all__ = ["PROJECT", "hookimpl"]

PROJECT = "commutator"
"""The name of the entry point group and of the pluggy project."""

hookspec = pluggy.HookspecMarker(PROJECT)
"""Marks what plugins can implement; core's own."""
hookimpl = pluggy.HookimplMarker(PROJECT)
"""Marks a plugin's function as the hook of the same name. Hook wrappers are refused."""


# ---------------------------------------------------------------- registration


@hookspec
def engine_register(register: EngineRegister) -> None:
    """Called once at start, in every process. Offer engine kinds.

    ``register(kind, config_class, connector, stability="alpha")``: ``config_class`` subclasses
    ``EngineConfig``; ``connector`` is an instance of ``EngineConnector``. Import heavy libraries
    inside the connector's methods, not here. Collect-all; must not block.
    """


@hookspec
def router_register(register: RouterRegister) -> None:
    """Called once at start, in every process. Offer routing policies.

    ``register(kind, config_class, factory, stability="alpha")``: ``config_class`` subclasses
    ``RouterConfig``; ``factory(config)`` makes one ``RoutingPolicy`` for each model. Collect-all;
    must not block.
    """


@hookspec
def route_stage_register(register: StageRegister) -> None:
    """Called once at start, in every process. Offer stages for the `pipeline` policy.

    ``register(kind, stage_class, stability="alpha")``: ``stage_class`` is an attrs class that
    subclasses ``Filter``, ``Scorer`` or ``Picker``; its fields are its options. Collect-all; must
    not block.
    """


@hookspec
def disagg_register(register: DisaggRegister) -> None:
    """Called once at start, in every process. Offer disaggregation policies.

    ``register(kind, config_class, factory, stability="alpha")``: ``config_class`` subclasses
    ``DisaggregationConfig``; ``factory(config)`` makes one ``DisaggPolicy`` for each model.
    Collect-all; must not block.
    """


@hookspec
def fairness_register(register: FairnessRegister) -> None:
    """Called once at start, in every process. Offer fairness policies: whose request is next.

    ``register(kind, config_class, factory, stability="alpha")``: ``config_class`` subclasses
    ``FairnessConfig``; ``factory(config)`` makes one ``FairnessPolicy`` for each model's queue in
    each front-door process. Collect-all; must not block.
    """


@hookspec
def tier_register(register: TierRegister) -> None:
    """Called once at start, in every process. Offer storage tiers for KV blocks.

    ``register(kind, config_class, factory, stability="alpha")``: ``config_class`` subclasses
    ``TierConfig``; ``factory(config)`` makes the tier. Collect-all; must not block.
    """


@hookspec
def eviction_register(register: EvictionRegister) -> None:
    """Called once at start, in every process. Offer eviction policies for the tiers' blocks.

    ``register(kind, config_class, factory, stability="alpha")``: ``config_class`` subclasses
    ``EvictionConfig``; ``factory(config, capacity_blocks)`` makes one ``EvictionPolicy`` for a tier
    of that size. Collect-all; must not block.
    """


@hookspec
def observer_register(register: ObserverRegister) -> None:
    """Called once at start, in every process. Offer observers: metrics, audit logs, traces.

    ``register(kind, config_class, factory, stability="alpha")``: ``config_class`` subclasses
    ``ObserverConfig``; ``factory(config)`` makes one ``Observer`` for each `observers` entry in
    each front-door process. Collect-all; must not block. A plugin without options needs none: it
    may implement the observing hooks below itself.
    """


@hookspec
def authenticator_register(register: AuthenticatorRegister) -> None:
    """Called once at start, in every process. Offer authenticators, which tell who sends a request.

    ``register(kind, config_class, factory, stability="alpha")``: ``config_class`` subclasses
    ``AuthenticatorConfig``; ``factory(config)`` makes one ``Authenticator`` for each `auth` entry
    in each front-door process. Collect-all; must not block.
    """


@hookspec
def limiter_register(register: LimiterRegister) -> None:
    """Called once at start, in every process. Offer limiters, which count requests against limits.

    ``register(kind, config_class, factory, stability="alpha")``: ``config_class`` subclasses
    ``LimiterConfig``; ``factory(config)`` makes one ``Limiter`` in each front door, for its half
    there, and one in each supervisor, for its service. Collect-all; must not block.
    """


@hookspec
def operations_register(register: OperationsRegister) -> None:
    """Called once at start, in every process. Offer operations: what operators see and do.

    ``register(kind, config_class, factory, stability="alpha")``: ``config_class`` subclasses
    ``OperationsConfig``; ``factory(config, context)`` makes one ``Operations`` for each entry of
    `operations` in each front-door process; its routes are on every door that serves operators.
    Import aiohttp inside the factory, not here. Collect-all; must not block.
    """


@hookspec
def registry_register(register: RegistryRegister) -> None:
    """Called once at start, in every process. Offer registries, where workers are announced.

    ``register(kind, config_class, factory, stability="alpha")``: ``config_class`` subclasses
    ``RegistryConfig``; ``factory(config)`` makes the ``Registry`` of a deployment. Collect-all;
    must not block.
    """


@hookspec
def launcher_register(register: LauncherRegister) -> None:
    """Called once at start, in every process. Offer launchers, which start processes.

    ``register(kind, config_class, factory, stability="alpha")``: ``config_class`` subclasses
    ``LauncherConfig``; ``factory(config, context)`` makes the ``Launcher`` of one run of a
    deployment, whose ``LauncherContext`` it gets. With a subclass of ``AgentLauncherConfig`` it
    makes an ``AgentLauncher``, which runs workers on other hosts; front doors are processes of
    this one then. Collect-all; must not block.
    """


@hookspec
def event_bus_register(register: EventBusRegister) -> None:
    """Called once at start, in every process. Offer event buses, which carry KV events.

    ``register(kind, config_class, factory, stability="alpha")``: ``config_class`` subclasses
    ``EventBusConfig``; ``factory(config)`` makes one ``EventBus`` in each supervisor and each front
    door. Collect-all; must not block.
    """


@hookspec
def door_register(register: DoorRegister) -> None:
    """Called once at start, in every process. Offer doors: transports, such as HTTP.

    ``register(kind, config_class, door, stability="alpha")``: ``config_class`` subclasses
    ``DoorConfig``; ``door`` is an instance of ``Door``. Import server libraries inside its methods,
    not here. Collect-all; must not block.
    """


@hookspec
def protocol_register(register: ProtocolRegister) -> None:
    """Called once at start, in every process. Offer protocols: what clients speak on a door.

    ``register(kind, config_class, protocol, stability="alpha")``: ``config_class`` subclasses
    ``ProtocolConfig``; ``protocol`` is an instance of ``Protocol``. Collect-all; must not block.
    """


@hookspec
def response_store_register(register: ResponseStoreRegister) -> None:
    """Called once at start, in every process. Offer response stores, where answers are kept.

    ``register(kind, config_class, factory, stability="alpha")``: ``config_class`` subclasses
    ``ResponseStoreConfig``; ``factory(config)`` makes one ``ResponseStore``, or None to keep
    nothing, for each protocol on a door that keeps responses. Raises ConfigError where it cannot.
    Collect-all; must not block.
    """


@hookspec
def parser_register(register: ParserRegister) -> None:
    """Called once at start, in every process. Offer parsers: from a model's text to events.

    ``register(kind, config_class, factory, stability="alpha")``: ``config_class`` subclasses
    ``ParserConfig``; ``factory(config, model)`` makes the ``Parser`` of one model whose
    `tool_parser` is the kind; "auto" is what models have by default. Raises ValueError where the
    model's `reasoning_parser` names nothing that it knows. Collect-all; must not block.
    """


@hookspec
def planner_register(register: PlannerRegister) -> None:
    """Called once at start, in every process. Offer planners: how many workers demand needs.

    ``register(kind, config_class, factory, stability="alpha")``: ``config_class`` subclasses
    ``PlannerConfig``; ``factory(config, context)`` makes one ``PlannerPolicy``, whose
    ``PlannerContext`` tells of the fleet. Collect-all; must not block.
    """


@hookspec
def tuning_register(register: TuningRegister) -> None:
    """Called once at start, in every process. Offer tuning: which values options of policies have.

    ``register(kind, config_class, factory, stability="alpha")``: ``config_class`` subclasses
    ``TuningConfig``; ``factory(config, context)`` makes the ``Tuning`` of one run of a deployment.
    Collect-all; must not block.
    """


@hookspec
def traffic_register(register: TrafficRegister) -> None:
    """Called once at start, in every process. Offer traffic: which model a name stands for.

    ``register(kind, config_class, factory, stability="alpha")``: ``config_class`` subclasses
    ``TrafficConfig``; ``factory(config)`` makes one ``Traffic`` in each front-door process, and
    another whenever the section changes. Collect-all; must not block.
    """


@hookspec
def command_register(register: CommandRegister) -> None:
    """Called whenever the command line lists or looks for commands of plugins. Offer commands.

    ``register(name, help, load)``: ``name`` is the word after ``commutator``; ``load()`` returns
    the ``click.Command`` and is called only when it is used. In a module of its own, which an entry
    point in the group ``commutator.commands`` names and which implements no other hook: it is
    imported for every ``commutator --help``, so it imports ``hookimpl`` and little else.
    Collect-all; must not block.
    """
