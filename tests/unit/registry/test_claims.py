"""A name of the registry is held by one process at a time."""

from __future__ import annotations

import asyncio
import logging
from contextlib import aclosing

import pytest

from commutator.contract.registry import WorkerUp
from commutator.contract.worker import EngineInfo, WorkerRecord
from commutator.errors import RegistryError
from commutator.registry.claims import PLANNER, Claim, is_claim, workers_only
from commutator.registry.memory import MemoryRegistry

TTL_S = 0.05


async def test_one_of_two_planners_holds_the_claim() -> None:
    registry = MemoryRegistry()
    first, second = (Claim(PLANNER, f"h:{n}", registry, 30.0) for n in (1, 2))
    await first.renew()
    trying = asyncio.create_task(second.renew())
    await asyncio.sleep(0)
    assert first.held
    assert not second.held
    await first.give_up()
    await trying
    assert (first.held, second.held) == (False, True)
    await second.give_up()
    await registry.close()


async def test_after_the_death_of_a_planner_another_takes_over_once_its_lease_lapsed() -> None:
    now_s = 0.0
    registry = MemoryRegistry(clock=lambda: now_s)
    dead, heir = (Claim(PLANNER, f"h:{n}", registry, TTL_S, clock=lambda: now_s) for n in (1, 2))
    await dead.renew()
    now_s = 0.9 * TTL_S
    assert (dead.held, heir.held) == (True, False)
    now_s = 1.1 * TTL_S
    assert (dead.held, heir.held) == (False, False), "before another can hold it"
    await heir.renew()
    assert (dead.held, heir.held) == (False, True)
    await dead.renew()  # it was only paused
    assert (dead.held, heir.held) == (False, True)
    await registry.close()


class AwayRegistry(MemoryRegistry):
    """Out of reach while ``away``."""

    away = True

    async def register(self, record: WorkerRecord, ttl_s: float) -> int:
        if self.away:
            raise RegistryError("out of reach")
        return await super().register(record, ttl_s)


async def test_a_registry_that_is_away_is_logged_once_each_time(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now_s = 0.0
    registry = AwayRegistry(clock=lambda: now_s)
    claim = Claim(PLANNER, "h:1", registry, TTL_S, clock=lambda: now_s)
    for _ in range(5):
        await claim.renew()
    assert [one.message for one in caplog.records if one.levelno == logging.WARNING] == [
        f"the claim of {PLANNER} was not renewed: out of reach"
    ]
    registry.away = False
    await claim.renew()
    assert claim.held
    await claim.give_up()
    registry.away = True
    await claim.renew()
    assert caplog.text.count("WARNING") == 2
    await registry.close()


async def test_claims_are_no_workers() -> None:
    registry = MemoryRegistry()
    await Claim(PLANNER, "h:1", registry, 30.0).renew()
    info = EngineInfo(kind="f", version="", model="m", max_model_len=1, block_size=1,
                      kv_capacity_blocks=1)  # fmt: skip
    worker = WorkerRecord(worker_id="w-0", engine="w", kind="f", model="m", address="a", info=info)
    await registry.register(worker, 30.0)
    found: list[tuple[str, str]] = []

    def on_claim(name: str, address: str) -> None:
        found.append((name, address))

    async with aclosing(workers_only(registry.watch(), on_claim)) as batches:
        (change,) = await anext(batches)
    assert isinstance(change, WorkerUp)
    assert change.record.worker_id == "w-0"
    assert not is_claim(change.record)
    assert found == [(PLANNER, "h:1")]
    await registry.close()
