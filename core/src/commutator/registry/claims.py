"""Names that one process of a deployment holds at a time, such as that of the acting planner.

A claim is a registry's record like that of a worker, with a lease: who holds it is found as workers
are, also where several deployments share a registry.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence

from commutator.contract.registry import Change, Registry, WorkerUp
from commutator.contract.worker import EngineInfo, WorkerRecord
from commutator.errors import NameTakenError, RegistryError

log = logging.getLogger(__name__)

_KIND = "claim"
PLANNER = "planner"
"""The name that the acting planner holds; no worker has it, as theirs end with a number."""
HUB = "hub"
"""The name that the host holds where front doors of several hosts share (``registry.hub``)."""

LAUNCHER = "launcher"
"""The name that the process holds which places workers by a launcher of agents, such as Ray's."""


def is_claim(record: WorkerRecord) -> bool:
    """Whether a record is a claim, not a worker."""
    return record.kind == _KIND


async def workers_only(
    batches: AsyncIterator[Sequence[Change]], on_claim: Callable[[str, str], None] | None = None
) -> AsyncGenerator[Sequence[Change], None]:
    """The changes of workers among all. ``on_claim`` gets the name and address of each claim.

    The end of a claim is not reported, only its next holder.
    """
    async for batch in batches:
        changes = []
        for change in batch:
            if isinstance(change, WorkerUp) and is_claim(change.record):
                if on_claim is not None:
                    on_claim(change.record.worker_id, change.record.address)
            else:
                changes.append(change)
        yield changes


class Claim:
    """Tries to hold ``name`` until closed; only one process of all that try holds it at a time."""

    def __init__(
        self,
        name: str,
        address: str,
        registry: Registry,
        ttl_s: float,
        *,
        host: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``address``, "HOST:PORT", is where others reach the holder; ``host`` names it."""
        self._record = WorkerRecord(
            worker_id=name,
            engine="",
            kind=_KIND,
            model="",
            address=address,
            info=EngineInfo(
                kind=_KIND,
                version="",
                model="",
                max_model_len=0,
                block_size=0,
                kv_capacity_blocks=0,
            ),
            instance=secrets.token_hex(8),
            host=host,
        )
        self._registry = registry
        self._ttl_s = ttl_s
        self._clock = clock
        self._lease_id: int | None = None
        self._until_s = -math.inf
        self._failed = False

    @property
    def held(self) -> bool:
        """Whether this process surely holds the name now: the lease cannot have lapsed yet."""
        return self._clock() < self._until_s

    async def run(self) -> None:
        """Take the name when it is free, and renew its lease, until cancelled; then give it up."""
        try:
            while True:
                await self.renew()
                await asyncio.sleep(self._ttl_s / 3)
        finally:
            await self.give_up()

    async def renew(self) -> None:
        """Renew the lease, or try to get one, which may take as long as ``Registry.register``."""
        try:
            await self._renew()
        except NameTakenError as error:
            log.debug("%s", error)
        except RegistryError as error:
            # It is tried several times in each ``ttl_s``, however long the registry is away.
            level = logging.DEBUG if self._failed else logging.WARNING
            log.log(level, "the claim of %s was not renewed: %s", self._record.worker_id, error)
            self._failed = True
            return
        self._failed = False

    async def _renew(self) -> None:
        asked_s = self._clock()
        if self._lease_id is not None:
            if await self._registry.keep_alive(self._lease_id):
                self._until_s = asked_s + self._ttl_s
                return
            self._lease_id, self._until_s = None, -math.inf
            log.warning("the claim of %s has lapsed", self._record.worker_id)
        self._lease_id = await self._registry.register(self._record, self._ttl_s)
        # Getting it may have taken long; this renewal surely begins after now.
        asked_s = self._clock()
        if await self._registry.keep_alive(self._lease_id):
            self._until_s = asked_s + self._ttl_s

    async def give_up(self) -> None:
        """End the lease, so that another process can take the name at once."""
        lease_id, self._lease_id, self._until_s = self._lease_id, None, -math.inf
        if lease_id is not None:
            try:
                await self._registry.deregister(lease_id, "stopped")
            except RegistryError as error:
                log.warning("the claim of %s ends when it lapses: %s",
                            self._record.worker_id, error)  # fmt: skip
