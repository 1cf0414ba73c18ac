"""Looks after one worker: starts it, announces it while it is well, and starts it again."""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path
from typing import Any

from attrs import evolve, frozen

from commutator.config.model import EngineConfig, ModelConfig, RuntimeConfig, TierConfig
from commutator.engine.contract import EngineClient, EngineConnector, LaunchContext
from commutator.errors import CommutatorError, ConfigError, EngineError
from commutator.runtime.backoff import Backoff
from commutator.runtime.keep_running import Ended, ProcessEndedError, keep_running, while_alive
from commutator.runtime.kv_peers import KvPeers
from commutator.runtime.ports import PortPicker
from commutator.runtime.process import Launcher, Process
from commutator.runtime.registry import Registry
from commutator.runtime.worker_lease import WorkerLease
from commutator.types import EngineInfo, Role, WorkerRecord

__all__ = ["WorkerAgent", "WorkerSpec"]

log = logging.getLogger(__name__)

_HOST = "127.0.0.1"
_POLL_S = 0.1
_STOP_GRACE_S = 10.0


@frozen
class WorkerSpec:
    """One replica of one `engines` entry."""

    worker_id: str
    config: EngineConfig
    model: ModelConfig
    connector: EngineConnector[Any]
    tiers: tuple[TierConfig, ...] = ()


class WorkerAgent:
    """Runs one worker. The engine needs to know nothing of the registry."""

    def __init__(
        self,
        spec: WorkerSpec,
        runtime: RuntimeConfig,
        registry: Registry,
        launcher: Launcher,
        ports: PortPicker,
        state_dir: Path,
    ) -> None:
        self.name = spec.worker_id
        self.ready = asyncio.Event()
        """Set from the registration of a process until its end."""
        self._spec = spec
        self._lease_s = runtime.lease_s
        self._backoff = Backoff(runtime.restart_backoff_s, runtime.restart_backoff_max_s)
        self._lease = WorkerLease(registry, runtime.lease_s)
        self._launcher = launcher
        self._ports = ports
        self._state_dir = state_dir
        self._ever_ready = False
        self._registry = registry
        self._peers = KvPeers()

    async def run(self) -> None:
        """Until cancelled; then the worker is deregistered and stopped.

        Raises ConfigError when the first start shows that the worker can never start.
        """
        following = asyncio.create_task(self._peers.follow(self._registry))
        try:
            await keep_running(self.name, self._live_once, self._backoff)
        finally:
            following.cancel()

    async def _live_once(self) -> Ended:
        started_s = time.monotonic()
        ready_s: float | None = None
        process: Process | None = None
        client: EngineClient | None = None
        outcome = "stopped"
        try:
            process, address = await self._start_process()
            client = self._spec.connector.connect(self._spec.config, address)
            info = await while_alive(process, self._wait_until_ready(client, process))
            record = self._record(address, info)
            await self._lease.announce(record)
            self._ever_ready = True
            self.ready.set()
            ready_s = time.monotonic()
            log.info("%s is ready after %.1f s", self.name, ready_s - started_s)
            await while_alive(process, self._watch(client, record, process))
            outcome, reason = "failed", "gave no answer for too long"
        except Exception as error:
            if isinstance(error, ConfigError) and not self._ever_ready:
                raise
            if not isinstance(error, CommutatorError | OSError):
                log.exception("the connector of %s failed", self.name)
            outcome, reason = "failed", _sentence(error)
        finally:
            self.ready.clear()
            healthy_s = 0.0 if ready_s is None else time.monotonic() - ready_s
            await self._lease.withdraw(outcome)
            await self._clean_up(client, process)
        return Ended(reason, healthy_s)

    async def _start_process(self) -> tuple[Process | None, str]:
        """The process, unless there is only one to attach to, and the address of the engine."""
        spec = self._spec
        folder = self._state_dir / self.name
        folder.mkdir(exist_ok=True)
        port = self._ports.pick(_HOST)
        context = LaunchContext(self.name, spec.model, _HOST, port, folder, spec.tiers)
        plan = spec.connector.launch_plan(spec.config, context)
        if plan is None:
            if spec.config.replicas > 1:
                raise ConfigError(
                    [f"engine {spec.config.name} is attached to, not started: one replica only"]
                )
            return None, spec.connector.attach_address(spec.config)
        return await self._launcher.start(self.name, plan.argv, plan.env), plan.address

    async def _wait_until_ready(self, client: EngineClient, process: Process | None) -> EngineInfo:
        limit_s = self._spec.config.start_timeout_s
        problem, told = "no answer", process is not None  # one that starts is silent for a while
        try:
            async with asyncio.timeout(limit_s):
                while True:
                    try:
                        return await client.start()
                    except EngineError as error:
                        problem = str(error)
                        if not told:
                            log.warning("%s is waited for: %s", self.name, problem)
                            told = True
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            raise EngineError(f"not ready within {limit_s:g} s: {problem}") from None

    async def _watch(
        self, client: EngineClient, record: WorkerRecord, process: Process | None
    ) -> None:
        """Renew the lease while the engine answers. Returns when it was silent for too long.

        An engine that is only attached to is waited for without limit: it is not ours to restart.
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
                        self._peers.started()
                    await client.check_health()
            except Exception as error:  # noqa: BLE001 - a connector's library may raise anything
                log.warning("%s does not answer: %s", self.name, str(error) or "too slow")
            else:
                answered_s = time.monotonic()
                await self._lease.renew(record)
                await self._peers.tell(client, record)

    async def _clean_up(self, client: EngineClient | None, process: Process | None) -> None:
        try:
            if client is not None:
                await client.close()
        except Exception:
            log.exception("closing the connection to %s failed", self.name)
        finally:
            if process is not None:
                await self._launcher.stop(process, _STOP_GRACE_S)

    def _record(self, address: str, info: EngineInfo) -> WorkerRecord:
        config = self._spec.config
        name, role = config.name or config.kind, Role(config.role)
        if role is not Role.BOTH and info.handover is None:
            problem = (
                f"engine {name}: its role is {role.value}, but its workers hand no KV over; set "
                "role: both, or install what it needs (our own engines: NIXL, by `make tiers`)"
            )
            raise ConfigError([problem])
        model = self._spec.model.name
        return WorkerRecord(self.name, name, config.kind, model, address, info, role=role)


def _sentence(error: Exception) -> str:
    """The error as what completes "worker-0 ..."."""
    if isinstance(error, ProcessEndedError):
        return str(error)
    kind = "" if isinstance(error, CommutatorError) else f"{type(error).__name__}: "
    return f"failed: {kind}{error}"
