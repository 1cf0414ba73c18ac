"""The event buses `zmq` and `nats` pass the shipped suite."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from tests.support.nats import NatsServer, fresh_subjects

from commutator.contract.event_bus import EventBus, EventBusConfig
from commutator.plugins import load_plugins
from commutator_nats.bus import NatsEventBus
from commutator_nats.config import NatsConfig
from commutator_testing.event_buses import EventBusContract

HOST = load_plugins(found=[])


class TestZmq(EventBusContract):
    @asynccontextmanager
    async def open_bus(self) -> AsyncIterator[EventBus]:
        config = EventBusConfig(kind="zmq")
        bus = HOST.event_buses.kinds[config.kind].thing(config)
        try:
            yield bus
        finally:
            await bus.close()


@pytest.mark.slow
class TestNats(EventBusContract):
    @pytest.fixture(autouse=True)
    def _server(self, nats: NatsServer) -> None:
        self.server = nats
        self.cluster = fresh_subjects()

    @asynccontextmanager
    async def open_bus(self) -> AsyncIterator[EventBus]:
        config = NatsConfig(
            kind="nats",
            servers=(self.server.url,),
            cluster=self.cluster,
            max_waiting_messages=500,
        )
        bus = NatsEventBus(config)
        try:
            yield bus
        finally:
            await bus.close()

    @asynccontextmanager
    async def cut_off(self) -> AsyncIterator[None]:
        self.server.kill()
        try:
            yield
        finally:
            self.server.start()
