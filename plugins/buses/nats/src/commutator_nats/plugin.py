"""Registers the event bus of kind `nats`. It imports the client only where a deployment uses it."""

from __future__ import annotations

from typing import Any

from commutator import hookimpl
from commutator.contract.event_bus import EventBus
from commutator.contract.registration import EventBusRegister
from commutator_nats.config import NatsConfig


def _make(config: Any) -> EventBus:
    from commutator_nats.bus import NatsEventBus

    return NatsEventBus(config)


@hookimpl
def event_bus_register(register: EventBusRegister) -> None:
    register("nats", NatsConfig, _make)
