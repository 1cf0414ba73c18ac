"""What a launcher plugin implements, and what it is given."""

from commutator.contract.launcher import (
    LaunchedProcess,
    Launcher,
    LauncherConfig,
    LauncherContext,
    LaunchPlan,
)
from commutator.contract.registration import LauncherRegister

__all__ = [
    "LaunchPlan",
    "LaunchedProcess",
    "Launcher",
    "LauncherConfig",
    "LauncherContext",
    "LauncherRegister",
]
