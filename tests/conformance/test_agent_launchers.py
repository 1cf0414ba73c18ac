"""Agents on this machine pass the suite for launchers of agents, by what hosts run of them."""

from __future__ import annotations

from typing import Any

import pytest
from tests.support.hosted_agents import HostedAgents

from commutator.contract.launcher import AgentLauncher
from commutator_testing.launchers import AgentLauncherContract

pytestmark = pytest.mark.slow


class TestHosted(AgentLauncherContract):
    @pytest.fixture(autouse=True)
    def _cluster(self) -> None:
        self.cluster: dict[str, Any] = {}

    def make_launcher(self) -> AgentLauncher:
        return HostedAgents(self.cluster)
