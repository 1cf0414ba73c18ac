"""The launcher `kubernetes` passes the shipped suite on a real node (`make test-kube`, root)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.real_kubernetes import RealKubernetes, build_folder
from tests.support.real_node import IMAGE, RealNode, here_in_a_pod

from commutator.contract.launcher import AgentLauncher
from commutator_kubernetes.config import KubernetesLauncherConfig, PodOptions
from commutator_kubernetes.launcher import KubernetesLauncher
from commutator_testing.launchers import AgentLauncherContract

pytestmark = [pytest.mark.slow, pytest.mark.long]


@pytest.fixture(scope="module")
def node(
    real_kubernetes: RealKubernetes, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RealNode]:
    if os.geteuid() != 0 or not (build_folder() / "bin" / "kubelet").exists():
        pytest.skip("a node needs root, and `make kube`")
    with RealNode(real_kubernetes, tmp_path_factory.mktemp("node") / "run") as one:
        yield one


class TestRealNode(AgentLauncherContract):
    @pytest.fixture(autouse=True)
    def _config(self, real_kubernetes: RealKubernetes, node: RealNode, tmp_path: Path) -> None:
        folder = tmp_path / "config"
        folder.mkdir()
        self.config = KubernetesLauncherConfig(
            kind="kubernetes",
            cluster="test",
            namespace="default",
            image=IMAGE,
            kubeconfig=real_kubernetes.kubeconfig(folder),
            resources={"w": PodOptions(cpus=0.1, template=here_in_a_pod(tmp_path))},
        )

    def make_launcher(self) -> AgentLauncher:
        return KubernetesLauncher(self.config)
