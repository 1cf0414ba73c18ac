"""Supervises one worker: starts it, renews its lease while it answers, restarts it."""

from __future__ import annotations

import asyncio
import logging
import secrets
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar
from urllib.parse import urlsplit

import msgspec
from attrs import asdict, evolve

from commutator.backoff import Backoff
from commutator.config.model import RuntimeConfig
from commutator.config.secrets import hidden_line
from commutator.contract.engine import EngineClient, HttpRelay, LaunchContext, RelayStart
from commutator.contract.event_bus import EventBus
from commutator.contract.launcher import LaunchedProcess, Launcher, LaunchPlan
from commutator.contract.registry import RETIRED, Registry, WorkerUp
from commutator.contract.worker import EngineInfo, EngineLoad, Role, WorkerRecord
from commutator.engine import TokenApiClient
from commutator.engine.protocol import INSTANCE
from commutator.errors import (
    CommutatorError,
    ConfigError,
    EngineError,
    NameTakenError,
    RegistryError,
)
from commutator.kv_events.relay import EventRelay
from commutator.kv_events.zmq_bus import ZmqEventBus
from commutator.launcher.child import take_start_failure
from commutator.registry.unready import StartLog, UnreadyWorker
from commutator.supervisor.restart import Ended, ProcessEndedError, keep_running, while_alive
from commutator.supervisor.specs import WorkerSpec
from commutator.trust import in_url, network_of_this_process

log = logging.getLogger(__name__)
AnswerT = TypeVar("AnswerT")
_POLL_S = 0.1
_START_LOOKS = 20
"""At the CPU time of a process that starts, within ``start_timeout_s``."""
_START_WORKS = 0.05
"""Of that time, the part in which it has to use the CPU to be given as much again."""
_MOST_MORE = 11
"""As often, at most: a process may also spin."""
_STOP_GRACE_S = 10.0


