"""Registers the registry of kind `etcd`. It imports gRPC only where a deployment uses it."""

from __future__ import annotations

from typing import Any

from commutator import hookimpl
from commutator.contract.registration import RegistryRegister
from commutator.contract.registry import Registry
from commutator_etcd.config import EtcdConfig


def _make(config: Any) -> Registry:
    from commutator_etcd.registry import EtcdRegistry

    return EtcdRegistry(config)


@hookimpl
def registry_register(register: RegistryRegister) -> None:
    register("etcd", EtcdConfig, _make)
