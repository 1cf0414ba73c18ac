"""Registers the launcher of kind `ray`. It imports Ray only in the processes that talk to it."""

from __future__ import annotations

from typing import Any

from commutator import hookimpl
from commutator.contract.launcher import AgentLauncher, LauncherContext
from commutator.contract.registration import LauncherRegister
from commutator_ray.config import RayConfig


def _make(config: Any, context: LauncherContext) -> AgentLauncher:
    from commutator_ray.launcher import RayLauncher

    del context  # of processes on this machine
    return RayLauncher(config)


@hookimpl
def launcher_register(register: LauncherRegister) -> None:
    register("ray", RayConfig, _make)
