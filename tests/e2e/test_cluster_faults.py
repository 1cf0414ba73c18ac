"""What befalls hosts, networks and etcd under steady traffic: no request is lost.

One cluster serves all tests: etcd on three hosts of its own, h1 with a front door, h2 with a front
door and two workers, h3 with two workers. docs/how-to/cluster.md has the table of what is measured.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.support.hosts import Host, why_not
from tests.support.steady_traffic import Outcome, SteadyTraffic, stream

from commutator.engine.client import MAX_MISSES, PING_EVERY_S

sys.path.append(str(Path(__file__).resolve().parents[2] / "scripts"))
from cluster_demo import WORKERS, Demo, get, peers_of, ready_workers, running, workers_of

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(why_not() is not None, reason=why_not() or ""),
]

PINGS_S = PING_EVERY_S * MAX_MISSES
LEASE_S = 5.0
"""``runtime.lease_s``, by default."""
CONVERGED_S = 2.0
LOADED_S = 2.0
"""What a loaded machine takes to compute a prompt again, and to notice what the test looks for."""
PER_S = 3.0
CLOCK = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <sys/time.h>
#include <time.h>
static time_t offset(void) { const char *s = getenv("CLOCK_OFFSET_S"); return s ? atol(s) : 0; }
int clock_gettime(clockid_t id, struct timespec *ts) {
  int (*real)(clockid_t, struct timespec *) = dlsym(RTLD_NEXT, "clock_gettime");
  int result = real(id, ts);
  if (!result && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE)) ts->tv_sec += offset();
  return result;
}
int gettimeofday(struct timeval *tv, void *zone) {
  struct timespec ts;
  int result = clock_gettime(CLOCK_REALTIME, &ts);
  tv->tv_sec = ts.tv_sec;
  tv->tv_usec = ts.tv_nsec / 1000;
  return result;
}
time_t time(time_t *t) {
  struct timespec ts;
  clock_gettime(CLOCK_REALTIME, &ts);
  if (t) *t = ts.tv_sec;
  return ts.tv_sec;
}
"""
"""A library that shifts the time of day of a process; lengths of time stay right."""


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
    """At both front doors; before and after each test the cluster is whole."""
    whole_again(cluster)
    doors = [door.address for door in cluster.hosts[:2]]
    with SteadyTraffic(doors, expected, PER_S) as running_traffic:
        time.sleep(1.0)
        yield running_traffic
    whole_again(cluster)


def whole_again(demo: Demo) -> None:
    doors = demo.hosts[:2]
    demo.until(
        "the workers", lambda: all(ready_workers(door) == WORKERS for door in doors), timeout_s=60.0
    )
    demo.until("front doors to share", lambda: all(peers_of(d) == 1 for d in doors), timeout_s=60.0)


def measured(what: str, true: Callable[[], bool], limit_s: float) -> float:
    """How long it takes until something is so; fails when that is longer than ``limit_s``."""
    began_s = time.monotonic()
    while not true():
        assert time.monotonic() < began_s + limit_s + LOADED_S, what
        time.sleep(0.05)
    took_s = time.monotonic() - began_s
    print(f"{what}: {took_s:.1f} s (promised: {limit_s:g})")
    return took_s


def last_at(outcomes: Sequence[Outcome], victim: Host, since_s: float) -> float:
    """How long after ``since_s`` a request was last begun that was sent to workers of a host."""
    prefix = f"{victim.name}-"
    begun = [one.began_s - since_s for one in outcomes if one.worker.startswith(prefix)]
    took_s = max([0.0, *begun])
    print(f"last request sent to {victim.name} after {took_s:.1f} s, of {len(outcomes)} in all")
    return took_s


def longest_gap(outcomes: Sequence[Outcome]) -> float:
    gap_s = max(one.longest_gap_s for one in outcomes)
    print(f"longest gap in a stream {gap_s:.1f} s")
    return gap_s


def known_at(door: Host, worker_host: Host) -> list[str]:
    """The workers of a host that a front door has in its view."""
    return [name for name in workers_of(door) if name.startswith(f"{worker_host.name}-")]


def age_s(door: Host) -> float:
    health = get(f"http://{door.address}:8000/health") or {}
    return float(health.get("registry_age_s") or 0.0)


def engines_of(host: Host) -> set[int]:
    """The processes of the engines that run on a host."""
    return {
        pid for pid in host.pids() if b"commutator_sim" in Path(f"/proc/{pid}/cmdline").read_bytes()
    }


