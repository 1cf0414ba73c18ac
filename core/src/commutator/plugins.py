"""Finds plugins by entry point, checks them against the contract, and calls their hooks."""

from __future__ import annotations

import inspect
import logging
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, wraps
from importlib.metadata import Distribution, EntryPoint, entry_points
from typing import Any

import pluggy
from attrs import define, evolve, frozen
from packaging.requirements import Requirement
from packaging.version import Version

from commutator import __version__, hookspecs
from commutator.contract import CONTRACT_CHANGES, CONTRACT_VERSION, changes_since
from commutator.contract.disagg import DisaggPolicy, DisaggregationConfig
from commutator.contract.door import Door, DoorConfig
from commutator.contract.engine import EngineConfig, EngineConnector
from commutator.contract.event_bus import EventBus, EventBusConfig
from commutator.contract.eviction import EvictionConfig, EvictionPolicy
from commutator.contract.fairness import FairnessConfig, FairnessPolicy
from commutator.contract.launcher import AgentLauncher, Launcher, LauncherConfig, LauncherContext
from commutator.contract.limiter import Limiter, LimiterConfig
from commutator.contract.observer import (
    OBSERVING_HOOKS,
    PROMPT_HOOKS,
    Observer,
    ObserverConfig,
    PromptObserver,
    PromptObserverConfig,
)
from commutator.contract.operations import Operations, OperationsConfig, OperationsContext
from commutator.contract.parser import Parser, ParserConfig, ParserModel
from commutator.contract.planner import PlannerConfig, PlannerContext, PlannerPolicy, TuningConfig
from commutator.contract.principal import Authenticator, AuthenticatorConfig
from commutator.contract.protocol import Protocol, ProtocolConfig
from commutator.contract.registration import Catalog, Kind, Origin, Register, StageRegister
from commutator.contract.registry import Registry, RegistryConfig
from commutator.contract.response_store import ResponseStore, ResponseStoreConfig
from commutator.contract.routing import RouterConfig, RouteStage, RoutingPolicy
from commutator.contract.tier import StorageTier, TierConfig
from commutator.contract.traffic import Traffic, TrafficConfig
from commutator.contract.tuning import Tuning, TuningContext
from commutator.errors import PluginError
from commutator.hookspecs import PROJECT
from commutator.schema import nearest

log = logging.getLogger(__name__)

GROUP = "commutator"
_COMMANDS_ALONE = (
    "command_register belongs into a module of its own, which an entry point in the group "
    "commutator.commands names: it is imported whenever commands are listed, and only then"
)
BLOCKED_PLUGINS = "COMMUTATOR_BLOCKED_PLUGINS"
"""The environment variable by which the supervisor passes `plugins.block`, separated by commas."""
_ALL_HOOKS = (*OBSERVING_HOOKS, *PROMPT_HOOKS)
BUILTIN = EntryPoint("builtin", "commutator.builtin", GROUP)
"""The plugin that core itself brings; always installed."""


@define
class Installed:
    """One entry point, loaded or not."""

    name: str
    distribution: str
    version: str
    hooks: tuple[str, ...] = ()
    kinds: tuple[Kind[Any], ...] = ()
    problem: str | None = None
    """Why it is not loaded."""

    @property
    def origin(self) -> Origin:
        return Origin(plugin=self.name, distribution=self.distribution)


def _instance_of(base: type[Any], expected: str) -> Callable[[Any], str | None]:
    """The check of a catalog whose things are instances of ``base``."""

    def check(thing: Any) -> str | None:
        if isinstance(thing, type):
            name = thing.__name__
            return f"expected an instance, got the class {name}: write {name}()"
        if not isinstance(thing, base):
            return f"expected {expected}, got {type(thing).__name__}"
        return None

    return check


def _must_be_factory(thing: Any) -> str | None:
    if callable(thing):
        return None
    return f"expected a factory that takes the configuration, got {type(thing).__name__}"


