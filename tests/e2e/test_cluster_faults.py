"""What befalls hosts, networks and etcd under steady traffic: no request is lost.

One cluster serves all tests: etcd on three hosts of its own, h1 with a front door, h2 with a front
door and two workers, h3 with two workers. docs/how-to/cluster.md has the table of what is measured.
"""

from __future__ import annotations

import re
import signal
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest
from tests.support.clocks import Clocks
from tests.support.cluster_faults import cut_off
from tests.support.cluster_views import (
    WORKERS,
    Demo,
    age_s,
    engines_of,
    peers_of,
    ready_workers,
    running,
    whole_again,
    workers_of,
)
from tests.support.hosts import Host, why_not
from tests.support.steady_traffic import Outcome, SteadyTraffic, stream

from commutator.engine.client import LOST_AFTER_S

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(why_not() is not None, reason=why_not() or ""),
]

LEASE_S = 5.0
"""``runtime.lease_s``, by default."""
REMOVED_S = LEASE_S + 1.0
CONVERGED_S = 2.0
LOADED_S = 2.0
"""What a loaded machine takes to compute a prompt again, and to notice what the test looks for."""
PER_S = 3.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[Demo]:
    with running("sim", "etcd", etcd_apart=True) as demo:
        demo.start()
        yield demo


@pytest.fixture(scope="module")
def expected(cluster: Demo) -> Mapping[str, str]:
    """Prompts, and their answers while nothing is wrong."""
    prompts = [f"{number}. Tell me about the river, and the tower at it." for number in range(8)]
    answers = [stream(cluster.hosts[1].address, prompt) for prompt in prompts]
    assert [one.problem for one in answers] == [""] * len(prompts)
    assert len({one.text for one in answers}) == len(prompts)
    return {one.prompt: one.text for one in answers}


@pytest.fixture
def traffic(cluster: Demo, expected: Mapping[str, str]) -> Iterator[SteadyTraffic]:
    """At both front doors; workers of h3 answer some. Before and after the cluster is whole."""
    whole_again(cluster)
    doors = [door.address for door in cluster.hosts[:2]]
    with SteadyTraffic(doors, expected, PER_S) as running_traffic:
        running_traffic.until_streaming_at("h3")
        yield running_traffic
    whole_again(cluster)


def measured(what: str, since_s: float, limit_s: float, true: Callable[[], bool]) -> None:
    """Wait until something is so; fails when that is longer than ``limit_s`` after ``since_s``."""
    while not true():
        assert time.monotonic() < since_s + limit_s + LOADED_S, what
        time.sleep(0.05)
    print(f"{what}: {time.monotonic() - since_s:.1f} s (promised: {limit_s:g})")


def last_at(outcomes: Sequence[Outcome], victim: Host, since_s: float) -> float:
    """How long after ``since_s`` a request was last begun that workers of a host answered."""
    prefix = f"{victim.name}-"
    begun = [one.began_s - since_s for one in outcomes if one.worker.startswith(prefix)]
    took_s = max([0.0, *begun])
    print(f"last request sent to {victim.name} after {took_s:.1f} s, of {len(outcomes)} in all")
    return took_s


def longest_gap(outcomes: Sequence[Outcome]) -> float:
    gap_s = max(one.longest_gap_s for one in outcomes)
    print(f"longest gap in one of {len(outcomes)} streams: {gap_s:.1f} s")
    return gap_s


def assert_migrated_in_time(outcomes: Sequence[Outcome], victim: Host, lost_s: float) -> None:
    """Streams of a lost host went on elsewhere, and nothing that came later waited for it."""
    struck = [one for one in outcomes if one.runs_at(victim.name, lost_s)]
    assert struck
    print(f"streams in flight at {victim.name}: {len(struck)}")
    assert longest_gap(struck) < LOST_AFTER_S + LOADED_S
    later = [one for one in outcomes if one.began_s > lost_s + LOST_AFTER_S + LOADED_S]
    assert later
    assert not any(one.worker.startswith(f"{victim.name}-") for one in later)
    assert longest_gap(later) < LOADED_S