@contextmanager
def cut_off(host: Host, *others: Host) -> Iterator[None]:
    host.cut_off(*others)
    try:
        yield
    finally:
        host.cut_off(*others, cut=False)


@pytest.mark.parametrize("told", [False, True], ids=["no packet", "connections reset"])
def test_the_host_of_workers_is_killed(cluster: Demo, traffic: SteadyTraffic, told: bool) -> None:
    h1, h2, h3 = cluster.hosts
    if not told:
        h3.set_link(False)
    killed_s = time.monotonic()
    cluster.end(h3, signal.SIGKILL)
    for door in (h1, h2):
        measured(
            f"{door.name} has removed the workers",
            lambda door=door: known_at(door, h3) == [],  # type: ignore[misc]
            LEASE_S + 1.0,
        )
    outcomes = traffic.outcomes()
    h3.set_link(True)
    cluster.begin_commutator(h3)
    assert traffic.lost(outcomes) == []
    assert last_at(outcomes, h3, killed_s) < PINGS_S + LOADED_S
    assert longest_gap(outcomes) < PINGS_S + LOADED_S


def test_the_host_of_a_front_door_is_killed(cluster: Demo, traffic: SteadyTraffic) -> None:
    h1, h2, _ = cluster.hosts
    h1.set_link(False)
    cluster.end(h1, signal.SIGKILL)
    measured("its load no longer counts", lambda: peers_of(h2) == 0, 1.0)
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
    h3.signal(signal.SIGSTOP)
    paused_s = time.monotonic()
    try:
        time.sleep(pause_s)
        known = [known_at(door, h3) for door in (h1, h2)]
    finally:
        h3.signal(signal.SIGCONT)
    resumed_s = time.monotonic()
    measured(
        "its workers serve again",
        lambda: all(ready_workers(door) == WORKERS for door in (h1, h2)),
        LEASE_S,
    )
    time.sleep(2.0)
    outcomes = traffic.outcomes()
    assert traffic.lost(outcomes) == []
    assert engines_of(h3) == engines, "no engine was started anew"
    if pause_s < PINGS_S:
        assert known == [["h3-w-0", "h3-w-1"]] * 2, "nothing was removed"
        return
    assert known == [[], []]
    meanwhile = [one for one in outcomes if one.began_s < resumed_s]
    assert last_at(meanwhile, h3, paused_s) < PINGS_S + LOADED_S
    assert longest_gap(outcomes) < PINGS_S + LOADED_S


def test_workers_are_cut_off_from_etcd(cluster: Demo, traffic: SteadyTraffic) -> None:
    """Not from front doors: they get nothing new, and what they had goes on here or there."""
    h1, h2, h3 = cluster.hosts
    engines = engines_of(h3)
    with cut_off(h3, *cluster.etcd_hosts):
        cut_s = time.monotonic()
        for door in (h1, h2):
            measured(
                f"{door.name} has removed the workers",
                lambda door=door: known_at(door, h3) == [],  # type: ignore[misc]
                LEASE_S + 1.0,
            )
        time.sleep(4.0)
        healed_s = time.monotonic()
    measured(
        "they are back",
        lambda: all(len(known_at(door, h3)) == 2 for door in (h1, h2)),
        CONVERGED_S,
    )
    outcomes = traffic.outcomes()
    assert traffic.lost(outcomes) == []
    assert engines_of(h3) == engines, "no engine was started anew"
    assert longest_gap(outcomes) < LOADED_S
    meanwhile = [one for one in outcomes if one.began_s < healed_s]
    assert last_at(meanwhile, h3, cut_s) < LEASE_S + 1.0 + LOADED_S


def test_a_front_door_is_cut_off_from_etcd(cluster: Demo, traffic: SteadyTraffic) -> None:
    """It serves on, also when a host is lost meanwhile, and tells how old its view is."""
    h1, h2, h3 = cluster.hosts
    with cut_off(h1, *cluster.etcd_hosts):
        time.sleep(3.0)
        assert age_s(h1) > 2.0
        h3.set_link(False)
        killed_s = time.monotonic()
        cluster.end(h3, signal.SIGKILL)
        time.sleep(LEASE_S + 4.0)
        assert len(known_at(h1, h3)) == 2, "silence removes nobody"
        assert known_at(h2, h3) == []
    measured("its view is that of the other", lambda: known_at(h1, h3) == [], CONVERGED_S)
    measured("its view is fresh", lambda: age_s(h1) < 2.0, CONVERGED_S)
    outcomes = traffic.outcomes()
    h3.set_link(True)
    cluster.begin_commutator(h3)
    assert traffic.lost(outcomes) == []
    assert last_at(outcomes, h3, killed_s) < PINGS_S + LOADED_S


