"""Registration: the argument of each ``*_register`` hook, and the kinds that plugins register."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, Literal, TypeVar, get_args

from attrs import define, field, frozen

from commutator.contract.disagg import DisaggPolicy, DisaggregationConfig
from commutator.contract.door import Door, DoorConfig
from commutator.contract.engine import EngineConfig, EngineConnector
from commutator.contract.event_bus import EventBus, EventBusConfig
from commutator.contract.eviction import EvictionConfig, EvictionPolicy
from commutator.contract.fairness import FairnessConfig, FairnessPolicy
from commutator.contract.launcher import AgentLauncher, Launcher, LauncherConfig, LauncherContext
from commutator.contract.limiter import Limiter, LimiterConfig
from commutator.contract.observer import Observer, ObserverConfig
from commutator.contract.operations import Operations, OperationsConfig, OperationsContext
from commutator.contract.parser import Parser, ParserConfig, ParserModel
from commutator.contract.planner import PlannerConfig, PlannerContext, PlannerPolicy, TuningConfig
from commutator.contract.principal import Authenticator, AuthenticatorConfig
from commutator.contract.protocol import Protocol, ProtocolConfig
from commutator.contract.registry import Registry, RegistryConfig
from commutator.contract.response_store import ResponseStore, ResponseStoreConfig
from commutator.contract.routing import RouterConfig, RouteStage, RoutingPolicy
from commutator.contract.tier import StorageTier, TierConfig
from commutator.contract.traffic import Traffic, TrafficConfig
from commutator.contract.tuning import Tuning, TuningContext
from commutator.errors import PluginError

__all__ = [
    "AuthenticatorRegister",
    "Catalog",
    "DisaggRegister",
    "DoorRegister",
    "EngineRegister",
    "EventBusRegister",
    "EvictionRegister",
    "FairnessRegister",
    "Kind",
    "LauncherRegister",
    "LimiterRegister",
    "ObserverRegister",
    "OperationsRegister",
    "Origin",
    "ParserRegister",
    "PlannerRegister",
    "ProtocolRegister",
    "Register",
    "RegistryRegister",
    "ResponseStoreRegister",
    "RouterRegister",
    "Stability",
    "StageRegister",
    "TierRegister",
    "TrafficRegister",
    "TuningRegister",
]

Stability = Literal["alpha", "beta", "stable"]
"""What may change: "alpha" anything, "beta" options, with a changelog entry, "stable" nothing."""

ConfigT = TypeVar("ConfigT")
ThingT = TypeVar("ThingT")


@frozen(kw_only=True)
class Origin:
    """The plugin that offers a kind."""

    plugin: str
    """The name of its entry point."""
    distribution: str
    """The name of the installed package that brings the plugin."""


@frozen(kw_only=True)
class Kind(Generic[ThingT]):
    """One registered engine, routing policy, stage, storage tier, ...: a legal value of `kind`."""

    seam: str
    """What the plugin extends: "engine", "router", "stage", "disaggregation", "tier", "eviction",
    "fairness", "observer", "authenticator", "limiter", "operations", "door", "protocol", "parser",
    "response store", "registry", "launcher", "event bus", "planner", "tuning" or "traffic"."""
    name: str
    """The value of `kind`, unique in its seam."""
    config_class: type[Any]
    """The attrs class of its options."""
    thing: ThingT
    """An engine's connector; a door; a protocol; a stage's class; a factory of everything else."""
    stability: Stability
    """What the plugin promises."""
    origin: Origin
    """The plugin that registered it."""

    def __str__(self) -> str:
        return f"{self.seam} {self.name} ({self.stability})"


@define
class Catalog(Generic[ThingT]):
    """The registered kinds of one seam, by name."""

    seam: str
    """As ``Kind.seam``."""
    config_base: type[Any]
    """What the configuration class of each kind subclasses."""
    check: Callable[[Any], str | None]
    """Returns what is wrong with the registered object; None when nothing is."""
    kinds: dict[str, Kind[ThingT]] = field(factory=dict)
    """The registered kinds by name, in the order of registration."""

    def add(
        self,
        origin: Origin,
        name: str,
        config_class: type[Any],
        thing: ThingT,
        stability: Stability,
    ) -> None:
        """Add a kind. Raises PluginError, naming ``origin``, when it breaks the contract."""
        if problem := self._problem(name, config_class, thing, stability):
            raise PluginError(origin.distribution, f'{self.seam} "{name}": {problem}')
        self.kinds[name] = Kind(
            seam=self.seam,
            name=name,
            config_class=config_class,
            thing=thing,
            stability=stability,
            origin=origin,
        )

    def remove(self, origin: Origin) -> None:
        """Remove every kind of a plugin."""
        self.kinds = {name: kind for name, kind in self.kinds.items() if kind.origin != origin}

    def _problem(self, name: str, config_class: Any, thing: Any, stability: str) -> str | None:
        base = self.config_base
        if not (isinstance(config_class, type) and issubclass(config_class, base)):
            return f"its config class must subclass {base.__name__}"
        if problem := self.check(thing):
            return problem
        if stability not in get_args(Stability):
            return f"stability must be one of {', '.join(get_args(Stability))}, not {stability!r}"
        if (other := self.kinds.get(name)) is not None:
            return (
                f"already registered by {other.origin.distribution}; block one of the two plugins"
            )
        return None


@frozen
class Register(Generic[ConfigT, ThingT]):
    """The argument of the ``*_register`` hooks: a plugin calls it once for each kind it offers.

    The hook's own documentation says what it takes.
    """

    _catalog: Catalog[ThingT]
    _origin: Origin

    def __call__(
        self, kind: str, config_class: type[ConfigT], thing: ThingT, stability: Stability = "alpha"
    ) -> None:
        """Offer ``kind`` with the options of ``config_class``, made or served by ``thing``.

        Raises PluginError when one of them breaks the contract or the kind is taken.
        """
        self._catalog.add(self._origin, kind, config_class, thing, stability)


@frozen
class StageRegister:
    """The argument of the hook ``route_stage_register``: a plugin calls it once for each stage."""

    _catalog: Catalog[type[RouteStage]]
    _origin: Origin

    def __call__(
        self, kind: str, stage_class: type[RouteStage], stability: Stability = "alpha"
    ) -> None:
        """Offer the stage ``kind``. ``stage_class`` is an attrs class whose fields are its options.

        Raises PluginError when it is no ``Filter``, ``Scorer`` or ``Picker``, when it leaves a
        method abstract, or when the kind is taken.
        """
        self._catalog.add(self._origin, kind, stage_class, stage_class, stability)


EngineRegister = Register[EngineConfig, EngineConnector[Any]]
"""Offers an engine by an ``EngineConnector``: an instance, one for all workers."""
RouterRegister = Register[RouterConfig, Callable[[Any], RoutingPolicy]]
"""Offers a routing policy by ``factory(config)``, called once for each model."""
DisaggRegister = Register[DisaggregationConfig, Callable[[Any], DisaggPolicy]]
"""Offers a disaggregation policy by ``factory(config)``, called once for each model."""
TierRegister = Register[TierConfig, Callable[[Any], StorageTier]]
"""Offers a storage tier by ``factory(config)``, called once for each worker."""
EvictionRegister = Register[EvictionConfig, Callable[[Any, int], EvictionPolicy]]
"""Offers an eviction policy by ``factory(config, capacity_blocks)``, called once for each tier."""
FairnessRegister = Register[FairnessConfig, Callable[[Any], FairnessPolicy]]
"""Offers a fairness policy by ``factory(config)``, called once for each queue."""
ObserverRegister = Register[ObserverConfig, Callable[[Any], Observer]]
"""Offers an observer by ``factory(config)``, called once for each `observers` entry and front-door
process."""
AuthenticatorRegister = Register[AuthenticatorConfig, Callable[[Any], Authenticator]]
"""Offers an authenticator by ``factory(config)``, called once for each `auth` entry and front-door
process."""
OperationsRegister = Register[OperationsConfig, Callable[[Any, OperationsContext], Operations]]
"""Offers operations by ``factory(config, context)``, called once for each entry of `operations` and
front-door process."""
LimiterRegister = Register[LimiterConfig, Callable[[Any], Limiter]]
"""Offers a limiter by ``factory(config)``, called once in each supervisor and front door."""
ResponseStoreRegister = Register[ResponseStoreConfig, Callable[[Any], ResponseStore | None]]
"""Offers a response store by ``factory(config)``, called once for each protocol of a door that
keeps responses; None: it keeps nothing."""
RegistryRegister = Register[RegistryConfig, Callable[[Any], Registry]]
"""Offers a registry by ``factory(config)``, called once for a deployment."""
LauncherRegister = Register[
    LauncherConfig, Callable[[Any, LauncherContext], Launcher | AgentLauncher]
]
"""Offers a launcher by ``factory(config, context)``, called once for a run of a deployment.

