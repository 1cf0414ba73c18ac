"""The workers of one deployment: started at first or launched by a planner, drained and stopped."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from attrs import define, evolve, field, frozen

from commutator.contract.engine import EngineConfig
from commutator.contract.planner import PlannedWorker, WorkerPhase
from commutator.contract.registry import RETIRED, Registry, WorkerUp
from commutator.contract.worker import EngineLoad, Role, WorkerRecord
from commutator.demand import DoorReports
from commutator.errors import CommutatorError, RegistryError
from commutator.registry.claims import workers_only
from commutator.registry.unready import UnreadyState, UnreadyWorker
from commutator.supervisor.specs import WorkerSpec

log = logging.getLogger(__name__)

_POLL_S = 0.25
_IDLE_LOOKS = 3
"""Looks without requests, in a row, after which a drained worker is stopped."""
_RETRY_S = 1.0
_ROLE_STAYS_S = 60.0
"""After a change of role that took too long, the next one of that worker waits."""
_NOTHING = (0, 0)


class Agent(Protocol):
    """Runs one worker; ``WorkerAgent`` is one."""

    name: str
    ready: asyncio.Event
    leaving: str
    """The registry's reason when ``run`` is cancelled."""

    @property
    def unready(self) -> UnreadyWorker | None: ...

    async def run(self) -> None: ...

    async def load(self) -> EngineLoad | None: ...


@frozen
class ActionResult:
    """What came of one action of a plan."""

    done: bool
    """Whether something was begun."""
    text: str
    """For people."""


OnRefused = Callable[[Agent, BaseException | None], None]


@frozen
class Running:
    """A worker of this deployment, and what became of it."""

    spec: WorkerSpec
    phase: WorkerPhase
    held: bool
    """People drain it, and it does not stop by that."""
    failures: int
    """Starts in a row that have failed."""
    cause: str
    """Why the last one did; empty without a failure."""


@define(eq=False)
class _Member:
    spec: WorkerSpec
    agent: Agent
    launched_s: float
    on_refused: OnRefused | None
    """Called when it can never start; None: that ends the deployment."""
    role: Role
    """The last one that the registry had."""
    roles: Sequence[Role]
    """Its own, and those of workers that differ from it by nothing else."""
    task: asyncio.Task[None] = field(init=False)
    drain: asyncio.Task[None] | None = None
    """Waits until its requests have ended, then stops it or gives it another role; None while it is
    to get requests."""
    drain_is_known: bool = False
    """The registry has confirmed the drain."""
    becoming: Role | None = None
    """The role that it gets after its drain; None: it is stopped then."""
    returning: bool = False
    """A plan's drain has ended, and the registry has not confirmed it yet."""
    role_stays_until_s: float = 0.0
    """It had too many requests to change its role."""
    kept: bool = False
    """People brought it back from a plan's drain."""
    leaving: bool = False
    """It is being stopped, which is not undone."""
    ever_ready: bool = False
    lost_s: float = 0.0
    """When its last lease ended."""


