"""What `commutator replay` runs: a file's workers in virtual time, and policies by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs
from attrs import frozen

from commutator.config.load import Loaded
from commutator.config.model import Config, RouterConfig
from commutator.errors import ConfigError
from commutator.observe.replay_report import Report, report
from commutator.plugins import Kind
from commutator.routing.contract import RoutingPolicy
from commutator.routing.disagg import DisaggPolicy
from commutator.routing.replay import DoesNotFitError, replay
from commutator.routing.replay_prefill import ReplayDisagg
from commutator.routing.trace import TraceRequest
from commutator.routing.virtual_worker import VirtualWorker
from commutator.types import Role

__all__ = ["AGGREGATED", "Replays", "Targets"]

_RouterKind = Kind[Callable[[Any], RoutingPolicy]]
_DisaggKind = Kind[Callable[[Any], DisaggPolicy]]

AGGREGATED = "aggregated"
"""Stands among the policies for: the same workers, and each does everything."""


@frozen
class Targets:
    """What makes a request a good one, in seconds."""

    ttft_s: float
    itl_s: float


@frozen
class Replays:
    """One file, to be run under several policies."""

    loaded: Loaded
    file: str
    trace_file: str
    targets: Targets
    workers: int | None = None
    """Instead of the replicas of the file's only entry."""
    seed: int = 0

    @property
    def config(self) -> Config:
        return self.loaded.config

    def routers(self, written: str, option: str) -> list[str]:
        """The routing policies that ``option`` lists. Raises ConfigError if one cannot be run."""
        return [self._router_kind(name, option).name for name in _split(written)]

    def disaggregations(self, written: str, option: str) -> list[str]:
        """The same for policies for prefill elsewhere, of which one may be ``AGGREGATED``."""
        return [
            name if name == AGGREGATED else self._disagg_kind(name, option).name
            for name in _split(written)
        ]

    def by_router(self, name: str, trace: Sequence[TraceRequest]) -> Report:
        """Run under this routing policy, and the file's own `disaggregation`."""
        disagg = self.config.disaggregation
        return self._run(name, trace, name, None if disagg is None else disagg.kind)

    def by_disaggregation(self, name: str, trace: Sequence[TraceRequest]) -> Report:
        """Run under this policy for prefill elsewhere, and the file's own `router`."""
        disagg = None if name == AGGREGATED else name
        return self._run(name, trace, self.config.router.kind, disagg)

    def _run(
        self, name: str, trace: Sequence[TraceRequest], router: str, disagg: str | None
    ) -> Report:
        policy = self._router(self.config.router, router)
        apart = None if disagg is None else self._disagg(disagg)
        try:
            fleet = self._fleet(roles=apart is not None)
            outcome = replay(trace, fleet, policy, apart, seed=self.seed)
        except DoesNotFitError as error:
            where = f"line {error.request.line}" if error.request.line else "--chats"
            todo = f"give the workers of {self.file} more KV memory, or leave the request out"
            raise ConfigError([f"{where}: {error}; {todo}"], self.trace_file) from error
        except ValueError as error:  # the engines' sizes do not fit the trace
            raise ConfigError([f"engines: {error}"], self.file) from error
        return report(name, outcome, self.targets.ttft_s, self.targets.itl_s)

    def _fleet(self, *, roles: bool) -> list[VirtualWorker]:
        engines = self.config.engines
        entries = [entry for entry in engines if entry.model == engines[0].model]
        if self.workers is not None and len(entries) > 1:
            problem = f"the file has {len(entries)} entries; --set engines[N].replicas of one"
            raise ConfigError([problem], "--workers")
        fleet: list[VirtualWorker] = []
        for number, entry in enumerate(entries):
            connector = self.loaded.host.engines.kinds[entry.kind].thing
            role = Role(entry.role) if roles else Role.BOTH
            for _ in range(self.workers or entry.replicas):
                engine = connector.virtual(entry)
                if engine is None:
                    words = f'"{entry.kind}" has no model in virtual time; use sim'
                    raise ConfigError([f"engines[{number}].kind: {words}"], self.file)
                fleet.append(VirtualWorker.make(f"worker-{len(fleet):03}", engine, role))
        return fleet

    def _disagg(self, name: str) -> ReplayDisagg:
        kind, config = self._disagg_kind(name, "disaggregation"), self.config.disaggregation
        assert config is not None
        router = self._router(config.router, config.router.kind)
        busy = config.router.busy
        if name != config.kind:
            config = kind.config_class(kind=name, router=config.router)
        return ReplayDisagg(kind.thing(config), router, busy)

    def _router(self, config: RouterConfig, name: str) -> RoutingPolicy:
        """The file's own policy with its options, or another with its defaults."""
        if name == config.kind:
            return self.loaded.host.routers.kinds[name].thing(config)
        kind = self._router_kind(name, "router")
        return kind.thing(kind.config_class(kind=name, block_size=config.block_size))

    def _router_kind(self, name: str, option: str) -> _RouterKind:
        kinds = self.loaded.host.routers.kinds
        kind = kinds.get(name)
        if kind is None:
            problem = f'no routing policy "{name}"; there are {", ".join(sorted(kinds))}'
            raise ConfigError([problem], option)
        if name != self.config.router.kind:
            _check_defaults(kind, option, "make it the router of the file")
        return kind

    def _disagg_kind(self, name: str, option: str) -> _DisaggKind:
        config, kinds = self.config.disaggregation, self.loaded.host.disaggs.kinds
        if config is None or all(entry.role != "prefill" for entry in self.config.engines):
            problem = "prefill elsewhere needs `disaggregation`, and workers of `role: prefill`"
            raise ConfigError([problem], self.file)
        kind = kinds.get(name)
        if kind is None:
            known = ", ".join(sorted(kinds))
            problem = f'no disaggregation policy "{name}"; there are {AGGREGATED}, {known}'
            raise ConfigError([problem], option)
        if name != config.kind:
            _check_defaults(kind, option, "make it the disaggregation of the file")
        return kind


def _split(written: str) -> list[str]:
    return [name.strip() for name in written.split(",")]


def _check_defaults(kind: Kind[Any], option: str, todo: str) -> None:
    """Raises ConfigError for a policy whose options are not all known without the file."""
    fields = attrs.fields(kind.config_class)
    needed = [one.name for one in fields if one.default is attrs.NOTHING and one.name != "kind"]
    if needed:
        raise ConfigError([f"{kind.name} needs options ({', '.join(needed)}): {todo}"], option)