class WorkerAgent:
    """Runs one worker and renews its lease while it answers; engines do not know the registry."""

    def __init__(
        self,
        spec: WorkerSpec,
        runtime: RuntimeConfig,
        registry: Registry,
        launcher: Launcher,
        state_dir: Path,
        env: Mapping[str, str] = MappingProxyType({}),
        bus: EventBus | None = None,
        on_answer: Callable[[bool], None] = lambda _: None,
    ) -> None:
        """``env``: the variables with the secrets that the worker reads, beside its plan's own.

        ``bus``: where its KV events are passed on; None: front doors read its own sockets.
        ``on_answer`` is told whether the registry answered, each time that it is asked.
        """
        self.name = spec.worker_id
        self.ready = asyncio.Event()
        """Set while its process runs and is registered."""
        self._spec = spec
        self._lease_s = runtime.lease_s
        self._backoff = Backoff(runtime.restart_backoff_s, runtime.restart_backoff_max_s)
        self._registry = registry
        self._lease_id: int | None = None
        self._unrenewed = False
        self._launcher = launcher
        self._folder = state_dir / self.name
        self._env = env
        self._ever_ready = False
        self._peers = KvPeers()
        self._bus = bus or ZmqEventBus()
        self._on_answer = on_answer
        self._client: EngineClient | None = None
        self._starts = StartLog(
            UnreadyWorker(
                worker_id=spec.worker_id,
                model=spec.model.name,
                kind=spec.config.kind,
                engine=spec.config.name or spec.config.kind,
                role=Role(spec.config.role),
                host=spec.host,
                since_unix_s=time.time(),
            )
        )
        self.leaving = "stopped"
        """The registry's reason when the agent is cancelled."""

    async def run(self) -> None:
        """Keep the worker running until cancelled; then deregister and stop it.

        Raises ConfigError when the first start shows that the worker can never start, and
        EngineError when a worker over several nodes ends: all of them start it anew.
        """
        following = asyncio.create_task(self._peers.follow(self._registry))
        try:
            if self._spec.group is not None:
                ended = await self._live_once()
                raise EngineError(f"{self.name} {ended.reason}")
            await keep_running(
                self.name,
                self._live_once,
                self._backoff,
                lambda ended, wait_s: self._starts.ended(ended.reason, wait_s),
            )
        finally:
            following.cancel()

    @property
    def unready(self) -> UnreadyWorker | None:
        """Why the worker is not in the registry; None while it is."""
        return self._starts.current

    async def load(self) -> EngineLoad | None:
        """The engine's load as it counts it; None when it is not started. Raises EngineError."""
        return None if self._client is None else await self._client.load()

    async def _live_once(self) -> Ended:
        started_s = time.monotonic()
        ready_s: float | None = None
        process: LaunchedProcess | None = None
        client: EngineClient | None = None
        events = EventRelay(self._bus)
        relaying: asyncio.Task[None] | None = None
        outcome: str | None = None
        self._starts.begins()
        try:
            instance = secrets.token_hex(8)
            relay = self._relay()
            process, address = await self._start_process(instance, relay)
            client = self._spec.connector.connect(self._spec.config, address)
            info = await while_alive(process, self._wait_until_ready(client, process))
            if relay is not None:
                address, relaying = self._begin_relay(relay, address, instance)
                await while_alive(process, self._until_relayed(address))
            record = await events.announced(
                self._record(client, address, _with_pid(info, process), instance)
            )
            await while_alive(process, self._announce(record))
            self._ever_ready = True
            self._client = client
            self._starts.ready()
            self.ready.set()
            ready_s = time.monotonic()
            log.info("%s is ready after %.1f s", self.name, ready_s - started_s)
            # Other engines answer late while they compute, and may compute in another process.
            ask = client.load if type(client) is TokenApiClient else None
            hangs = None if process is None else process.end_when_it_hangs(ask)
            await while_alive(process, self._watch(client, record, process, events), hangs)
            outcome, reason = "failed", "gave no answer for too long"
        except Exception as caught:
            error = self._cause(caught)
            if isinstance(error, ConfigError) and not self._ever_ready:
                raise error from None
            if not isinstance(error, CommutatorError | OSError):
                log.exception("the connector of %s failed", self.name)
            outcome, reason = "failed", hidden_line(_sentence(error))
        finally:
            self.ready.clear()
            healthy_s = 0.0 if ready_s is None else time.monotonic() - ready_s
            if outcome is not None and ready_s is not None:
                self._starts.silent(reason)  # before it leaves the registry, so it never vanishes
            self._client = None
            # Of one that leaves for good nothing stays, however it ends: nor that it was drained.
            retires = self.leaving == RETIRED
            await self._deregister(RETIRED if retires else outcome or self.leaving)
            await events.close()
            if relaying is not None:
                relaying.cancel()
                await asyncio.gather(relaying, return_exceptions=True)
            await self._clean_up(client, process)
        return Ended(reason, healthy_s)

    def _cause(self, error: Exception) -> Exception:
        """``error``, or for a process that ended what it gave as the reason."""
        if not isinstance(error, ProcessEndedError):
            return error
        failure = take_start_failure(self._folder)
        if failure is None:
            return error
        if failure.is_permanent and not self._ever_ready:
            return ConfigError(list(failure.problems), f"worker {self.name}")
        return EngineError("; ".join(failure.problems))

    def _relay(self) -> HttpRelay | None:
        """What is relayed to other hosts; None: there are none, or they need no relay."""
        network = network_of_this_process()
        if network is None or not network.spans_hosts:
            return None
        return self._spec.connector.relay(self._spec.config)

    def _begin_relay(
        self, rules: HttpRelay, target: str, instance: str
    ) -> tuple[str, asyncio.Task[None]]:
        """Start the process of a relay, again and again if it ends; returns where it is reached."""
        network = network_of_this_process()
        assert network is not None
        listen, port = self._launcher.listen_at()
        address = relayed_address(target, network.advertise, port, tls=network.tls is not None)
        plan = _relay_plan(RelayStart(listen, port, address, target, rules), instance)
        name = f"{self.name}-relay"

        async def once() -> Ended:
            started_s = time.monotonic()
            process = await self._launcher.start(name, plan)
            try:
                reason = await process.wait()
            finally:
                await process.stop(_STOP_GRACE_S)
            return Ended(reason, time.monotonic() - started_s)

        return address, asyncio.create_task(keep_running(name, once, self._backoff))

    async def _until_relayed(self, address: str) -> None:
        """Return when front doors can reach the engine."""
        through = self._spec.connector.connect(self._spec.config, address)
        try:
            await self._wait_until_ready(through, None)
        finally:
            await through.close()

    async def _start_process(
        self, instance: str, relay: HttpRelay | None
    ) -> tuple[LaunchedProcess | None, str]:
        """The process (None for an engine that is attached) and the engine's own address."""
        spec = self._spec
        self._folder.mkdir(exist_ok=True)
        host, port = self._launcher.listen_at(loopback=relay is not None)
        context = LaunchContext(
            worker_id=self.name,
            model=spec.model,
            host=host,
            port=port,
            state_dir=self._folder,
            tiers=spec.tiers,
            advertise=spec.advertise if relay is None else host,
            kv_host=spec.kv_host,
            guarded_host=spec.advertise,
            group=spec.group,
            devices=spec.devices,
        )
        plan = spec.connector.launch_plan(spec.config, context)
        if plan is None:
            if spec.config.replicas > 1:
                raise ConfigError(
                    [f"engine {spec.config.name} is attached to, not started: one replica only"]
                )
            return None, spec.connector.attach_address(spec.config)
        plan = evolve(plan, env={**self._env, INSTANCE: instance, **plan.env})
        return await self._launcher.start(self.name, plan), plan.address

    async def _wait_until_ready(
        self, client: EngineClient, process: LaunchedProcess | None
    ) -> EngineInfo:
        limit_s = self._spec.config.start_timeout_s
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        patience = _StartPatience(limit_s, began_s)
        problem = "no answer"
        logged = process is not None  # a starting process does not answer yet
        try:
            async with asyncio.timeout(limit_s) as limit:
                while True:
                    try:
                        return await client.start()
                    except EngineError as error:
                        problem = str(error)
                        if not logged:
                            log.warning("waiting for %s: %s", self.name, problem)
                            logged = True
                        if process is None:
                            self._starts.waits(problem)
                    await asyncio.sleep(_POLL_S)
                    if process is not None:
                        limit.reschedule(patience.until_s(loop.time(), process))
        except TimeoutError:
            waited_s = loop.time() - began_s
            raise EngineError(f"not ready after {waited_s:.3g} s: {problem}") from None

    async def _watch(
        self,
        client: EngineClient,
        record: WorkerRecord,
        process: LaunchedProcess | None,
        events: EventRelay,
    ) -> None:
        """Renew the lease while the engine answers; return when it has not answered for too long.

        An attached engine has no limit, as Commutator cannot restart it.
        """
        limit_s = self._spec.config.start_timeout_s
        answered_s = time.monotonic()
        self._peers.started()
        while process is None or time.monotonic() - answered_s < limit_s:
            await asyncio.sleep(self._lease_s / 3)
            try:
                async with asyncio.timeout(self._lease_s * 2 / 3):
                    if time.monotonic() - answered_s > self._lease_s:
                        record = evolve(record, info=await client.start())
                        record = await events.announced(record)
                        self._peers.started()
                    await client.check_health()
            except Exception as error:  # noqa: BLE001 - a connector's library may raise anything
                problem = f"does not answer: {str(error) or 'too slow'}"
                log.warning("%s %s", self.name, problem)
                if time.monotonic() - answered_s > self._lease_s:
                    self._starts.silent(problem)
            else:
                answered_s = time.monotonic()
                await self._renew(record)
                self._starts.ready()
                await self._peers.send(client, record)

    async def _clean_up(self, client: EngineClient | None, process: LaunchedProcess | None) -> None:
        try:
            if client is not None:
                await client.close()
        except Exception:
            log.exception("closing the connection to %s failed", self.name)
        finally:
            if process is not None:
                await process.stop(_STOP_GRACE_S)

    async def _announce(self, record: WorkerRecord) -> None:
        """Begin the first lease of a start; a registry that cannot be reached stops no engine.

        Raises ConfigError when a worker has never been announced, because its name is taken.
        """
        logged = False
        while True:
            try:
                await self._register(record)
            except NameTakenError as error:
                if not self._ever_ready:
                    raise ConfigError([str(error)]) from error
                log.error("%s", error)  # noqa: TRY400 - it says what happened
            except RegistryError as error:
                level = logging.DEBUG if logged else logging.WARNING
                log.log(level, "%s is ready, but cannot be announced yet: %s", self.name, error)
                logged = True
            else:
                return
            await asyncio.sleep(self._lease_s / 3)

    async def _register(self, record: WorkerRecord) -> None:
        """Begin a lease. Raises RegistryError."""
        self._lease_id = await self._asked(self._registry.register(record, self._lease_s))

    async def _asked(self, asking: Awaitable[AnswerT]) -> AnswerT:
        """The registry's answer. Raises RegistryError."""
        try:
            answer = await asking
        except RegistryError as error:
            self._on_answer(isinstance(error, NameTakenError))  # which is an answer, too
            raise
        self._on_answer(True)
        return answer

    async def _renew(self, record: WorkerRecord) -> None:
        """Renew the lease; register the worker again if the lease lapsed."""
        try:
            lease_id = self._lease_id
            if lease_id is None or not await self._asked(self._registry.keep_alive(lease_id)):
                await self._register(record)
                log.info("%s is back in the registry", self.name)
            elif self._unrenewed:
                log.info("%s: its lease is renewed again", self.name)
            self._unrenewed = False
        except RegistryError as error:
            level = logging.DEBUG if self._unrenewed else logging.WARNING
            log.log(level, "%s: its lease was not renewed: %s", self.name, error)
            self._unrenewed = True

    async def _deregister(self, reason: str) -> None:
        """End the lease, if any."""
        lease_id, self._lease_id = self._lease_id, None
        if lease_id is not None:
            try:
                await self._registry.deregister(lease_id, reason)
            except RegistryError as error:
                log.warning("%s: its lease ends only when it lapses: %s", self.name, error)

    def _record(
        self, client: EngineClient, address: str, info: EngineInfo, instance: str
    ) -> WorkerRecord:
        config = self._spec.config
        name, role = config.name or config.kind, Role(config.role)
        if role is not Role.BOTH and info.handover is None:
            problem = (
                f"engine {name} has the role {role.value}, but cannot hand KV over; set "
                "role: both, or install what it needs (our own engines: NIXL, by `make tiers`)"
            )
            raise ConfigError([problem])
        model = self._spec.model.name
        return WorkerRecord(
            worker_id=self.name,
            engine=name,
            kind=config.kind,
            model=model,
            address=address,
            info=info,
            role=role,
            instance=instance,
            token_api=type(client) is TokenApiClient,
            host=self._spec.host,
            labels=dict(self._spec.labels),
            generation=self._spec.generation,
        )


