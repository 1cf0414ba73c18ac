"""One rank of a worker over several hosts: its agent runs as long as an epoch of all ranks."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

from attrs import asdict

from commutator.contract.engine import NodeGroup
from commutator.contract.launcher import AgentPlan
from commutator.launcher.child import GROUP
from commutator.launcher.ports import PortPicker
from commutator.launcher.process import LocalLauncher
from commutator_ray.epochs import BEAT_S, Beat, Epoch, Member
from commutator_ray.hosted import HostedAgent


class HostedRank(HostedAgent):
    """As ``HostedAgent``, but the agent starts and ends with those of the other ranks."""

    def __init__(
        self,
        plan: AgentPlan,
        member: Member,
        ask: Callable[[Beat], Awaitable[Epoch | None]],
        *,
        address: str,
        control: str,
        on_line: Callable[[str, str, str], None],
    ) -> None:
        """``ask`` has ``Epochs.hear`` answer; it raises OSError when there is no answer."""
        super().__init__(plan, address=address, control=control, on_line=on_line)
        self._member = member
        self._ask = ask
        self._address = address
        self._ports = PortPicker()
        self._answered = asyncio.Event()

    async def run(self) -> None:
        beating = asyncio.create_task(self._beat())
        try:
            await super().run()
        finally:
            beating.cancel()
            await asyncio.gather(beating, return_exceptions=True)

    async def _live_once(self, launcher: LocalLauncher, folder: Path) -> float | None:
        """Wait for an epoch, and run the agent until the epoch or the agent ends."""
        epoch = await self._next_epoch()
        if epoch is None:
            return 0.0
        group = NodeGroup(
            rank=self._member.rank,
            nodes=self._plan.nodes,
            master_address=epoch.master_address,
            master_port=epoch.master_port,
        )
        (folder / GROUP).write_text(json.dumps(asdict(group)), encoding="utf-8")
        self._member.started(epoch)
        try:
            self.cause = await self._live(launcher, folder, self._until_over)
        finally:
            self._member.stopped()
        return None if self._has_failed(folder) else 0.0

    async def _next_epoch(self) -> Epoch | None:
        """The epoch that begins; None: ``stop`` was called."""
        while not self._stopping.is_set():
            if (epoch := self._member.to_start(time.monotonic())) is not None:
                return epoch
            await self._next_answer()
        return None

    async def _until_over(self) -> None:
        while not self._member.has_to_stop(time.monotonic()):
            await self._next_answer()

    async def _next_answer(self) -> None:
        """Wait for an answer, or a while."""
        self._answered.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(BEAT_S):
                await self._answered.wait()

    async def _beat(self) -> None:
        while True:
            asked_s = time.monotonic()
            with suppress(OSError):
                offers = self._member.rank == 0 and not self._member.runs
                port = self._ports.pick(self._address) if offers else 0
                beat = self._member.beat(self._address, port)
                self._member.hear(await self._ask(beat), asked_s)
                self._answered.set()
            await asyncio.sleep(BEAT_S)