def _must_be_concrete(thing: Any) -> str | None:
    if missing := sorted(getattr(thing, "__abstractmethods__", ())):
        return f"{thing.__name__} does not define {', '.join(missing)}"
    return None


@frozen
class _Listener:
    """One implementation of an observing hook."""

    plugin: str
    function: Callable[..., Any]
    argument_names: tuple[str, ...] | None = None
    """The names of the arguments that it takes; None: all."""
    reads_prompts: bool = False

    def call(self, arguments: dict[str, Any]) -> None:
        names = self.argument_names
        chosen = arguments if names is None else {name: arguments[name] for name in names}
        self.function(**chosen)


SEAMS: Sequence[tuple[str, str, type[Any], Callable[[Any], str | None]]] = (
    ("engine", "engines", EngineConfig, _instance_of(EngineConnector, "an EngineConnector")),
    ("router", "routers", RouterConfig, _must_be_factory),
    ("route_stage", "stages", RouteStage, _must_be_concrete),
    ("disagg", "disaggs", DisaggregationConfig, _must_be_factory),
    ("fairness", "fairness", FairnessConfig, _must_be_factory),
    ("tier", "tiers", TierConfig, _must_be_factory),
    ("eviction", "evictions", EvictionConfig, _must_be_factory),
    ("observer", "observers", ObserverConfig, _must_be_factory),
    ("authenticator", "authenticators", AuthenticatorConfig, _must_be_factory),
    ("limiter", "limiters", LimiterConfig, _must_be_factory),
    ("door", "doors", DoorConfig, _instance_of(Door, "a Door")),
    ("protocol", "protocols", ProtocolConfig, _instance_of(Protocol, "a Protocol")),
    ("response_store", "response_stores", ResponseStoreConfig, _must_be_factory),
    ("parser", "parsers", ParserConfig, _must_be_factory),
    ("operations", "operations", OperationsConfig, _must_be_factory),
    ("registry", "registries", RegistryConfig, _must_be_factory),
    ("launcher", "launchers", LauncherConfig, _must_be_factory),
    ("event_bus", "event_buses", EventBusConfig, _must_be_factory),
    ("planner", "planners", PlannerConfig, _must_be_factory),
    ("tuning", "tunings", TuningConfig, _must_be_factory),
    ("traffic", "traffics", TrafficConfig, _must_be_factory),
)
"""For each hook NAME_register: NAME, the catalog of ``PluginHost`` that it fills, and the catalog's
``Catalog.config_base`` and ``check``."""
_SEAM = {"disagg": "disaggregation", "route_stage": "stage"}
"""``Catalog.seam`` of a hook, where it is not its NAME."""