class Fleet:
    """The workers that this deployment runs, and a view of all in its registry.

    Used from one event loop. What a plan does returns at once: starting, draining and stopping go
    on in tasks, and are seen in ``workers``.
    """

    def __init__(
        self,
        registry: Registry,
        make_agent: Callable[[WorkerSpec], Agent],
        clock: Callable[[], float],
        *,
        drain_timeout_s: float,
        in_flight: DoorReports | None = None,
        poll_s: float = _POLL_S,
    ) -> None:
        """``in_flight`` tells when a drained worker has no requests left.

        After ``drain_timeout_s`` it is stopped nevertheless, and its requests migrate. It is looked
        at every ``poll_s``.
        """
        self._registry = registry
        self._make_agent = make_agent
        self._clock = clock
        self._drain_timeout_s = drain_timeout_s
        self._in_flight = in_flight
        self._poll_s = poll_s
        self._members: dict[str, _Member] = {}
        self._prototypes: dict[Role, WorkerSpec] = {}
        self._records: dict[str, WorkerRecord] = {}
        self._seen_s: dict[str, float] = {}
        """When each worker of another deployment was first seen."""
        self._view_known = False
        self._started_s: list[float] = []
        self._changed = asyncio.Event()
        self._stopping: set[asyncio.Task[None]] = set()
        self._refused_until_s: dict[Role, float] = {}
        self._refusals: dict[Role, int] = {}
        self._refused: dict[Role, UnreadyWorker] = {}
        """The last launch of a role that could not start, until another one can."""

    # ------------------------------------------------------------------- running

    def begin(self, specs: Sequence[WorkerSpec]) -> None:
        """Start the first workers, and launch others later like the first of each role."""
        self.launch_like(specs)
        for spec in specs:
            self._add(spec, None)

    def launch_like(self, specs: Sequence[WorkerSpec]) -> None:
        """Launch workers for a plan like the first of each role."""
        self._prototypes = {}
        for spec in specs:
            self._prototypes.setdefault(Role(spec.config.role), spec)

    @property
    def roles(self) -> Sequence[Role]:
        """The roles that a worker can be launched for."""
        return list(self._prototypes)

    def agents(self) -> list[Agent]:
        """Of all workers that are not about to stop."""
        return [one.agent for one in self._members.values() if not one.leaving]

    async def run(self) -> None:
        """Run the workers until cancelled; then stop them.

        Raises ConfigError when one of the first workers can never start.
        """
        following = asyncio.create_task(self._follow())
        changed: asyncio.Task[bool] | None = None
        try:
            while True:
                changed = asyncio.create_task(self._changed.wait())
                running = {one.task: one for one in self._members.values()}
                await asyncio.wait({*running, changed}, return_when=asyncio.FIRST_COMPLETED)
                self._changed.clear()
                changed.cancel()
                for task, member in running.items():
                    if task.done():
                        self._ended(member)
        finally:
            tasks: list[asyncio.Task[Any]] = [following, *self._stopping]
            if changed is not None:
                tasks.append(changed)
            for member in self._members.values():
                if member.drain is not None:  # it is not drained any more when it comes back
                    member.agent.leaving = RETIRED
                tasks.append(member.task)
                tasks += [member.drain] if member.drain is not None else []
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _ended(self, member: _Member) -> None:
        """A worker is not run any more. Raises its error if that ends the deployment."""
        name = member.agent.name
        self._members.pop(name, None)
        if member.drain is not None:
            member.drain.cancel()
        if member.leaving or member.task.cancelled():
            return
        error = member.task.exception()
        if member.on_refused is not None:
            member.on_refused(member.agent, error)
        elif error is not None:
            raise error

    def _launch_refused(self, role: Role, agent: Agent, error: BaseException | None) -> None:
        name = agent.name
        refusals = self._refusals[role] = self._refusals.get(role, 0) + 1
        wait_s = min(5.0 * 2**refusals, 300.0)
        self._refused_until_s[role] = self._clock() + wait_s
        if (unready := agent.unready) is not None:
            self._refused[role] = evolve(
                unready, state=UnreadyState.FAILING, cause=str(error), failures=refusals
            )
        log.error("%s, launched by the planner, cannot start: %s; the next launch of this role "
                  "waits %.0f s", name, error, wait_s)  # fmt: skip

    async def _follow(self) -> None:
        async for changes in workers_only(self._registry.watch()):
            self._view_known = True
            for change in changes:
                if isinstance(change, WorkerUp):
                    self._up(change.record)
                else:
                    self._records.pop(change.worker_id, None)
                    if (member := self._members.get(change.worker_id)) is not None:
                        member.lost_s = self._clock()
                    self._seen_s.pop(change.worker_id, None)

    def _up(self, record: WorkerRecord) -> None:
        name = record.worker_id
        self._records[name] = record
        self._seen_s.setdefault(name, self._clock())
        member = self._members.get(name)
        if member is None:
            return
        member.role = record.role
        member.returning &= record.draining
        if not member.ever_ready:
            member.ever_ready = True
            self._refusals.pop(Role(member.spec.config.role), None)
            self._refused.pop(Role(member.spec.config.role), None)
            self._started_s.append(self._clock() - member.launched_s)
        if member.drain is None:
            if record.draining:
                member.kept = False
        elif record.draining:
            member.drain_is_known = True
        elif member.drain_is_known and not member.leaving:
            log.info("%s was brought back by hand: it stays until it is drained by hand", name)
            member.drain.cancel()
            member.drain, member.drain_is_known, member.kept = None, False, True
            member.becoming = None

    # ----------------------------------------------------------------- observing

    def workers(self) -> Sequence[PlannedWorker] | None:
        """Every worker, those of other deployments among them; None before the first view."""
        if not self._view_known:
            return None
        now_s = self._clock()
        found = [self._planned(one, now_s) for one in self._members.values() if not one.leaving]
        for name, record in self._records.items():
            if name not in self._members:
                phase = WorkerPhase.DRAINING if record.draining else WorkerPhase.READY
                found.append(
                    PlannedWorker(
                        worker_id=name,
                        role=record.role,
                        phase=phase,
                        age_s=now_s - self._seen_s[name],
                        held=True,
                    )
                )
        return found

    def running(self) -> list[Running]:
        """Every worker of this deployment, also those that drain or are being stopped."""
        return [self._running(member) for member in self._members.values()]

    def _running(self, member: _Member) -> Running:
        seen, unready = self._planned(member, self._clock()), member.agent.unready
        leaves = member.leaving or (member.drain is not None and member.becoming is None)
        return Running(
            spec=member.spec,
            phase=WorkerPhase.DRAINING if leaves else seen.phase,
            held=seen.phase is WorkerPhase.DRAINING and not leaves,
            failures=0 if unready is None else unready.failures,
            cause="" if unready is None else unready.cause or "",
        )

    def _planned(self, member: _Member, now_s: float) -> PlannedWorker:
        name = member.agent.name
        record = self._records.get(name)
        held = member.kept
        if member.becoming is not None:
            return PlannedWorker(
                worker_id=name, role=member.becoming, phase=WorkerPhase.STARTING, age_s=0.0
            )
        if member.drain is not None:
            phase = WorkerPhase.DRAINING
        elif record is None:
            phase = WorkerPhase.STARTING
        elif record.draining and not member.returning:
            phase, held = WorkerPhase.DRAINING, member.ever_ready
        else:
            phase = WorkerPhase.READY
        since_s = member.launched_s
        if member.ever_ready and phase is WorkerPhase.STARTING:
            # It died or is silent, and its agent starts it again.
            since_s = member.lost_s
        return PlannedWorker(
            worker_id=name,
            role=member.role,
            phase=phase,
            age_s=max(0.0, now_s - since_s),
            may_become=self._may_become(member, record, now_s),
            held=held,
        )

    def unready(self) -> list[UnreadyWorker]:
        """The workers of this deployment that are not in the registry, ordered by id."""
        found = {one.worker_id: one for one in self._refused.values()}
        for member in self._members.values():
            if not member.leaving and (unready := member.agent.unready) is not None:
                found[unready.worker_id] = unready
        return [found[name] for name in sorted(found)]

    def _may_become(
        self, member: _Member, record: WorkerRecord | None, now_s: float
    ) -> Collection[Role]:
        if record is None or record.info.handover is None or now_s < member.role_stays_until_s:
            return ()
        return [role for role in member.roles if role is not member.role]

    def take_start_ups(self) -> Sequence[float]:
        """The start-up times, in seconds, of the workers that became ready since the last call."""
        started, self._started_s = self._started_s, []
        return started

    # -------------------------------------------------------------------- acting

    def launch(self, role: Role) -> ActionResult:
        """Start a worker."""
        prototype = self._prototypes[role]
        wait_s = self._refused_until_s.get(role, 0.0) - self._clock()
        if wait_s > 0:
            return ActionResult(
                False, f"a launch waits {wait_s:.0f} s: the last one could not start"
            )
        devices: tuple[int, ...] = ()
        if prototype.device_sets:
            taken = {
                device
                for one in self._members.values()
                if one.spec.config.name == prototype.config.name
                for device in one.spec.devices
            }
            free = (one for one in prototype.device_sets if taken.isdisjoint(one))
            if not (devices := next(free, ())):
                return ActionResult(False, f"no GPU of engine {prototype.config.name} is free")
        spec = evolve(prototype, devices=devices)
        return ActionResult(True, f"{self.start(spec, partial(self._launch_refused, role))} starts")

    def start(self, prototype: WorkerSpec, on_refused: OnRefused) -> str:
        """Start a worker like ``prototype``, on its devices; returns its id, which is a new one.

        ``on_refused`` is called with its agent and an error when it can never start.
        """
        stem, _, _ = prototype.worker_id.rpartition("-")
        number = 0
        while f"{stem}-{number}" in self._members or f"{stem}-{number}" in self._records:
            number += 1
        return self._add(evolve(prototype, worker_id=f"{stem}-{number}"), on_refused).agent.name

    def cancel(self, worker_id: str) -> ActionResult:
        """Stop a worker that is not ready; one that has become ready meanwhile is drained."""
        found = self._members.get(worker_id)
        if found is not None and found.becoming is not None:
            self.undrain(worker_id)
            return ActionResult(True, f"{worker_id} stays {found.role}")
        if found is not None and found.agent.ready.is_set():
            return self.drain(worker_id)  # front doors may have sent it requests
        if (member := self._leave(worker_id)) is None:
            return ActionResult(False, f"{worker_id} is gone")
        self._stop(member)
        return ActionResult(True, f"{worker_id} is stopped before it is ready")

    def drain(self, worker_id: str) -> ActionResult:
        """Give a worker no more requests, and stop it when it has none left."""
        member = self._members.get(worker_id)
        if member is None or member.leaving or member.drain is not None:
            return ActionResult(False, f"{worker_id} is gone")
        member.drain_is_known = member.returning = False
        member.drain = asyncio.create_task(self._drain(member))
        return ActionResult(True, f"{worker_id} drains")

    def set_role(self, worker_id: str, role: Role) -> ActionResult:
        """Drain a worker, and give it requests again in another role.

        A worker that still has requests after the time limit of drains keeps its role.
        """
        member = self._members.get(worker_id)
        if member is None or member.leaving or member.drain is not None:
            return ActionResult(False, f"{worker_id} is gone")
        member.drain_is_known = member.returning = False
        member.becoming = role
        member.drain = asyncio.create_task(self._change_role(member, role))
        return ActionResult(True, f"{worker_id} drains to become {role}")

    def undrain(self, worker_id: str) -> ActionResult:
        """Give a worker requests again that a plan drains."""
        member = self._members.get(worker_id)
        if member is None or member.leaving or member.drain is None:
            return ActionResult(False, f"{worker_id} is gone")
        member.drain.cancel()
        self._return(member)
        return ActionResult(True, f"{worker_id} gets requests again")

    def _return(self, member: _Member) -> None:
        member.drain, member.drain_is_known, member.becoming = None, False, None
        member.returning = True
        self._in_task(self._bring_back(member))

    async def _bring_back(self, member: _Member) -> None:
        await self._tell(member)
        record = self._records.get(member.agent.name)
        if record is None or not record.draining:  # no change will be seen that ends it
            member.returning = False

    def _add(self, spec: WorkerSpec, on_refused: OnRefused | None) -> _Member:
        roles = [
            role
            for role, other in self._prototypes.items()
            if _with_role_of(spec.config, other.config) == other.config
        ]
        role = Role(spec.config.role)
        member = _Member(spec, self._make_agent(spec), self._clock(), on_refused, role, roles)
        member.task = asyncio.create_task(member.agent.run())
        self._members[spec.worker_id] = member
        self._changed.set()
        return member

    def _leave(self, worker_id: str) -> _Member | None:
        member = self._members.get(worker_id)
        if member is None or member.leaving:
            return None
        member.leaving = True
        member.agent.leaving = RETIRED
        return member

    def _stop(self, member: _Member) -> None:
        member.task.cancel()
        self._changed.set()

    async def _drain(self, member: _Member) -> None:
        name = member.agent.name
        await self._tell(member)
        drained_s = self._clock()
        if await self._becomes_idle(member, drained_s):
            log.info("%s has no requests left and is stopped", name)
        else:
            log.info("%s is stopped after a drain of %g s: what it still serves migrates",
                     name, self._drain_timeout_s)  # fmt: skip
        if self._leave(name) is not None:
            self._stop(member)

    async def _change_role(self, member: _Member, role: Role) -> None:
        name = member.agent.name
        await self._tell(member)
        if await self._becomes_idle(member, self._clock()):
            await self._set_role(name, role)
            member.role = role
            log.info("%s has no requests left and becomes %s", name, role)
        else:
            member.role_stays_until_s = self._clock() + _ROLE_STAYS_S
            log.info("%s still has requests after %g s and stays %s",
                     name, self._drain_timeout_s, member.role)  # fmt: skip
        if not member.leaving:
            self._return(member)

    async def _set_role(self, name: str, role: Role) -> None:
        """Tell the registry, as soon as it can be reached."""
        while True:
            try:
                await self._registry.set_role(name, role)
            except RegistryError as error:
                log.warning("%s: its role was not set to %s: %s", name, role, error)
                await asyncio.sleep(_RETRY_S)
            else:
                return

    async def _becomes_idle(self, member: _Member, drained_s: float) -> bool:
        """Wait until the worker has no requests; False: it still has some after the time limit."""
        idle = 0
        while idle < _IDLE_LOOKS:
            if self._clock() - drained_s > self._drain_timeout_s:
                return False
            await asyncio.sleep(self._poll_s)
            idle = idle + 1 if await self._is_idle(member, drained_s) else 0
        return True

    async def _is_idle(self, member: _Member, drained_s: float) -> bool:
        doors = self._in_flight
        if doors is not None and (
            not doors.heard_since(drained_s) or doors.in_flight(member.agent.name)
        ):
            return False
        try:
            load = await member.agent.load()
        except CommutatorError:
            return False
        return load is None or not load.running + load.waiting

    async def _tell(self, member: _Member) -> None:
        """Tell the registry whether a worker drains, as soon as it can be reached."""
        name = member.agent.name
        while not member.leaving:
            wanted = member.drain is not None
            try:
                await self._registry.set_draining(name, wanted)
            except RegistryError as error:
                log.warning("%s: draining was not set to %s: %s", name, wanted, error)
                await asyncio.sleep(_RETRY_S)
            else:
                if wanted is (member.drain is not None):  # a plan may have changed it meanwhile
                    return

    def _in_task(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._stopping.add(task)
        task.add_done_callback(self._stopping.discard)


def _with_role_of(config: EngineConfig, other: EngineConfig) -> EngineConfig:
    """``config`` with what may differ between workers that can take each other's role."""
    return evolve(config, name=other.name, role=other.role, replicas=other.replicas)


def loaded(
    workers: Sequence[PlannedWorker],
    loads: Mapping[str, tuple[int, int]],
    cached_blocks: Mapping[str, int],
) -> list[PlannedWorker]:
    """``workers`` with what the front doors have in flight at them."""
    return [
        evolve(
            one,
            active_requests=loads.get(one.worker_id, _NOTHING)[0],
            active_prefill_tokens=loads.get(one.worker_id, _NOTHING)[1],
            cached_blocks=cached_blocks.get(one.worker_id, 0),
        )
        for one in workers
    ]