def test_workers_are_cut_off_from_one_of_two_front_doors(
    cluster: Demo, traffic: SteadyTraffic
) -> None:
    """Only that one stops asking them."""
    h1, h2, h3 = cluster.hosts
    with cut_off(h3, h1):
        cut_s = time.monotonic()
        time.sleep(12.0)
        healed_s = time.monotonic()
    time.sleep(3.0)
    outcomes = traffic.outcomes()
    assert traffic.lost(outcomes) == []
    meanwhile = [one for one in outcomes if one.began_s < healed_s]
    mine = [one for one in meanwhile if one.door == h1.address]
    others = [one for one in meanwhile if one.door == h2.address]
    assert last_at(mine, h3, cut_s) < PINGS_S + LOADED_S
    assert last_at(others, h3, cut_s) > PINGS_S + LOADED_S
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
    measured(
        "the views are fresh",
        lambda: max(age_s(h1), age_s(h2)) < 2.0,
        CONVERGED_S,
    )
    outcomes = traffic.outcomes()
    assert traffic.lost(outcomes) == []
    assert longest_gap(outcomes) < LOADED_S


def test_a_front_door_is_started_while_all_of_etcd_is_gone(
    cluster: Demo, traffic: SteadyTraffic
) -> None:
    """It says that it knows no worker; the other one serves on."""
    h1, h2, _ = cluster.hosts
    for member in cluster.etcd_hosts:
        cluster.end(member, signal.SIGKILL)
    cluster.end(h1, signal.SIGTERM)
    cluster.begin_commutator(h1)
    cluster.until("its answer", lambda: get(f"http://{h1.address}:8000/health") is not None)
    health = get(f"http://{h1.address}:8000/health")
    assert health["status"] == "degraded"
    assert health["workers"] == []
    refused = stream(h1.address, "0. Tell me about the river, and the tower at it.")
    assert refused.problem.startswith("503")
    for member in cluster.etcd_hosts:
        cluster.begin_etcd(member)
    cluster.until_etcd_answers()
    measured("it knows the workers", lambda: ready_workers(h1) == WORKERS, CONVERGED_S)
    outcomes = traffic.outcomes()
    assert traffic.lost(outcomes, but_at=h1.address) == []
    assert longest_gap([one for one in outcomes if one.door == h2.address]) < LOADED_S


def test_hosts_have_wrong_clocks(cluster: Demo, traffic: SteadyTraffic, tmp_path: Path) -> None:
    """An hour behind and an hour ahead: leases, pings and timeouts count lengths of time."""
    h1, h2, h3 = cluster.hosts
    library = tmp_path / "clock.so"
    (tmp_path / "clock.c").write_text(CLOCK)
    build = f"cc -shared -fPIC -o {library} {tmp_path / 'clock.c'} -ldl"
    subprocess.run(build.split(), check=True)
    for host, offset_s in ((h1, -3600), (h3, 3600)):
        cluster.end(host, signal.SIGTERM)
        env = {"LD_PRELOAD": str(library), "CLOCK_OFFSET_S": str(offset_s)}
        asked = subprocess.run(
            [sys.executable, "-c", "import time; print(time.time())"],
            env=os.environ | env, capture_output=True, text=True, check=True,
        )  # fmt: skip
        assert abs(float(asked.stdout) - time.time() - offset_s) < 60.0, "the library does nothing"
        cluster.begin_commutator(host, env)
    whole_again(cluster)
    time.sleep(2 * LEASE_S)
    assert [ready_workers(door) for door in (h1, h2)] == [WORKERS] * 2, "no lease lapsed"
    outcomes = traffic.outcomes()
    assert traffic.lost(outcomes, but_at=h1.address) == []  # its front door was stopped, too
    skewed = [stream(h1.address, one.prompt) for one in outcomes[:20]]
    assert traffic.lost(skewed) == []
    for host in (h1, h3):
        cluster.end(host, signal.SIGTERM)
        cluster.begin_commutator(host)