class _StartPatience:
    """Until when a process may start: for ``limit_s``, and as long again while it computes."""

    def __init__(self, limit_s: float, now_s: float) -> None:
        self._limit_s = limit_s
        self._began_s = self._looked_s = now_s
        self._used_s = 0.0
        self._until_s = now_s + limit_s

    def until_s(self, now_s: float, process: LaunchedProcess) -> float:
        """The moment, by the clock of ``now_s``."""
        if now_s - self._looked_s > self._limit_s / _START_LOOKS:
            self._looked_s = now_s
            used_s = process.cpu_s()
            if used_s is not None and used_s - self._used_s > _START_WORKS * self._limit_s:
                self._used_s = used_s
                last_s = self._began_s + _MOST_MORE * self._limit_s
                self._until_s = min(now_s, last_s) + self._limit_s
        return self._until_s


def _with_pid(info: EngineInfo, process: LaunchedProcess | None) -> EngineInfo:
    """The info with the process that was started, where the engine does not name its own."""
    return info if process is None or info.pid is not None else evolve(info, pid=process.pid)


def _sentence(error: Exception) -> str:
    """The error, as the end of a sentence that begins with the worker's name."""
    if isinstance(error, ProcessEndedError):
        return str(error)
    kind = "" if isinstance(error, CommutatorError) else f"{type(error).__name__}: "
    return f"failed: {kind}{error}"


