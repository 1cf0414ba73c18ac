"""What a launcher plugin implements, and what it is given."""

from commutator.contract.launcher import (
    AgentLauncher,
    AgentLauncherConfig,
    AgentPlan,
    AgentState,
    LaunchedProcess,
    Launcher,
    LauncherConfig,
    LauncherContext,
    LaunchPlan,
    PlacedAgent,
)
from commutator.contract.registration import LauncherRegister

__all__ = [
    "AgentLauncher",
    "AgentLauncherConfig",
    "AgentPlan",
    "AgentState",
    "LaunchPlan",
    "LaunchedProcess",
    "Launcher",
    "LauncherConfig",
    "LauncherContext",
    "LauncherRegister",
    "PlacedAgent",
]
