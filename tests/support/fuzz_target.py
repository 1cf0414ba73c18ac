"""A process with one server of every socket that Commutator opens, for fuzzers: prints addresses.

They serve everyone, as a process that knows the run's secret is served; ``fuzz_closed_target`` has
those that ask for it. Of the front doors, "open" knows no keys.

Each line on stdin is answered by one JSON object: the longest turn of the event loop in CPU
seconds since the last line, and the resident memory now.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import selectors
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any, cast

from tests.support.front_door import FakeDispatcher, answer, front_door
from tests.support.principals import gate_of

from commutator.contract.block import BlockStored
from commutator.contract.planner import PlannerConfig, PlannerPolicy
from commutator.contract.principal import Principal
from commutator.contract.service import Service
from commutator.contract.tier import RemoteAgent
from commutator.contract.worker import Role
from commutator.demand import DoorReports
from commutator.frontend.demand import DemandCounter, PlannerLink
from commutator.launcher.child import calm_garbage_collector
from commutator.launcher.ports import reserved_port
from commutator.planning import FleetPlanner
from commutator.registry.claims import PLANNER
from commutator.registry.memory import MemoryRegistry
from commutator.registry.server import RegistryServer
from commutator.routing.dispatcher import Dispatcher
from commutator.routing.load import InFlightLoad
from commutator.supervisor.planner.loop import PlannedFleet, PlannerLoop, Surroundings
from commutator.supervisor.planner.service import PlannerService
from commutator_engine_kit import EventPublisher
from commutator_engine_kit.kv.transfer.exporter import BlockExporter
from commutator_engine_kit.kv.transfer.protocol import LentBlocks, LookupRequest
from commutator_engine_kit.server import TokenApiServer
from commutator_limits.service import LedgerService
from commutator_sim.config import SimConfig
from commutator_sim.engine import SimEngine

KEY = "tenant"
"""The name of a principal, and the token by which the front door knows it."""


class Watched(selectors.DefaultSelector):
    """Measures the CPU time of the loop's thread between two waits."""

    longest_s = 0.0
    _resumed_s: float | None = None

    def select(self, timeout: float | None = None) -> Any:
        if self._resumed_s is not None:
            self.longest_s = max(self.longest_s, time.thread_time() - self._resumed_s)
        ready = super().select(timeout)
        self._resumed_s = time.thread_time()
        return ready


async def serve(watched: Watched) -> None:
    async with AsyncExitStack() as stack:
        token_api = TokenApiServer(idle_engine())
        token_port = await token_api.start("127.0.0.1", 0)
        stack.push_async_callback(token_api.stop)
        registry = RegistryServer(MemoryRegistry(), hub_services())
        registry_address = await registry.start()
        stack.push_async_callback(registry.stop)
        exporter = BlockExporter(lambda: None, look_up=lend_nothing)
        exporter_address = exporter.start()
        stack.callback(exporter.stop)
        publisher = EventPublisher(keep_messages=100)
        stack.callback(publisher.close)
        publish_events(publisher)
        folder = stack.enter_context(TemporaryDirectory())
        local, operators = f"{folder}/door.sock", stack.enter_context(reserved_port("127.0.0.1", 0))
        link = _link_to_planner(registry_address)
        planning = asyncio.create_task(link.run())
        stack.callback(planning.cancel)
        doors = []
        gate = gate_of(Principal(name=KEY, permissions=frozenset({"admin"})))
        each: list[dict[str, Any]] = [
            {"local_socket": local, "gate": gate},
            # Then the address of clients has no such paths.
            {"admin": {"port": operators}, "gate": gate},
            {},
        ]
        for options in each:
            door = await stack.enter_async_context(
                front_door(
                    FakeDispatcher(
                        answer("An answer."), addresses={"x": f"127.0.0.1:{token_port}"}
                    ),
                    header_timeout_s=1.0,
                    body_timeout_s=1.0,
                    **options,
                )
            )
            door.services.registry = registry.registry
            door.services.planner = link
            doors.append(door)
        addresses = {
            "token": f"127.0.0.1:{token_port}",
            "registry": registry_address,
            "exporter": exporter_address,
            "events": publisher.source.endpoint,
            "replay": publisher.source.replay_endpoint,
            "http": f"127.0.0.1:{doors[0].port}",
            "operators": f"127.0.0.1:{operators}",
            "local": local,
            "open": f"127.0.0.1:{doors[2].port}",
        }
        calm_garbage_collector()  # as front doors and workers do
        print(json.dumps(addresses), flush=True)
        await answer_reports(watched)


async def answer_reports(watched: Watched, more: Callable[[], Mapping[str, float]] = dict) -> None:
    """Answer each line on stdin, until its end, with a report, to which ``more`` adds."""
    loop = asyncio.get_running_loop()
    while await loop.run_in_executor(None, sys.stdin.readline):
        gc.collect()
        report = {"longest_s": watched.longest_s, "rss_bytes": _rss_bytes(), **more()}
        print(json.dumps(report), flush=True)
        await asyncio.sleep(0)
        watched.longest_s = 0.0  # the collection was ours


def idle_engine() -> SimEngine:
    return SimEngine(
        SimConfig(kind="sim", name="e", model="m", speedup="unlimited", prefix_caching=False),
        model="m",
        max_model_len=4096,
    )


def hub_services() -> list[Service]:
    """What answers on the registry's port beside the registry."""
    reports = DoorReports(silence_s=8.0, gone_s=20.0)
    return [LedgerService(), PlannerService(_idle_planner(reports))]


def publish_events(publisher: EventPublisher) -> None:
    """A hundred messages, numbered from 0."""
    for number in range(100):
        block = BlockStored(
            block_hashes=(number,),
            parent_block_hash=None,
            token_ids=(1, 2, 3, 4),
            block_size=4,
        )
        publisher.publish([block])


def _idle_planner(reports: DoorReports) -> PlannerLoop:
    """It takes reports and answers questions, and never plans."""
    planner = FleetPlanner(PlannerConfig(kind="none"), [], cast(PlannerPolicy[Any], None))
    around = Surroundings(fleet=cast(PlannedFleet, None), reports=reports, may_act=lambda: False)
    return PlannerLoop(planner, around)


def _link_to_planner(address: str) -> PlannerLink:
    counter = DemandCounter(PlannerConfig(kind="none"), Role.BOTH)
    dispatcher = SimpleNamespace(load=InFlightLoad(), cached_blocks=dict)
    link = PlannerLink("door", counter, cast(Dispatcher, dispatcher))
    link.on_claim(PLANNER, address)
    return link


async def lend_nothing(request: LookupRequest) -> LentBlocks:
    return LentBlocks(RemoteAgent(name="agent", metadata=b""), 1.0)


def _rss_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    watched = Watched()
    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(watched)) as runner:
        runner.run(serve(watched))
