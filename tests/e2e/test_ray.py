"""Workers on a real Ray of three nodes, each in a network namespace: lost, cut off, ended."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.support.hosts import Host, hosts, why_not
from tests.support.ray_deployment import AGENT, Deployment, pids_of
from tests.support.ray_hosts import RayHosts
from tests.support.steady_traffic import SteadyTraffic, stream

from commutator.engine.client import LOST_AFTER_S

ROOT = Path(__file__).resolve().parents[2]
SUITE = "tests/support/ray_contract.py"
ADDRESS = "TEST_RAY_ADDRESS"
NO_RAY = None if importlib.util.find_spec("ray") else "Ray is not installed"
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(NO_RAY is not None, reason=NO_RAY or ""),
    pytest.mark.skipif(why_not() is not None, reason=why_not() or ""),
]
CUT_OFF_S = 8.0
PER_S = 3.0
LOADED_S = 2.0
"""What a loaded machine takes to compute a prompt again, and to notice what the test looks for."""


def ours(host: Host) -> dict[int, bytes]:
    """Agents, workers and guards on a host."""
    return pids_of(host, AGENT, b"commutator_sim", b"guard.py")


@pytest.fixture(scope="module")
def deployment() -> Iterator[Deployment]:
    with hosts(3) as places, RayHosts(places) as ray:
        engine = "{kind: sim, name: w, replicas: 2}"
        running = Deployment(ray, engine, cpus=2, cut_off_s=CUT_OFF_S)
        running.serve()
        running.start_up_s = running.until(lambda: len(running.workers()) == 2)
        yield running
        running.end(signal.SIGKILL)


@pytest.fixture(scope="module")
def expected(deployment: Deployment) -> Mapping[str, str]:
    """Prompts, and their answers while nothing is wrong."""
    door = deployment.head.address
    answers = [stream(door, f"{number}. Tell me about the river.") for number in range(6)]
    assert [one.problem for one in answers] == [""] * len(answers)
    return {one.prompt: one.text for one in answers}


@contextmanager
def nothing_lost(
    deployment: Deployment, expected: Mapping[str, str], struck: str
) -> Iterator[list[float]]:
    """Streams run, some of the worker ``struck``; each is whole, and those go on in time.

    The block puts the moment at which the worker is lost into the list.
    """
    moments: list[float] = []
    with SteadyTraffic([deployment.head.address], expected, PER_S) as traffic:
        traffic.until_streaming_at(struck)
        yield moments
        outcomes = traffic.outcomes()
    assert traffic.lost(outcomes) == []
    (lost_s,) = moments
    in_flight = [one for one in outcomes if one.runs_at(struck, lost_s)]
    assert in_flight
    gap_s = max(one.longest_gap_s for one in in_flight)
    print(f"{len(in_flight)} streams went on elsewhere, the longest gap in one was {gap_s:.1f} s")
    assert gap_s < LOST_AFTER_S + LOADED_S


def away_from_the_head(deployment: Deployment) -> tuple[str, Host]:
    """A worker on another node than the head's, and that node."""
    return next(
        (worker, deployment.host_named(address))
        for worker, address in deployment.workers().items()
        if address != deployment.head.address
    )


def test_1_workers_serve_from_the_nodes_of_ray(deployment: Deployment) -> None:
    # Each takes the two CPUs of a node, so they are on different ones.
    assert len(set(deployment.workers().values())) == 2
    assert {deployment.ask() for _ in range(4)} == set(deployment.workers())
    assert "would place the workers anew; stop it first" in deployment.down()