def _relay_plan(start: RelayStart, instance: str) -> LaunchPlan:
    """The process of a relay for one ``instance`` of a worker."""
    value = msgspec.json.encode(asdict(start)).decode()
    return LaunchPlan(
        argv=(sys.executable, "-m", start.rules.module),
        address=start.url,
        env={RelayStart.VARIABLE: value, INSTANCE: instance},
    )


def relayed_address(address: str, host: str, port: int, *, tls: bool) -> str:
    """The ``address`` of an engine as others reach it, by a relay at ``host`` and ``port``."""
    parts = urlsplit(address)
    scheme = "https" if tls else "http"
    return parts._replace(scheme=scheme, netloc=f"{in_url(host)}:{port}").geturl()


class KvPeers:
    """Keeps one worker's list of peers current."""

    def __init__(self) -> None:
        self._lenders: dict[str, tuple[str, str]] = {}
        """The model and the address of each worker that lends blocks. Not its record: there may be
        thousands, and a supervisor has one list for each of its workers."""
        self._sent: list[str] = []
        self._current = False
        """Whether nothing has changed since ``_sent`` was sent, so that nothing need be sorted."""

    async def follow(self, registry: Registry) -> None:
        """Follow the registry until cancelled."""
        async for changes in registry.watch():
            for change in changes:
                if isinstance(change, WorkerUp):
                    self._set(change.record.worker_id, _lender(change.record))
                else:
                    self._set(change.worker_id, None)

    def started(self) -> None:
        """The worker is a new process and has no peers yet."""
        self._sent = []
        self._current = False

    async def send(self, client: EngineClient, mine: WorkerRecord) -> None:
        """Send the worker its peers if they changed; a failure is retried by the next call."""
        if mine.info.kv_exchange is None or self._current:
            return
        self._current = True  # before the wait, in which something may change again
        addresses = self.addresses(mine)
        if addresses == self._sent:
            return
        try:
            await client.set_peers(addresses)
        except EngineError as error:
            self._current = False
            log.warning("%s: its peers could not be sent: %s", mine.worker_id, error)
        else:
            self._sent = addresses

    def addresses(self, mine: WorkerRecord) -> list[str]:
        """Sorted addresses at which the other workers of the same model lend blocks."""
        return sorted(
            address
            for worker_id, (model, address) in self._lenders.items()
            if worker_id != mine.worker_id and model == mine.model
        )

    def _set(self, worker_id: str, lender: tuple[str, str] | None) -> None:
        if self._lenders.get(worker_id) == lender:
            return
        if lender is None:
            del self._lenders[worker_id]
        else:
            self._lenders[worker_id] = lender
        self._current = False


def _lender(record: WorkerRecord) -> tuple[str, str] | None:
    """The model and the address at which a worker lends blocks; None if it lends none."""
    exchange = record.info.kv_exchange
    if exchange is None or exchange.address is None:
        return None
    return record.model, exchange.address
