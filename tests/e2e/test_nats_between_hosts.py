"""KV events over a NATS server that is lost, cut off, or behind a bad link, under steady traffic.

h1 has a front door, h2 a front door and two workers, h3 two workers, h4 NATS and nothing else.
docs/how-to/cluster.md has the table of what is measured.
"""

from __future__ import annotations

import itertools
import signal
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from attrs import field, frozen
from tests.support.bad_links import bad_link
from tests.support.hosts import Host, why_not
from tests.support.steady_traffic import SteadyTraffic, stream

sys.path.append(str(Path(__file__).resolve().parents[2] / "scripts"))
from cluster_demo import STORY, WORKERS, Demo, ask, get, peers_of, ready_workers, running

NO_HOSTS = why_not() or (None if Path("/dev/net/tun").exists() else "no /dev/net/tun")
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(NO_HOSTS is not None, reason=NO_HOSTS or ""),
]
CONVERGED_S = 2.0
LOADED_S = 2.0
"""What a loaded machine takes to notice what the test looks for."""
PER_S = 2.0
FAULT_S = 15.0
BLOCK_TOKENS = 16
_numbers = itertools.count(1)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Demo]:
    with running("sim", "memory", nats=True) as demo:
        demo.start()
        yield demo


@pytest.fixture(scope="module")
def expected(cluster: Demo) -> Mapping[str, str]:
    """Prompts, and their answers while nothing is wrong."""
    prompts = [f"{number}. Tell me about the river, and the tower at it." for number in range(6)]
    answers = [stream(cluster.hosts[1].address, prompt) for prompt in prompts]
    assert [one.problem for one in answers] == [""] * len(prompts)
    return {one.prompt: one.text for one in answers}


@pytest.fixture
def traffic(cluster: Demo, expected: Mapping[str, str]) -> Iterator[SteadyTraffic]:
    """At both front doors, whose indexes are equal before."""
    doors = cluster.hosts[:2]
    cluster.until("workers", lambda: all(ready_workers(door) == WORKERS for door in doors), 60.0)
    cluster.until("front doors to share", lambda: all(peers_of(d) == 1 for d in doors), 60.0)
    cluster.until("equal indexes", lambda: indexed(doors[0]) == indexed(doors[1]) > 0, 60.0)
    with SteadyTraffic([door.address for door in doors], expected, PER_S) as running_traffic:
        running_traffic.until_streaming_at("h3")
        yield running_traffic


@pytest.fixture
def told(cluster: Demo, traffic: SteadyTraffic, blocks_of_a_story: int) -> Told:
    return Told(cluster, indexed(cluster.hosts[0]), blocks_of_a_story)


def indexed(door: Host) -> int:
    """The blocks in the prefix index of a front door."""
    health = get(f"http://{door.address}:8000/health") or {}
    return int(health.get("indexed_blocks", {}).get("m", -1))


def new_story() -> str:
    return f"{next(_numbers):03}. {STORY}"


@pytest.fixture(scope="module")
def blocks_of_a_story(cluster: Demo, expected: Mapping[str, str]) -> int:
    """How many blocks of one, all of the same length, are not in any other."""
    h1, h2, _ = cluster.hosts
    time.sleep(CONVERGED_S)
    before = indexed(h1)
    ask(h1, new_story())
    time.sleep(CONVERGED_S)
    assert indexed(h1) == indexed(h2) > before
    return indexed(h1) - before


