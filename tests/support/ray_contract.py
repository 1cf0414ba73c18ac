"""The launcher `ray` against the suite for launchers of agents; run by tests/e2e/test_ray.py.

Its processes have to run on a host of a Ray cluster, so this file is given to a pytest there.
"""

from __future__ import annotations

import itertools
import os

import pytest

from commutator.contract.launcher import AgentLauncher
from commutator_ray.config import RayConfig, Resources
from commutator_ray.launcher import RayLauncher
from commutator_testing.launchers import AgentLauncherContract

ADDRESS = "TEST_RAY_ADDRESS"
_numbers = itertools.count()


class TestRay(AgentLauncherContract):
    @pytest.fixture(autouse=True)
    def _cluster(self) -> None:
        self.config = RayConfig(
            kind="ray",
            address=os.environ[ADDRESS],
            cluster=f"contract-{next(_numbers)}",
            resources={"w": Resources(cpus=0.25)},
        )

    def make_launcher(self) -> AgentLauncher:
        return RayLauncher(self.config)