def known_at(door: Host, worker_host: Host) -> list[str]:
    """The workers of a host that a front door has in its view."""
    return [name for name in workers_of(door) if name.startswith(f"{worker_host.name}-")]


def measure_removal(demo: Demo, victim: Host, since_s: float) -> None:
    """Both front doors have removed the workers of a host in time."""
    doors = demo.hosts[:2]
    measured(
        "both front doors have removed the workers", since_s, REMOVED_S,
        lambda: [known_at(door, victim) for door in doors] == [[], []],
    )  # fmt: skip


def migrations_at(door: Host) -> float:
    """Requests that a front door has moved from one worker to another so far."""
    with urllib.request.urlopen(f"http://{door.address}:8000/metrics", timeout=5) as page:
        text = page.read().decode()
    found = re.findall(r"^commutator_migrations_total\{[^}]*\} (\S+)$", text, re.MULTILINE)
    return sum(map(float, found))


@pytest.mark.parametrize("told", [False, True], ids=["no packet", "connections reset"])
def test_the_host_of_workers_is_killed(cluster: Demo, traffic: SteadyTraffic, told: bool) -> None:
    _, _, h3 = cluster.hosts
    killed_s = time.monotonic()
    if not told:
        h3.set_link(False)
    cluster.end(h3, signal.SIGKILL)
    measure_removal(cluster, h3, killed_s)
    time.sleep(2.0)
    outcomes = traffic.outcomes()
    h3.set_link(True)
    cluster.begin_commutator(h3)
    assert traffic.lost(outcomes) == []
    assert last_at(outcomes, h3, killed_s) < LOST_AFTER_S + LOADED_S
    assert_migrated_in_time(outcomes, h3, killed_s)


def test_the_host_of_a_front_door_is_killed(cluster: Demo, traffic: SteadyTraffic) -> None:
    h1, h2, _ = cluster.hosts
    killed_s = time.monotonic()
    h1.set_link(False)
    cluster.end(h1, signal.SIGKILL)
    measured("its load no longer counts", killed_s, 1.0, lambda: peers_of(h2) == 0)
    time.sleep(3.0)
    h1.set_link(True)  # so that its clients are told
    outcomes = traffic.outcomes()
    cluster.begin_commutator(h1)
    assert traffic.lost(outcomes, but_at=h1.address) == []
    assert longest_gap([one for one in outcomes if one.door == h2.address]) < LOADED_S


@pytest.mark.parametrize("pause_s", [2.0, 30.0])
def test_the_host_of_workers_is_paused(
    cluster: Demo, traffic: SteadyTraffic, pause_s: float
) -> None:
    """For less than what pings allow, and for much longer than a lease."""
    h1, h2, h3 = cluster.hosts
    engines = engines_of(h3)
    paused_s = time.monotonic()
    h3.signal(signal.SIGSTOP)
    try:
        time.sleep(pause_s)
        known = [known_at(door, h3) for door in (h1, h2)]
    finally:
        h3.signal(signal.SIGCONT)
    resumed_s = time.monotonic()
    measured(
        "its workers serve again", resumed_s, LEASE_S,
        lambda: all(ready_workers(door) == WORKERS for door in (h1, h2)),
    )  # fmt: skip
    time.sleep(2.0)
    outcomes = traffic.outcomes()
    assert traffic.lost(outcomes) == []
    assert engines_of(h3) == engines, "no engine was started anew"
    if pause_s < LOST_AFTER_S:
        assert known == [["h3-w-0", "h3-w-1"]] * 2, "nothing was removed"
        assert any(one.runs_at(h3.name, paused_s) for one in outcomes)
        return
    assert known == [[], []]
    meanwhile = [one for one in outcomes if one.began_s < resumed_s]
    assert last_at(meanwhile, h3, paused_s) < LOST_AFTER_S + LOADED_S
    assert_migrated_in_time(meanwhile, h3, paused_s)


