"""Finds plugins by entry point, checks them against the contract, and calls their hooks."""

from __future__ import annotations

import inspect
import logging
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Generic, Literal, TypeVar

import pluggy
from attrs import define, field, frozen

from commutator import hookspecs
from commutator.config.model import (
    DisaggregationConfig,
    EngineConfig,
    EvictionConfig,
    RouterConfig,
    TierConfig,
)
from commutator.engine.contract import EngineConnector
from commutator.errors import PluginError
from commutator.kv.eviction import EvictionPolicy
from commutator.routing.contract import Decision, RoutingPolicy
from commutator.routing.disagg import DisaggPolicy
from commutator.routing.stages import RouteStage
from commutator.types import RequestOutcome, RequestSummary, WorkerRecord

__all__ = [
    "DisaggRegister",
    "EngineRegister",
    "EvictionRegister",
    "Installed",
    "Kind",
    "Offer",
    "PluginHost",
    "RouterRegister",
    "Stability",
    "StageRegister",
    "TierRegister",
    "load_plugins",
]

log = logging.getLogger(__name__)

GROUP = "commutator"
Stability = Literal["alpha", "beta", "stable"]
_STABILITIES = ("alpha", "beta", "stable")
ThingT = TypeVar("ThingT")


@frozen
class Kind(Generic[ThingT]):
    """One registered engine, routing policy or storage tier."""

    name: str
    config_class: type[Any]
    thing: ThingT
    """An engine's connector; a policy's or tier's factory."""
    stability: Stability
    distribution: str


@frozen
class Offer:
    """What one plugin registered under one seam."""

    seam: str
    kind: str
    stability: Stability

    def __str__(self) -> str:
        return f"{self.seam} {self.kind} ({self.stability})"


@define
class Installed:
    """One entry point, loaded or not."""

    name: str
    distribution: str
    version: str
    hooks: tuple[str, ...] = ()
    kinds: list[Offer] = field(factory=list)
    problem: str | None = None
    """Why it is not loaded."""


class Register(Generic[ThingT]):
    """The callable that a ``*_register`` hook is handed; checks and keeps what is offered."""

    def __init__(
        self, seam: str, config_base: type[Any], check: Callable[[Any], str | None]
    ) -> None:
        self.seam = seam
        self.kinds: dict[str, Kind[ThingT]] = {}
        self._config_base = config_base
        self._check = check
        self._offering: Installed | None = None

    def offered_by(self, plugin: Installed) -> Register[ThingT]:
        """This register, with ``plugin`` blamed for what is registered next."""
        self._offering = plugin
        return self

    def __call__(
        self,
        kind: str,
        config_class: type[Any],
        thing: ThingT,
        stability: Stability = "alpha",
    ) -> None:
        """Offer ``kind``. Raises PluginError when the offer breaks the contract."""
        plugin = self._offering
        assert plugin is not None
        what = f'{self.seam} "{kind}"'

        def refuse(message: str) -> PluginError:
            return PluginError(plugin.distribution, f"{what}: {message}")

        if not issubclass(config_class, self._config_base):
            raise refuse(f"its config class must subclass {self._config_base.__name__}")
        if problem := self._check(thing):
            raise refuse(problem)
        if stability not in _STABILITIES:
            raise refuse(f"stability must be one of {', '.join(_STABILITIES)}, not {stability!r}")
        if (other := self.kinds.get(kind)) is not None:
            raise refuse(
                f"already registered by {other.distribution}; block one of the two plugins"
            )
        self.kinds[kind] = Kind(kind, config_class, thing, stability, plugin.distribution)
        plugin.kinds.append(Offer(self.seam, kind, stability))


class StageRegister(Register[type[RouteStage]]):
    """For ``route_stage_register``: a stage's class is its configuration, too."""

    def __call__(  # type: ignore[override]
        self, kind: str, stage_class: type[RouteStage], stability: Stability = "alpha"
    ) -> None:
        """Offer ``kind``. Raises PluginError when the offer breaks the contract."""
        super().__call__(kind, stage_class, stage_class, stability)


EngineRegister = Register[EngineConnector[Any]]
RouterRegister = Register[Callable[[Any], RoutingPolicy]]
DisaggRegister = Register[Callable[[Any], DisaggPolicy]]
TierRegister = Register[Callable[[Any], Any]]
EvictionRegister = Register[Callable[[Any, int], EvictionPolicy]]


def _must_be_connector(thing: Any) -> str | None:
    if isinstance(thing, type):
        return f"expected an instance, got the class {thing.__name__}: write {thing.__name__}()"
    if not isinstance(thing, EngineConnector):
        return f"expected an EngineConnector, got {type(thing).__name__}"
    return None


def _must_be_factory(thing: Any) -> str | None:
    if callable(thing):
        return None
    return f"expected a factory that takes the configuration, got {type(thing).__name__}"


def _must_be_concrete(thing: Any) -> str | None:
    if missing := sorted(getattr(thing, "__abstractmethods__", ())):
        return f"{thing.__name__} does not define {', '.join(missing)}"
    return None