class PluginHost(PromptObserver):
    """The loaded plugins: the kinds that they registered, and an observer that calls them."""

    engines: Catalog[EngineConnector[Any]]
    routers: Catalog[Callable[[Any], RoutingPolicy]]
    stages: Catalog[type[RouteStage]]
    disaggs: Catalog[Callable[[Any], DisaggPolicy]]
    fairness: Catalog[Callable[[Any], FairnessPolicy]]
    tiers: Catalog[Callable[[Any], StorageTier]]
    evictions: Catalog[Callable[[Any, int], EvictionPolicy]]
    observers: Catalog[Callable[[Any], Observer]]
    authenticators: Catalog[Callable[[Any], Authenticator]]
    limiters: Catalog[Callable[[Any], Limiter]]
    doors: Catalog[Door[Any, Any]]
    protocols: Catalog[Protocol[Any, Any]]
    response_stores: Catalog[Callable[[Any], ResponseStore | None]]
    parsers: Catalog[Callable[[Any, ParserModel], Parser]]
    operations: Catalog[Callable[[Any, OperationsContext], Operations]]
    registries: Catalog[Callable[[Any], Registry]]
    launchers: Catalog[Callable[[Any, LauncherContext], Launcher | AgentLauncher]]
    event_buses: Catalog[Callable[[Any], EventBus]]
    planners: Catalog[Callable[[Any, PlannerContext], PlannerPolicy[Any]]]
    tunings: Catalog[Callable[[Any, TuningContext], Tuning]]
    traffics: Catalog[Callable[[Any], Traffic]]

    def __init__(self) -> None:
        self._catalogs: dict[str, Catalog[Any]] = {}
        """By the hook that fills it."""
        for hook, attribute, config_base, check in SEAMS:
            seam = _SEAM.get(hook, hook.replace("_", " "))
            catalog: Catalog[Any] = Catalog(seam, config_base, check)
            self._catalogs[f"{hook}_register"] = catalog
            setattr(self, attribute, catalog)
        self.installed: list[Installed] = []
        self._pluggy = pluggy.PluginManager(PROJECT)
        self._pluggy.add_hookspecs(hookspecs)
        self._pluggy.add_hookspecs(Observer)
        self._trace = os.environ.get("COMMUTATOR_TRACE_HOOKS") == "1"
        self._listeners: dict[str, list[_Listener]] = {}
        self._observers: list[tuple[str, Observer]] = []
        self._started: list[tuple[str, Observer]] = []

    def add(self, plugin: object, installed: Installed) -> None:
        """Load one plugin and collect what it registers.

        Raises PluginError, naming its distribution, when it breaks the contract or raises. Nothing
        of it is loaded then.
        """
        self._check_shape(plugin, installed)
        try:
            self._pluggy.register(plugin, installed.name)
            self._pluggy.check_pending()
            self._register(plugin, installed)
        except Exception as error:
            for catalog in self._catalogs.values():
                catalog.remove(installed.origin)
            if self._pluggy.is_registered(plugin):
                self._pluggy.unregister(plugin)
            if isinstance(error, PluginError):
                raise
            text = str(error)
            if not isinstance(error, pluggy.PluginValidationError):
                text = f"{type(error).__name__}: {error}"
            raise PluginError(installed.distribution, text) from error
        self.installed.append(installed)

    def _register(self, plugin: object, installed: Installed) -> None:
        origin = installed.origin
        mine: dict[str, _Listener] = {}
        for caller in self._pluggy.get_hookcallers(plugin) or []:
            (impl,) = (impl for impl in caller.get_hookimpls() if impl.plugin is plugin)
            if impl.wrapper or impl.hookwrapper:
                raise PluginError(installed.distribution, f"{caller.name}: hooks have no wrappers")
            mine[caller.name] = _Listener(installed.name, impl.function, impl.argnames)
        if "command_register" in mine:
            raise PluginError(installed.distribution, _COMMANDS_ALONE)
        for hook, catalog in self._catalogs.items():
            if hook not in mine:
                continue
            register = StageRegister if catalog is self.stages else Register
            try:
                mine[hook].call({"register": register(catalog, origin)})
            except PluginError:
                raise
            except Exception as error:
                text = f"{hook} raised {type(error).__name__}: {error}"
                raise PluginError(installed.distribution, text) from error
        for hook in mine.keys() - self._catalogs.keys():
            self._listen(hook, mine[hook])
        installed.hooks = tuple(sorted(mine))
        installed.kinds = tuple(
            kind
            for catalog in self._catalogs.values()
            for kind in catalog.kinds.values()
            if kind.origin == origin
        )

    def add_observer(self, name: str, observer: Observer, *, reads_prompts: bool = False) -> None:
        """Call ``observer`` from now on; ``name`` is its name in the log.

        ``start`` and ``stop`` of the host start and stop it. Hooks that it does not override cost
        nothing. ``reads_prompts``: whether people allowed a ``PromptObserver`` to read prompts.
        """
        self._observers.append((name, observer))
        for hook in _ALL_HOOKS if reads_prompts else OBSERVING_HOOKS:
            if getattr(type(observer), hook) is not getattr(PromptObserver, hook):
                function = getattr(observer, hook)
                self._listen(hook, _Listener(name, function, reads_prompts=reads_prompts))

    def remove_observer(self, observer: Observer) -> None:
        """Call ``observer`` no more. Only for one that was added after ``start``."""
        self._observers = [one for one in self._observers if one[1] is not observer]
        for hook in _ALL_HOOKS:
            listeners = self._listeners.get(hook, [])
            left = [
                one for one in listeners if getattr(one.function, "__self__", None) is not observer
            ]
            if left:
                self._listeners[hook] = left
            else:  # a hook without listeners costs nothing
                self._listeners.pop(hook, None)

    async def start(self, configs: Iterable[ObserverConfig] = ()) -> None:
        """Add the observers of a configuration, and start all in the order of adding.

        Raises PluginError when one cannot start.
        """
        for config in configs:
            observer = self.observers.kinds[config.kind].thing(config)
            allowed = False
            if isinstance(observer, PromptObserver):
                if not isinstance(config, PromptObserverConfig):
                    text = "it reads prompts, so its options must subclass PromptObserverConfig"
                    raise PluginError(config.kind, text)
                allowed = config.prompts
            self.add_observer(config.kind, observer, reads_prompts=allowed)
        for name, observer in self._observers:
            try:
                await observer.start()
            except Exception as error:
                text = f"observer cannot start: {type(error).__name__}: {error}"
                raise PluginError(name, text) from error
            self._started.append((name, observer))

    async def stop(self) -> None:
        """Stop every started observer, the last one first. Exceptions are logged."""
        while self._started:
            name, observer = self._started.pop()
            try:
                await observer.stop()
            except Exception:
                log.exception("observer %s failed to stop", name)

    def _listen(self, hook: str, listener: _Listener) -> None:
        self._listeners.setdefault(hook, []).append(listener)

    def _observe(self, hook: str, arguments: dict[str, Any]) -> None:
        """Call every listener, also after one raised."""
        for listener in self._listeners.get(hook, ()):
            told = arguments
            if hook == "request_answered" and not listener.reads_prompts:
                told = {"answered": evolve(arguments["answered"], body=b"")}
            try:
                listener.call(told)
            except Exception:
                log.exception("plugin %s failed in %s", listener.plugin, hook)
            if self._trace:
                _trace(hook, listener.plugin, arguments)

    def _check_shape(self, plugin: object, installed: Installed) -> None:
        if isinstance(plugin, type):
            raise PluginError(
                installed.distribution,
                f"entry point {installed.name} names the class {plugin.__name__}; "
                "name a module or an instance",
            )
        known = ["command_register", *self._catalogs, *OBSERVING_HOOKS]
        for name, member in inspect.getmembers(plugin, callable):
            if hasattr(member, f"{PROJECT}_impl") and name not in known:
                hint = nearest(name, known).replace("known keys", "known hooks")
                raise PluginError(installed.distribution, f"unknown hook {name}; {hint}")