def test_workers_are_cut_off_from_etcd(cluster: Demo, traffic: SteadyTraffic) -> None:
    """Not from front doors: they get nothing new, and finish what they had."""
    h1, h2, h3 = cluster.hosts
    engines = engines_of(h3)
    moved = [migrations_at(door) for door in (h1, h2)]
    cut_s = time.monotonic()
    with cut_off(h3, *cluster.etcd_hosts):
        measure_removal(cluster, h3, cut_s)
        removed_s = time.monotonic()
        time.sleep(4.0)
    healed_s = time.monotonic()
    measured(
        "they are back", healed_s, CONVERGED_S,
        lambda: all(len(known_at(door, h3)) == 2 for door in (h1, h2)),
    )  # fmt: skip
    outcomes = traffic.outcomes()
    assert traffic.lost(outcomes) == []
    assert engines_of(h3) == engines, "no engine was started anew"
    assert longest_gap(outcomes) < LOADED_S
    meanwhile = [one for one in outcomes if one.began_s < healed_s]
    assert last_at(meanwhile, h3, cut_s) < REMOVED_S + LOADED_S
    assert any(one.runs_at(h3.name, removed_s) for one in outcomes)
    assert [migrations_at(door) for door in (h1, h2)] == moved, "no stream was broken"


def test_a_front_door_is_cut_off_from_etcd(cluster: Demo, traffic: SteadyTraffic) -> None:
    """It serves on, also when a host is lost meanwhile, and tells how old its view is."""
    h1, h2, h3 = cluster.hosts
    with cut_off(h1, *cluster.etcd_hosts):
        time.sleep(3.0)
        assert age_s(h1) > 2.0
        traffic.until_streaming_at("h3", h1.address)
        killed_s = time.monotonic()
        h3.set_link(False)
        cluster.end(h3, signal.SIGKILL)
        time.sleep(LEASE_S + 4.0)
        assert len(known_at(h1, h3)) == 2, "silence removes nobody"
        assert known_at(h2, h3) == []
    healed_s = time.monotonic()
    measured("its view is that of the other", healed_s, CONVERGED_S, lambda: not known_at(h1, h3))
    measured("its view is fresh", healed_s, CONVERGED_S, lambda: age_s(h1) < 2.0)
    outcomes = traffic.outcomes()
    h3.set_link(True)
    cluster.begin_commutator(h3)
    assert traffic.lost(outcomes) == []
    assert last_at(outcomes, h3, killed_s) < LOST_AFTER_S + LOADED_S
    assert_migrated_in_time(outcomes, h3, killed_s)


def test_workers_are_cut_off_from_one_of_two_front_doors(
    cluster: Demo, traffic: SteadyTraffic
) -> None:
    """Only that one stops asking them."""
    h1, h2, h3 = cluster.hosts
    traffic.until_streaming_at("h3", h1.address)
    with cut_off(h3, h1):
        cut_s = time.monotonic()
        time.sleep(15.0)
        healed_s = time.monotonic()
    time.sleep(3.0)
    outcomes = traffic.outcomes()
    assert traffic.lost(outcomes) == []
    meanwhile = [one for one in outcomes if one.began_s < healed_s]
    mine = [one for one in meanwhile if one.door == h1.address]
    others = [one for one in meanwhile if one.door == h2.address]
    assert last_at(mine, h3, cut_s) < LOST_AFTER_S + LOADED_S
    assert_migrated_in_time(mine, h3, cut_s)
    assert last_at(others, h3, cut_s) > LOST_AFTER_S + LOADED_S
    assert longest_gap(others) < LOADED_S


