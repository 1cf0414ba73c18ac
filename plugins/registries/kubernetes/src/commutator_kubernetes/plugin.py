"""Registers the registry and the launcher of kind `kubernetes`. aiohttp is imported on use."""

from __future__ import annotations

from typing import Any

from commutator import hookimpl
from commutator.contract.launcher import AgentLauncher, LauncherContext
from commutator.contract.registration import LauncherRegister, RegistryRegister
from commutator.contract.registry import Registry
from commutator_kubernetes.config import KubernetesLauncherConfig, KubernetesRegistryConfig


def _make(config: Any) -> Registry:
    from commutator_kubernetes.registry import KubernetesRegistry

    return KubernetesRegistry(config)


@hookimpl
def registry_register(register: RegistryRegister) -> None:
    register("kubernetes", KubernetesRegistryConfig, _make)


def _launch(config: Any, context: LauncherContext) -> AgentLauncher:
    from commutator_kubernetes.launcher import KubernetesLauncher

    del context  # of processes on this machine
    return KubernetesLauncher(config)


@hookimpl
def launcher_register(register: LauncherRegister) -> None:
    register("kubernetes", KubernetesLauncherConfig, _launch)