def _observing(hook: str) -> Callable[..., None]:
    """The method of ``PluginHost`` that passes an observing hook on to its listeners."""
    method = getattr(PromptObserver, hook)
    _, *names = inspect.signature(method).parameters

    @wraps(method)
    def observe(host: PluginHost, *arguments: Any, **named: Any) -> None:
        if hook not in host._listeners:  # noqa: SLF001
            return
        host._observe(hook, dict(zip(names, arguments, strict=False)) | named)  # noqa: SLF001

    return observe


for _hook in OBSERVING_HOOKS:
    hookspecs.hookspec(getattr(Observer, _hook))
for _hook in _ALL_HOOKS:
    setattr(PluginHost, _hook, _observing(_hook))


def load_plugins(
    block: Iterable[str] = (), found: Iterable[EntryPoint] | None = None
) -> PluginHost:
    """Load core's plugin and every installed one but those in ``block``.

    A plugin that cannot be imported, was built for another contract or breaks this one is skipped
    with a warning; ``Installed.problem`` is the reason. A configuration that names one of its kinds
    is refused.
    """
    host = PluginHost()
    blocked = set(block)
    if found is None:
        found = entry_points(group=GROUP)
    for point in sorted({*found, BUILTIN}, key=lambda point: point.name):
        installed = describe(point)
        try:
            if point.name in blocked:
                installed.problem = "blocked"
            else:
                check_contract(point.dist, installed)
                host.add(_import(point, installed), installed)
                continue
        except PluginError as error:
            installed.problem = error.message
            name, problem = installed.distribution, error.message
            log.warning("plugin %s (%s) skipped: %s", point.name, name, problem)
        host.installed.append(installed)
    return host


