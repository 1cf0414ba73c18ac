"""Shared load over a network that loses, repeats and reorders: sums are never wrong for long."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from commutator.contract.routing import WorkerLoad
from commutator.routing.load import InFlightLoad, Ticket
from commutator.routing.replica_sync import ReplicaLoads

SILENCE_S = 10.0
PEERS = ["a", "b", "c"]

loads = st.dictionaries(
    st.sampled_from(["w0", "w1"]),
    st.builds(
        WorkerLoad,
        active_requests=st.integers(0, 9),
        active_prefill_tokens=st.integers(0, 9),
        active_decode_blocks=st.integers(0, 9),
    ),
    max_size=2,
)
words = st.tuples(st.sampled_from(PEERS), st.integers(1, 6), loads, st.integers(0, 8))


@given(st.lists(words, max_size=30))
def test_the_sum_is_that_of_each_peer_s_newest_word(
    plan: list[tuple[str, int, dict[str, WorkerLoad], int]],
) -> None:
    peers = ReplicaLoads(SILENCE_S)
    newest: dict[str, tuple[int, float, dict[str, WorkerLoad]]] = {}
    now_s = 0.0
    for peer, number, told, pause_s in plan:
        now_s += pause_s
        gone = {name for name, (_, at_s, _) in newest.items() if now_s - at_s >= SILENCE_S}
        assert set(peers.expire(now_s)) == gone
        for name in gone:
            del newest[name]
        is_news = peer not in newest or newest[peer][0] < number
        assert peers.update(peer, number, told, now_s) == is_news
        if is_news:
            newest[peer] = number, now_s, told
        assert peers.count == len(newest)
        total = peers.total()
        for worker in ("w0", "w1"):
            parts = [one[worker] for _, _, one in newest.values() if worker in one]
            assert total.get(worker, WorkerLoad()) == sum(parts, WorkerLoad())
    assert len(peers.expire(now_s + SILENCE_S)) == len(newest)
    assert peers.total() == {}


class Door:
    """A front door, and the messages it has sent that have not arrived yet."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.load = InFlightLoad()
        self.peers = ReplicaLoads(SILENCE_S)
        self.sent: list[tuple[int, dict[str, WorkerLoad]]] = []
        self._tickets: list[Ticket] = []
        self._number = 0

    def act(self, action: str, number: int) -> None:
        if action == "dispatch":
            self._tickets.append(self.load.dispatch(f"w{number % 2}", number, 16))
        elif action in {"tell", "tell in vain"}:
            self._number += 1
            if action == "tell":
                self.sent.append((self._number, self.load.all_own()))
        elif self._tickets:
            which = number % len(self._tickets)
            if action == "progress":
                self.load.progress(self._tickets[which], number)
            else:
                self.load.release(self._tickets.pop(which))


actions = st.sampled_from(["dispatch", "progress", "release", "tell", "tell in vain"])


@given(
    plan=st.lists(st.tuples(st.integers(0, 2), actions, st.integers(0, 99)), max_size=60),
    chance=st.randoms(use_true_random=False),
)
def test_all_agree_once_all_were_heard(
    plan: list[tuple[int, str, int]], chance: random.Random
) -> None:
    """Of all words only the last one of each must arrive, in whatever order."""
    doors = [Door(name) for name in PEERS]
    for who, action, number in plan:
        doors[who].act(action, number)
    for door in doors:
        door.act("tell", 0)
    words = [(door, number, told) for door in doors for number, told in door.sent]
    chance.shuffle(words)
    for sender, number, told in words:
        for door in doors:
            if door is not sender:
                door.peers.update(sender.name, number, told, 0.0)
    for door in doors:
        door.load.set_peers(door.peers.total(), door.peers.count)
    for worker in ("w0", "w1"):
        everybody = sum((door.load.own(worker) for door in doors), WorkerLoad())
        assert [door.load.of(worker) for door in doors] == [everybody] * 3