@frozen
class Told:
    """Prompts that are new to the workers: what front doors know of them, beside ``before``."""

    cluster: Demo
    before: int
    """Blocks in each index; the steady traffic adds none."""
    blocks_each: int
    stories: dict[str, tuple[str, int]] = field(factory=dict)
    """The worker that computed each, and its tokens."""

    def tell(self) -> None:
        """Two more at each front door."""
        for door in (*self.cluster.hosts[:2], *self.cluster.hosts[:2]):
            text = new_story()
            answer = ask(door, text)
            assert answer["cached"] < BLOCK_TOKENS
            self.stories[text] = (answer["worker"], answer["prompt_tokens"])

    @property
    def is_known(self) -> bool:
        whole = self.before + len(self.stories) * self.blocks_each
        return all(indexed(door) == whole for door in self.cluster.hosts[:2])

    def assert_known_in_time(self, since_s: float) -> None:
        """Both indexes have all blocks in time, and at the right workers."""
        doors = self.cluster.hosts[:2]
        missed = [indexed(door) for door in doors]
        while not self.is_known:
            now = [indexed(door) for door in doors]
            assert time.monotonic() < since_s + CONVERGED_S + LOADED_S, (self, missed, now)
            time.sleep(0.05)
        whole = indexed(doors[0])
        print(f"indexes right after {time.monotonic() - since_s:.1f} s: {missed}, then {whole}")
        for door in doors:
            for text, (worker, tokens) in self.stories.items():
                answer = ask(door, text)
                cached = (tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS
                assert (answer["worker"], answer["cached"]) == (worker, cached)


@pytest.mark.parametrize(
    ("loss", "delay_s"), [(0.05, 0.04), (0.2, 0.0)], ids=["5 % and 40 ms", "20 %"]
)
def test_nats_is_behind_a_bad_link(
    cluster: Demo, traffic: SteadyTraffic, told: Told, loss: float, delay_s: float
) -> None:
    """Events come late; tokens do not pass there."""
    assert cluster.nats_host is not None
    with bad_link(cluster.nats_host, loss=loss, delay_s=delay_s) as link:
        began_s = time.monotonic()
        with socket.create_connection((cluster.nats_host.address, 4222), timeout=30):
            assert time.monotonic() - began_s > 2 * delay_s, "the link is as good as before"
        time.sleep(FAULT_S)
        told.tell()
        outcomes = traffic.outcomes()
    told.assert_known_in_time(time.monotonic())
    assert traffic.lost(outcomes) == []
    gap_s = max(one.longest_gap_s for one in outcomes)
    print(f"longest gap in one of {len(outcomes)} streams: {gap_s:.1f} s; {link}")
    assert abs(link.lost / (link.lost + link.delivered) - loss) < loss / 2
    assert gap_s < LOADED_S


def test_a_front_door_is_behind_a_bad_link(
    cluster: Demo, traffic: SteadyTraffic, told: Told
) -> None:
    """Tokens come late, too, and events of the workers of both hosts."""
    h1 = cluster.hosts[0]
    with bad_link(h1, loss=0.05, delay_s=0.04) as link:
        time.sleep(FAULT_S)
        told.tell()
        outcomes = traffic.outcomes()
    told.assert_known_in_time(time.monotonic())
    assert link.lost
    assert traffic.lost(outcomes) == []
    print(f"longest gap: {max(one.longest_gap_s for one in outcomes):.1f} s; {link}")


def test_nats_is_killed_and_started_again(
    cluster: Demo, traffic: SteadyTraffic, told: Told
) -> None:
    """What was published meanwhile is asked for, as it was sent to nobody."""
    assert cluster.nats_host is not None
    cluster.end(cluster.nats_host, signal.SIGKILL)
    time.sleep(5.0)
    told.tell()
    outcomes = traffic.outcomes()
    assert not told.is_known, "nothing was missed"
    cluster.begin_nats(cluster.nats_host)
    told.assert_known_in_time(time.monotonic())
    assert traffic.lost(outcomes) == []
    assert max(one.longest_gap_s for one in outcomes) < LOADED_S


@pytest.mark.parametrize("cut", ["a front door", "all"])
def test_nats_is_cut_off(cluster: Demo, traffic: SteadyTraffic, told: Told, cut: str) -> None:
    """From one front door, or from all; nothing else is."""
    assert cluster.nats_host is not None
    others = cluster.hosts if cut == "all" else cluster.hosts[:1]
    cluster.nats_host.cut_off(*others)
    try:
        time.sleep(FAULT_S)
        told.tell()
        outcomes = traffic.outcomes()
        assert not told.is_known, "nothing was missed"
    finally:
        cluster.nats_host.cut_off(*others, cut=False)
    told.assert_known_in_time(time.monotonic())
    assert traffic.lost(outcomes) == []
    assert max(one.longest_gap_s for one in outcomes) < LOADED_S