@cache
def installed_plugins(block: tuple[str, ...] = ()) -> PluginHost:
    """The installed plugins, without those in ``block`` and in the environment. For engines.

    The first call loads them.
    """
    return load_plugins([*block, *os.environ.get(BLOCKED_PLUGINS, "").split(",")])


@cache
def installed_versions() -> Mapping[str, str]:
    """Versions of the distributions that have plugins, and of Commutator; imports none of them."""
    described = [describe(point) for point in (BUILTIN, *entry_points(group=GROUP))]
    return {
        one.distribution: one.version for one in sorted(described, key=lambda one: one.distribution)
    }


def describe(point: EntryPoint) -> Installed:
    """The entry point, not loaded yet."""
    dist = point.dist
    if point is BUILTIN:
        return Installed(name=point.name, distribution=PROJECT, version=__version__)
    if dist is None:
        return Installed(name=point.name, distribution=point.value, version="unknown")
    return Installed(name=point.name, distribution=dist.name, version=dist.version)


def _import(point: EntryPoint, installed: Installed) -> object:
    try:
        return point.load()
    except Exception as error:
        text = f"cannot be imported: {type(error).__name__}: {error}"
        if isinstance(error, ModuleNotFoundError) and (error.name or "").startswith(f"{PROJECT}_"):
            text += f"; pip install {str(error.name).split('.')[0].replace('_', '-')}"
        raise PluginError(installed.distribution, text) from error


def check_contract(dist: Distribution | None, installed: Installed) -> None:
    """Raise PluginError when the distribution requires another version of Commutator."""
    ours = Version(__version__)
    for line in () if dist is None else dist.requires or ():
        if not line.startswith(PROJECT):
            continue
        wanted = Requirement(line)
        applies = wanted.marker is None or wanted.marker.evaluate({"extra": ""})
        if wanted.name != PROJECT or not applies:
            continue
        if wanted.specifier.contains(ours, prereleases=True):
            continue
        newer = any(
            one.operator in {">", ">=", "==", "~="} and Version(one.version) > ours
            for one in wanted.specifier
        )
        contract = ".".join(map(str, CONTRACT_VERSION))
        what = "commutator" if newer else installed.distribution
        changed = "" if newer else changes_since(_last_allowed(wanted), CONTRACT_VERSION)
        raise PluginError(
            installed.distribution,
            f"built for {'a newer' if newer else 'an older'} contract (commutator "
            f"{wanted.specifier}) than {contract}, that of commutator {ours}; upgrade {what}"
            + (f"; what changed since: {changed}" if changed else ""),
        )


def _last_allowed(wanted: Requirement) -> tuple[int, int]:
    """The newest contract version of which we know changes, or ours, that the requirement takes.

    (0, 0) when it takes none of them, nor the one before the first.
    """
    major, minor = min(CONTRACT_CHANGES)
    known = [(major, minor - 1), *CONTRACT_CHANGES]
    taken = [
        version
        for version in known
        if wanted.specifier.contains(f"{version[0]}.{version[1]}.0", prereleases=True)
    ]
    return max(taken, default=(0, 0))


def _trace(hook: str, plugin: str, arguments: Mapping[str, Any]) -> None:
    shown = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
    print(f"{plugin}: {hook}({shown[:300]})", file=sys.stderr)  # noqa: T201 - what was asked for