A launcher whose options are an ``AgentLauncherConfig`` is an ``AgentLauncher``, any other one a
``Launcher``.
"""
EventBusRegister = Register[EventBusConfig, Callable[[Any], EventBus]]
"""Offers an event bus by ``factory(config)``, called once in each supervisor and front door."""
PlannerRegister = Register[PlannerConfig, Callable[[Any, PlannerContext], PlannerPolicy[Any]]]
"""Offers a planner by ``factory(config, context)``, called once for a deployment or a replay."""
TuningRegister = Register[TuningConfig, Callable[[Any, TuningContext], Tuning]]
"""Offers tuning by ``factory(config, context)``, called once for a run of a deployment."""
TrafficRegister = Register[TrafficConfig, Callable[[Any], Traffic]]
"""Offers traffic by ``factory(config)``, called once for a front-door process and configuration."""
DoorRegister = Register[DoorConfig, Door[Any, Any]]
"""Offers a door by a ``Door``: an instance, one for all front-door processes."""
ProtocolRegister = Register[ProtocolConfig, Protocol[Any, Any]]
"""Offers a protocol by a ``Protocol``: an instance, one for all doors."""
ParserRegister = Register[ParserConfig, Callable[[Any, ParserModel], Parser]]
"""Offers a parser by ``factory(config, model)``, called once for each model whose `tool_parser`
names it, in each front-door process."""