def test_members_of_etcd_are_killed_in_turn(cluster: Demo, traffic: SteadyTraffic) -> None:
    """Each 10 s one after the other, so that the leader is among them: nobody notices."""
    h1, h2, _ = cluster.hosts
    for member in cluster.etcd_hosts:
        cluster.end(member, signal.SIGKILL)
        time.sleep(5.0)
        assert [ready_workers(door) for door in (h1, h2)] == [WORKERS] * 2
        cluster.begin_etcd(member)
        time.sleep(5.0)
    cluster.until_etcd_answers()
    outcomes = traffic.outcomes()
    assert traffic.lost(outcomes) == []
    assert longest_gap(outcomes) < LOADED_S


def test_etcd_is_without_quorum(cluster: Demo, traffic: SteadyTraffic) -> None:
    h1, h2, _ = cluster.hosts
    for member in cluster.etcd_hosts[:2]:
        cluster.end(member, signal.SIGKILL)
    time.sleep(60.0)
    assert [ready_workers(door) for door in (h1, h2)] == [WORKERS] * 2, "silence removes nobody"
    assert min(age_s(h1), age_s(h2)) > 45.0
    for member in cluster.etcd_hosts[:2]:
        cluster.begin_etcd(member)
    cluster.until_etcd_answers()
    answers_s = time.monotonic()
    measured("the views are fresh", answers_s, CONVERGED_S, lambda: max(age_s(h1), age_s(h2)) < 2.0)
    outcomes = traffic.outcomes()
    assert traffic.lost(outcomes) == []
    assert longest_gap(outcomes) < LOADED_S


def test_a_front_door_is_started_while_all_of_etcd_is_gone(
    cluster: Demo, traffic: SteadyTraffic
) -> None:
    """Clients cannot reach it until it knows the workers, and it says why; the other serves on."""
    h1, h2, _ = cluster.hosts
    for member in cluster.etcd_hosts:
        cluster.end(member, signal.SIGKILL)
    cluster.end(h1, signal.SIGTERM)
    cluster.begin_commutator(h1)
    log = cluster.folder / "h1-frontend.log"
    cluster.until(
        "its reason", lambda: "the registry has not said which workers there are" in log.read_text()
    )
    assert "refused" in stream(h1.address, "Does it answer?").problem
    for member in cluster.etcd_hosts:
        cluster.begin_etcd(member)
    cluster.until_etcd_answers()
    answers_s = time.monotonic()
    measured("it serves", answers_s, CONVERGED_S, lambda: ready_workers(h1) == WORKERS)
    outcomes = traffic.outcomes()
    assert traffic.lost(outcomes, but_at=h1.address) == []
    assert longest_gap([one for one in outcomes if one.door == h2.address]) < LOADED_S


@pytest.fixture
def clocks(cluster: Demo, tmp_path: Path) -> Iterator[Clocks]:
    """Those of h1 and h3."""
    moved = [host for host in cluster.hosts if host.name in ("h1", "h3")]
    made = Clocks(tmp_path)
    for host in moved:
        cluster.env[host.name] = made.env_of(host.name)
        cluster.end(host, signal.SIGTERM)
        cluster.begin_commutator(host)
    yield made
    cluster.env.clear()
    for host in moved:
        cluster.end(host, signal.SIGTERM)
        cluster.begin_commutator(host)
    whole_again(cluster)


def test_clocks_jump(cluster: Demo, clocks: Clocks, traffic: SteadyTraffic) -> None:
    """An hour back and an hour ahead: leases, pings and timeouts count lengths of time."""
    h1, h2, _ = cluster.hosts
    clocks.jump("h1", -3600)
    clocks.jump("h3", 3600)
    watched_until_s = time.monotonic() + 3 * LEASE_S
    while time.monotonic() < watched_until_s:
        assert [ready_workers(door) for door in (h1, h2)] == [WORKERS] * 2, "no lease lapsed"
        time.sleep(0.2)
    outcomes = traffic.outcomes()
    assert traffic.lost(outcomes) == []
    assert longest_gap(outcomes) < LOADED_S
