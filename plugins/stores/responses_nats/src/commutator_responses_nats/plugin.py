"""Registers the response store of kind `nats`. It imports the client only where one is used."""

from __future__ import annotations

from commutator import hookimpl
from commutator.contract.registration import ResponseStoreRegister
from commutator.contract.response_store import ResponseStore
from commutator_responses_nats.config import NatsStoreConfig


def _make(config: NatsStoreConfig) -> ResponseStore:
    from commutator_responses_nats.store import NatsStore

    return NatsStore(config)


@hookimpl
def response_store_register(register: ResponseStoreRegister) -> None:
    """Kind `nats`: all hosts share them."""
    register("nats", NatsStoreConfig, _make)