class PluginHost:
    """Typed facade over pluggy: the registered kinds, and one method for each observing hook."""

    def __init__(self) -> None:
        self.engines = EngineRegister("engine", EngineConfig, _must_be_connector)
        self.routers = RouterRegister("router", RouterConfig, _must_be_factory)
        self.disaggs = DisaggRegister("disaggregation", DisaggregationConfig, _must_be_factory)
        self.stages = StageRegister("stage", RouteStage, _must_be_concrete)
        self.tiers = TierRegister("tier", TierConfig, _must_be_factory)
        self.evictions = EvictionRegister("eviction", EvictionConfig, _must_be_factory)
        self.installed: list[Installed] = []
        self._pluggy = pluggy.PluginManager(hookspecs.PROJECT)
        self._pluggy.add_hookspecs(hookspecs)
        if os.environ.get("COMMUTATOR_TRACE_HOOKS") == "1":
            self._pluggy.add_hookcall_monitoring(_trace_before, _trace_after)

    def add(self, plugin: object, installed: Installed) -> None:
        """Load one plugin and collect what it registers.

        Raises PluginError, naming its distribution, when it breaks the contract. Meant to end the
        start: what the plugin had registered before the mistake is not taken back.
        """
        self._check_shape(plugin, installed)
        try:
            self._pluggy.register(plugin, installed.name)
            self._pluggy.check_pending()
        except (pluggy.PluginValidationError, ValueError) as error:
            raise PluginError(installed.distribution, str(error)) from error
        callers = self._pluggy.get_hookcallers(plugin) or []
        installed.hooks = tuple(sorted(caller.name for caller in callers))
        self.installed.append(installed)
        seams: tuple[tuple[Register[Any], str], ...] = (
            (self.engines, "engine_register"),
            (self.routers, "router_register"),
            (self.disaggs, "disagg_register"),
            (self.stages, "route_stage_register"),
            (self.tiers, "tier_register"),
            (self.evictions, "eviction_register"),
        )
        for seam, hook in seams:
            if hook in installed.hooks:
                caller = self._pluggy.subset_hook_caller(
                    hook, [other for other in self._pluggy.get_plugins() if other is not plugin]
                )
                caller(register=seam.offered_by(installed))

    def worker_up(self, worker: WorkerRecord) -> None:
        self._observe("worker_up", worker=worker)

    def worker_down(self, worker: WorkerRecord, reason: str) -> None:
        self._observe("worker_down", worker=worker, reason=reason)

    def request_received(self, request: RequestSummary) -> None:
        self._observe("request_received", request=request)

    def request_routed(self, request: RequestSummary, decision: Decision) -> None:
        self._observe("request_routed", request=request, decision=decision)

    def request_first_token(self, request: RequestSummary, worker_id: str, ttft_s: float) -> None:
        self._observe("request_first_token", request=request, worker_id=worker_id, ttft_s=ttft_s)

    def request_migrated(
        self,
        request: RequestSummary,
        from_worker: str,
        to_worker: str,
        reason: str,
        generated_tokens: int,
    ) -> None:
        self._observe(
            "request_migrated",
            request=request,
            from_worker=from_worker,
            to_worker=to_worker,
            reason=reason,
            generated_tokens=generated_tokens,
        )

    def request_finished(self, request: RequestSummary, outcome: RequestOutcome) -> None:
        self._observe("request_finished", request=request, outcome=outcome)

    def request_failed(self, request: RequestSummary, error: BaseException) -> None:
        self._observe("request_failed", request=request, error=error)

    def _observe(self, hook: str, **arguments: Any) -> None:
        caller: pluggy.HookCaller = getattr(self._pluggy.hook, hook)
        if not caller.get_hookimpls():
            return
        try:
            caller(**arguments)
        except Exception:
            log.exception("a plugin failed in %s; the request goes on", hook)

    def _check_shape(self, plugin: object, installed: Installed) -> None:
        if isinstance(plugin, type):
            raise PluginError(
                installed.distribution,
                f"entry point {installed.name} names the class {plugin.__name__}; "
                "name a module or an instance",
            )
        known = {name for name in vars(hookspecs) if not name.startswith("_")}
        for name, member in inspect.getmembers(plugin, callable):
            if hasattr(member, f"{hookspecs.PROJECT}_impl") and name not in known:
                raise PluginError(installed.distribution, f"unknown hook {name}")


def load_plugins(
    block: Iterable[str] = (), found: Iterable[EntryPoint] | None = None
) -> PluginHost:
    """Load every installed plugin but those in ``block``.

    A plugin that cannot be imported is reported and skipped: it only matters when a configuration
    asks for what it would have brought. One that breaks the contract raises PluginError.
    """
    host = PluginHost()
    blocked = set(block)
    discovered = entry_points(group=GROUP) if found is None else found
    for point in sorted(set(discovered), key=lambda point: point.name):
        dist = point.dist
        installed = Installed(
            name=point.name,
            distribution=dist.name if dist is not None else point.value,
            version=dist.version if dist is not None else "unknown",
        )
        if point.name in blocked:
            installed.problem = "blocked"
            host.installed.append(installed)
            continue
        try:
            plugin = point.load()
        except Exception as error:  # noqa: BLE001 - third-party code may raise anything
            installed.problem = f"cannot be imported: {type(error).__name__}: {error}"
            log.warning("plugin %s (%s) %s", point.name, installed.distribution, installed.problem)
            host.installed.append(installed)
            continue
        host.add(plugin, installed)
    return host


def _trace_before(
    hook: str, impls: Sequence[pluggy.HookImpl], arguments: Mapping[str, Any]
) -> None:
    del impls
    shown = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
    print(f"hook {hook}({shown[:300]})", file=sys.stderr)  # noqa: T201 - the trace is the purpose


def _trace_after(
    outcome: pluggy.Result[Any],
    hook: str,
    impls: Sequence[pluggy.HookImpl],
    arguments: Mapping[str, Any],
) -> None:
    del arguments
    who = ", ".join(impl.plugin_name for impl in impls) or "nobody"
    error = outcome.exception
    answer = f"raised {error!r}" if error is not None else repr(outcome.get_result())
    print(f"hook {hook} answered by {who}: {answer}", file=sys.stderr)  # noqa: T201