def test_1_the_launcher_keeps_its_contract(deployment: Deployment) -> None:
    """Beside the deployment: agents of other clusters are left alone."""
    before = deployment.workers()
    argv = deployment.head.command(sys.executable, "-m", "pytest", "-x", SUITE)
    env = {**deployment.ray.env, ADDRESS: deployment.ray.address}
    done = subprocess.run(argv, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "8 passed" in done.stdout
    assert deployment.workers() == before


def test_2_the_next_launching_process_finds_them(deployment: Deployment) -> None:
    before = deployment.workers()
    agents = [pids_of(host, AGENT).keys() for host in deployment.ray.hosts]
    deployment.end(signal.SIGKILL)
    deployment.serve()
    deployment.until(lambda: deployment.workers() == before)
    assert [pids_of(host, AGENT).keys() for host in deployment.ray.hosts] == agents
    assert deployment.ask() in before


def test_3_a_killed_actor_takes_its_worker_along_and_comes_back(
    deployment: Deployment, expected: Mapping[str, str]
) -> None:
    name, place = away_from_the_head(deployment)
    (agent,) = pids_of(place, AGENT)
    worker = set(ours(place)) - {agent}
    parent = int(Path(f"/proc/{agent}/stat").read_text().rpartition(")")[2].split()[1])
    with nothing_lost(deployment, expected, name) as lost_at_s:
        lost_at_s.append(time.monotonic())
        os.kill(parent, signal.SIGKILL)
        ended_s = deployment.until(lambda: agent not in ours(place))
        print(f"the agent of a killed actor ended after {ended_s:.1f} s")
        deployment.until(lambda: not worker & set(ours(place)))
    deployment.until(lambda: len(deployment.workers()) == 2 and pids_of(place, AGENT))
    deployment.ask()


def test_4_what_a_lost_node_had_runs_on_another(
    deployment: Deployment, expected: Mapping[str, str]
) -> None:
    before = deployment.workers()
    name, lost = away_from_the_head(deployment)
    kept = {worker for worker, address in before.items() if address != lost.address}
    with nothing_lost(deployment, expected, name) as lost_at_s:
        lost_at_s.append(time.monotonic())
        deployment.ray.end(lost)
        moved_s = deployment.until(
            lambda: (
                kept <= set(deployment.workers())
                and len(deployment.workers()) == 2
                and lost.address not in deployment.workers().values()
            )
        )
    print(
        f"a worker of a lost node was ready on another after {moved_s:.1f} s; the first start of "
        f"the deployment took {deployment.start_up_s:.1f} s"
    )
    assert moved_s < deployment.start_up_s + 10.0
    assert {deployment.ask() for _ in range(4)} == set(deployment.workers())
    deployment.ray.start(lost)


def test_5_nothing_serves_on_a_node_that_is_cut_off(
    deployment: Deployment, expected: Mapping[str, str]
) -> None:
    name, lost = away_from_the_head(deployment)
    assert pids_of(lost, AGENT)
    try:
        with nothing_lost(deployment, expected, name) as lost_at_s:
            lost_at_s.append(time.monotonic())
            lost.set_link(False)
            # The agent stops its worker; or Ray's node ends first, and the guard both.
            ended_s = deployment.until(lambda: not pids_of(lost, b"commutator_sim"))
            print(f"the worker of a node that was cut off ended after {ended_s:.1f} s")
            deployment.until(
                lambda: (
                    len(deployment.workers()) == 2
                    and lost.address not in deployment.workers().values()
                )
            )
    finally:
        lost.set_link(True)
    # It finds itself replaced: Ray ends what ran there.
    deployment.until(lambda: not pids_of(lost, AGENT))
    deployment.until(lambda: len(deployment.workers()) == 2)


def test_6_workers_serve_on_without_the_head_of_ray(
    deployment: Deployment, expected: Mapping[str, str]
) -> None:
    """It comes back without its state, and finds the nodes that are started again."""
    (head,) = pids_of(deployment.head, b"gcs_server")
    on_others = {w for w, place in deployment.workers().items() if place != deployment.head.address}
    assert on_others
    with SteadyTraffic([deployment.head.address], expected, PER_S) as traffic:
        traffic.until_streaming_at(next(iter(on_others)))
        killed_s = time.monotonic()
        os.kill(head, signal.SIGKILL)
        time.sleep(20)
        assert on_others <= set(deployment.workers())
        outcomes = traffic.outcomes()
    assert traffic.lost(outcomes) == []
    assert max(one.longest_gap_s for one in outcomes) < LOADED_S
    later = [one for one in outcomes if one.began_s > killed_s + LOST_AFTER_S + LOADED_S]
    assert {one.worker for one in later} >= on_others
    deployment.ray.start_again()
    began_s = deployment.until(
        lambda: (
            all(len(pids_of(host, b"raylet/raylet")) == 1 for host in deployment.ray.hosts)
            and len(deployment.workers()) == 2
            and sum(len(pids_of(host, AGENT)) for host in deployment.ray.hosts) == 2
        )
    )
    print(f"both workers were ready {began_s:.1f} s after the head and the nodes had started again")
    assert {deployment.ask() for _ in range(4)} == set(deployment.workers())


def test_7_down_leaves_no_process(deployment: Deployment) -> None:
    names = sorted(deployment.workers())
    deployment.end()
    left = [pid for host in deployment.ray.hosts for pid in pids_of(host, AGENT)]
    assert len(left) == len(names), "workers outlive `commutator serve`"
    said = deployment.down()
    assert said.count("is stopped") == 2, said
    deployment.until(lambda: not any(map(ours, deployment.ray.hosts)), 30)
    assert "no worker runs" in deployment.down()
    deployment.serve()  # for the fixture to end
