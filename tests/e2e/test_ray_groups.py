"""A worker over two nodes of a real Ray: its ranks start together, and are lost together.

Hosts are network namespaces. The engine is a stand-in (``ranked_plugin``); vLLM over two nodes is
in tests/e2e/vllm/test_vllm_on_nodes.py.
"""

from __future__ import annotations

import importlib.util
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.hosts import Host, hosts, why_not
from tests.support.ranked_plugin import MODULE, install
from tests.support.ray_deployment import AGENT, Deployment, pids_of
from tests.support.ray_hosts import RayHosts

NO_RAY = None if importlib.util.find_spec("ray") else "Ray is not installed"
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(NO_RAY is not None, reason=NO_RAY or ""),
    pytest.mark.skipif(why_not() is not None, reason=why_not() or ""),
]
ENGINE = "{kind: ranked, name: w, nodes: 2}"
RANK = MODULE.encode()


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    env = install(tmp_path_factory.mktemp("plugin"))
    with hosts(3) as places, RayHosts(places, env=env) as ray:
        running = Deployment(ray, ENGINE, cpus=2, cut_off_s=8.0, kv_network="isolated")
        running.serve()
        running.start_up_s = running.until(running.workers)
        yield running
        running.end(signal.SIGKILL)


def ranks(deployment: Deployment) -> dict[Host, int]:
    """The process of each rank, by its host."""
    found = {}
    for host in deployment.ray.hosts:
        for pid in pids_of(host, RANK):
            assert host not in found, "one rank on a host"
            found[host] = pid
    return found


def leader(deployment: Deployment) -> Host:
    """The host of rank 0."""
    (address,) = deployment.workers().values()
    return deployment.host_named(address)


def until_anew(deployment: Deployment, before: dict[Host, int]) -> float:
    """Wait until the worker serves again, with no process of before; the seconds that it took."""

    def serves() -> bool:
        now = ranks(deployment)
        # The record of a worker whose node was lost is there until its lease lapses.
        leaders = map(deployment.host_named, deployment.workers().values())
        anew = not set(before.values()) & set(now.values())
        return anew and len(now) == 2 and any(host in now for host in leaders)

    return deployment.until(serves)


def test_1_the_ranks_of_a_worker_are_on_different_nodes(deployment: Deployment) -> None:
    there = ranks(deployment)
    assert len(there) == 2
    assert leader(deployment) in there
    assert deployment.ask() in deployment.workers()


@pytest.mark.parametrize("which", ["rank 0", "rank 1"])
def test_2_when_a_rank_ends_all_start_anew(deployment: Deployment, which: str) -> None:
    before, first = ranks(deployment), leader(deployment)
    (pid,) = (pid for host, pid in before.items() if (host is first) == (which == "rank 0"))
    os.kill(pid, signal.SIGKILL)
    took_s = until_anew(deployment, before)
    print(f"{which} was killed; the worker served again after {took_s:.1f} s")
    assert set(ranks(deployment)) == set(before), "on the same nodes"
    assert deployment.ask() in deployment.workers()


def test_3_a_killed_actor_takes_its_rank_along_and_all_start_anew(deployment: Deployment) -> None:
    before, first = ranks(deployment), leader(deployment)
    (other,) = set(before) - {first}
    (agent,) = pids_of(other, AGENT)
    parent = int(Path(f"/proc/{agent}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(parent, signal.SIGKILL)
    took_s = until_anew(deployment, before)
    print(f"the actor of rank 1 was killed; the worker served again after {took_s:.1f} s")
    assert deployment.ask() in deployment.workers()


@pytest.mark.parametrize("which", [1, 2])
def test_4_a_group_that_lost_a_node_is_placed_anew(deployment: Deployment, which: int) -> None:
    """Twice, so that it is once the node of rank 0 or once that of rank 1, as they are placed."""
    before, first = ranks(deployment), leader(deployment)
    lost = next(host for host in before if host is not deployment.head)
    was = "rank 0" if lost is first else "rank 1"
    deployment.ray.end(lost)
    took_s = until_anew(deployment, before)
    assert lost not in ranks(deployment)
    print(
        f"the node of {was} was lost; the worker served again after {took_s:.1f} s; the first "
        f"start of the deployment took {deployment.start_up_s:.1f} s"
    )
    assert took_s < deployment.start_up_s + 10.0
    assert deployment.ask() in deployment.workers()
    deployment.ray.start(lost)
    deployment.ray.until_started(lost)


def test_5_a_node_that_is_cut_off_runs_no_rank(deployment: Deployment) -> None:
    before = ranks(deployment)
    lost = next(host for host in before if host is not deployment.head)
    try:
        lost.set_link(False)
        ended_s = deployment.until(lambda: not pids_of(lost, RANK))
        print(f"the rank on a node that was cut off ended after {ended_s:.1f} s")
        until_anew(deployment, before)
    finally:
        lost.set_link(True)
    deployment.until(lambda: not pids_of(lost, AGENT))
    assert len(ranks(deployment)) == 2
    assert deployment.ask() in deployment.workers()


def test_6_down_leaves_no_process(deployment: Deployment) -> None:
    deployment.end()
    assert len(ranks(deployment)) == 2, "workers outlive `commutator serve`"
    said = deployment.down()
    assert "w-0 is stopped" in said, said
    deployment.until(
        lambda: not any(pids_of(h, AGENT, RANK, b"guard.py") for h in deployment.ray.hosts), 30
    )
    assert "no worker runs" in deployment.down()
    deployment.serve()  # for the fixture to end
