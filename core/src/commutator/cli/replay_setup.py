"""What `commutator replay` runs: a file's workers in virtual time, and policies by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from attrs import frozen

from commutator.config.load import Loaded
from commutator.config.model import Config
from commutator.errors import ConfigError
from commutator.observe.replay_report import Report, report
from commutator.plugins import PluginHost
from commutator.routing.contract import RoutingPolicy
from commutator.routing.replay import replay
from commutator.routing.replay_prefill import ReplayDisagg
from commutator.routing.trace import TraceRequest
from commutator.routing.virtual_worker import VirtualWorker
from commutator.types import Role

__all__ = ["AGGREGATED", "Replays", "Targets"]

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
    targets: Targets
    workers: int | None = None
    """Instead of the replicas of the file's only entry."""
    seed: int = 0

    @property
    def config(self) -> Config:
        return self.loaded.config

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
        host = self.loaded.host
        policy = _router(host, self.config.router, router)
        apart = None if disagg is None else self._disagg(disagg)
        try:
            fleet = self._fleet(roles=apart is not None)
            outcome = replay(trace, fleet, policy, apart, seed=self.seed)
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
        config = self.config.disaggregation
        if config is None or all(entry.role != "prefill" for entry in self.config.engines):
            problem = "prefill elsewhere needs `disaggregation`, and workers of `role: prefill`"
            raise ConfigError([problem], self.file)
        kind = self.loaded.host.disaggs.kinds.get(name)
        if kind is None:
            known = ", ".join(sorted(self.loaded.host.disaggs.kinds))
            problem = f'no disaggregation policy "{name}"; there are {AGGREGATED}, {known}'
            raise ConfigError([problem], "--disagg")
        if name != config.kind:
            config = kind.config_class(kind=name, router=config.router)
        router = _router(self.loaded.host, config.router, config.router.kind)
        return ReplayDisagg(kind.thing(config), router, config.router.busy)


def _router(host: PluginHost, router: Any, name: str) -> RoutingPolicy:
    """The file's own policy with its options, or another with its defaults."""
    kind = host.routers.kinds.get(name)
    if kind is None:
        known = ", ".join(sorted(host.routers.kinds))
        raise ConfigError([f'no routing policy "{name}"; there are {known}'], "--compare")
    if name != router.kind:
        router = kind.config_class(kind=name, block_size=router.block_size)
    return kind.thing(router)
