"""Registers the registry of kind `kubernetes`. It imports aiohttp only where it is used."""

from __future__ import annotations

from typing import Any

from commutator import hookimpl
from commutator.contract.registration import RegistryRegister
from commutator.contract.registry import Registry
from commutator_kubernetes.config import KubernetesRegistryConfig


def _make(config: Any) -> Registry:
    from commutator_kubernetes.registry import KubernetesRegistry

    return KubernetesRegistry(config)


@hookimpl
def registry_register(register: RegistryRegister) -> None:
    register("kubernetes", KubernetesRegistryConfig, _make)
