"""What `commutator replay` runs: the workers of a file in virtual time, under named policies."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import attrs
from attrs import frozen

from commutator import DisaggPolicy, EngineConfig, RouterConfig, RoutingPolicy
from commutator.config.load import Loaded
from commutator.config.model import Config
from commutator.contract.planner import PlannerTargets
from commutator.contract.registration import Kind
from commutator.contract.worker import Role
from commutator.errors import ConfigError
from commutator_replay.fleet import VirtualWorker
from commutator_replay.prefill import ReplayDisagg
from commutator_replay.replay import DoesNotFitError, Outcome, replay
from commutator_replay.report import Report, report
from commutator_replay.trace import TraceRequest
from commutator_replay.virtual import VirtualEngine, virtual_engine_factory
from commutator_replay.workforce import Planning
from commutator_slo.config import SloConfig

MakeT = TypeVar("MakeT")
_RouterKind = Kind[Callable[[Any], RoutingPolicy]]
_DisaggKind = Kind[Callable[[Any], DisaggPolicy]]

AGGREGATED = "aggregated"
"""The name, among disaggregation policies, of the same workers without roles."""


@frozen
class Replays:
    """Runs one file under several policies."""

    loaded: Loaded
    file: str
    trace_file: str
    targets: PlannerTargets
    """Limits that a request must meet to count for goodput."""
    workers: int | None = None
    """Instead of the replicas of the file's only entry."""
    seed: int = 0
    on_run: Callable[[str], None] = lambda _: None
    """Called after each run with a line that says how long it took."""

    @property
    def config(self) -> Config:
        return self.loaded.config

    def routers(self, written: str, option: str) -> list[str]:
        """The routing policies that ``option`` lists. Raises ConfigError if one cannot be run."""
        return [self._router_kind(name, option).name for name in _split(written)]

    def disaggregations(self, written: str, option: str) -> list[str]:
        """The same for disaggregation policies, of which one may be ``AGGREGATED``."""
        return [
            name if name == AGGREGATED else self._disagg_kind(name, option).name
            for name in _split(written)
        ]

    def by_router(self, name: str, trace: Sequence[TraceRequest]) -> Report:
        """Run under this routing policy, and the file's own `disaggregation`."""
        return self._report(name, self.outcome(trace, router=name))

    def by_disaggregation(self, name: str, trace: Sequence[TraceRequest]) -> Report:
        """Run under this disaggregation policy, and the file's own `router`."""
        return self._report(name, self.outcome(trace, disagg=name))

    def _report(self, name: str, outcome: Outcome) -> Report:
        return report(name, outcome, self.targets)

    def outcome(
        self,
        trace: Sequence[TraceRequest],
        *,
        router: str | None = None,
        disagg: str | None = None,
        planning: Planning | None = None,
        fleet: Sequence[VirtualWorker] | None = None,
    ) -> Outcome:
        """Run with the file's own policies and workers, as far as no others are given.

        ``planning``: a planner, which begins with the workers. Raises ConfigError where the file
        and the trace do not fit.
        """
        config = self.config
        router = config.router.kind if router is None else router
        if disagg is None:
            own = config.disaggregation
            disagg = AGGREGATED if own is None else own.kind
        policy = self._router(config.router, router)
        disaggregation = None if disagg == AGGREGATED else self._disagg(disagg)
        try:
            if fleet is None:
                fleet = self.fleet(roles=disaggregation is not None)
            started_s = time.perf_counter()
            outcome = replay(
                trace,
                fleet,
                policy,
                disaggregation,
                busy=config.router.busy,
                planning=planning,
                seed=self.seed,
            )
        except DoesNotFitError as error:
            where = f"line {error.request.line}" if error.request.line else "--chats"
            todo = f"give the workers of {self.file} more KV memory, or leave the request out"
            raise ConfigError([f"{where}: {error}; {todo}"], self.trace_file) from error
        except ValueError as error:  # the engines' sizes do not fit the trace
            raise ConfigError([f"engines: {error}"], self.file) from error
        taken_s, requests = time.perf_counter() - started_s, len(outcome.finished)
        of_each_ms = 1e3 / max(1, requests)
        self.on_run(
            f"{router}: {requests} requests over {len(fleet)} workers in {taken_s:.1f} s; each "
            f"took {taken_s * of_each_ms:.3f} ms, and of that the choice of its worker "
            f"{outcome.routing_s * of_each_ms:.3f} ms"
        )
        return outcome

    def fleet(self, *, roles: bool) -> list[VirtualWorker]:
        """The file's workers; without ``roles``, all are of the role both."""
        return _named(self.makers(roles=roles))

    def fleet_of(self, replicas: Mapping[Role, int]) -> list[VirtualWorker]:
        """As many of the file's workers of each role."""
        makers = self.makers_by_role()
        return _named(
            [(role, makers[role]) for role, number in replicas.items() for _ in range(number)]
        )

    def makers_by_role(self) -> dict[Role, Callable[[], VirtualEngine]]:
        """What makes a worker of each role that the file has."""
        makers: dict[Role, Callable[[], VirtualEngine]] = {}
        for role, make in self.makers(roles=self.config.disaggregation is not None):
            makers.setdefault(role, make)
        return makers

    def makers(self, *, roles: bool) -> list[tuple[Role, Callable[[], VirtualEngine]]]:
        """The role of each of the file's workers, and what makes one."""
        engines = self.config.engines
        entries = [entry for entry in engines if entry.model == engines[0].model]
        if self.workers is not None and len(entries) > 1:
            problem = f"the file has {len(entries)} entries; --set engines[N].replicas of one"
            raise ConfigError([problem], "--workers")
        made: list[tuple[Role, Callable[[], VirtualEngine]]] = []
        for number, entry in enumerate(entries):
            role = Role(entry.role) if roles else Role.BOTH
            make = self._maker(entry)
            if make is None:
                problem = f'"{entry.kind}" has no model in virtual time; use sim'
                if self.config.planner is not None:
                    problem += ", or give its speed in planner.performance"
                raise ConfigError([f"engines[{number}].kind: {problem}"], self.file)
            made += [(role, make)] * (self.workers or entry.replicas)
        return made

    def _maker(self, entry: EngineConfig) -> Callable[[], VirtualEngine] | None:
        """What makes a worker of the entry; one without a model is a `sim` of its speed."""
        if (make := virtual_engine_factory(entry.kind)) is not None:
            return partial(make, entry)
        planner, sim = self.config.planner, self.loaded.host.engines.kinds.get("sim")
        make = virtual_engine_factory("sim")
        speed = planner.performance if isinstance(planner, SloConfig) else None
        if speed is None or sim is None or make is None:
            return None
        block_size = self.config.router.block_size
        modelled = sim.config_class(
            kind="sim",
            prefill_tokens_per_s=speed.prefill_tokens_per_s,
            decode_base_s=speed.step_s,
            decode_per_request_s=speed.step_request_s,
            max_running_requests=speed.max_running,
            max_tokens_per_step=max(speed.max_step_tokens, speed.max_running),
            block_size=block_size,
            kv_capacity_blocks=max(1, speed.kv_tokens // block_size),
        )
        return partial(make, modelled)

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
        return _known(kinds, name, self.config.router.kind, "router", option)

    def _disagg_kind(self, name: str, option: str) -> _DisaggKind:
        config, kinds = self.config.disaggregation, self.loaded.host.disaggs.kinds
        if config is None or all(entry.role != "prefill" for entry in self.config.engines):
            problem = "prefill elsewhere needs `disaggregation`, and workers of `role: prefill`"
            raise ConfigError([problem], self.file)
        return _known(kinds, name, config.kind, "disaggregation", option)


def _named(
    makers: Sequence[tuple[Role, Callable[[], VirtualEngine]]],
) -> list[VirtualWorker]:
    digits = max(3, len(str(len(makers) - 1)))  # so that workers are in the order of their ids
    return [
        VirtualWorker.make(f"worker-{number:0{digits}}", make(), role)
        for number, (role, make) in enumerate(makers)
    ]


def _split(written: str) -> list[str]:
    return [name.strip() for name in written.split(",")]


def _known(
    kinds: Mapping[str, Kind[MakeT]], name: str, configured: str, section: str, option: str
) -> Kind[MakeT]:
    """The policy ``name``. Raises ConfigError if there is none, or if it cannot have defaults.

    ``configured``: the policy of this ``section`` of the file, which has its options there.
    """
    kind = kinds.get(name)
    if kind is None:
        names = [*sorted(kinds), *([AGGREGATED] if section == "disaggregation" else [])]
        what = "routing" if section == "router" else section
        problem = f'no {what} policy "{name}"; there are {", ".join(names)}'
        raise ConfigError([problem], option)
    fields = attrs.fields(kind.config_class)
    needed = [one.name for one in fields if one.default is attrs.NOTHING and one.name != "kind"]
    if needed and name != configured:
        problem = f"{name} needs options ({', '.join(needed)}): make it the {section} of the file"
        raise ConfigError([problem], option)
    return kind
