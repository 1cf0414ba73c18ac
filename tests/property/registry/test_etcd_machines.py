"""The pure parts of the registry `etcd`, over a simulated clock, network and store."""

from __future__ import annotations

from typing import Any

import pytest
from attrs import frozen
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from commutator_etcd.follower import Follower, Listing, SessionEnd, WatchMessage
from commutator_etcd.registry import LeaseHolder, whole_ttl_s

STEP_S = 0.25
RESYNC_S = 20.0
KEYS = st.sampled_from([b"a", b"b", b"c"])
VALUES = st.sampled_from([b"1", b"2", b"3"])


class Store:
    """What matters of etcd: revisions, a history that can be compacted, backups."""

    def __init__(self) -> None:
        self.revision = 1
        self.values: dict[bytes, bytes] = {}
        self.history: list[tuple[int, dict[bytes, bytes | None]]] = []
        self.compacted = 0

    def change(self, delta: dict[bytes, bytes | None]) -> None:
        self.revision += 1
        self.history.append((self.revision, delta))
        for key, value in delta.items():
            if value is None:
                self.values.pop(key, None)
            else:
                self.values[key] = value

    def copy(self) -> Store:
        other = Store()
        other.__dict__ |= self.__dict__
        other.values, other.history = dict(self.values), list(self.history)
        return other


class Followed(RuleBasedStateMachine):
    """A follower and a store, with a network between them that delays and breaks."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.store = Store()
        self.backup = self.store.copy()
        self.follower = Follower(RESYNC_S)
        self.mirror: dict[bytes, bytes] = {}
        self.watched: int | None = None
        """The revision that the open watch sends next; None: no watch is open."""
        self.wire: list[WatchMessage] = []
        self.reachable = True
        self.late = False
        self.loses = False
        """etcd's own bug: changes do not reach the watch."""
        self.history: list[tuple[float, dict[bytes, bytes]]] = [(0.0, {})]

    # ------------------------------------------------------------ what happens in the store

    def changed(self) -> None:
        self.history.append((self.now, dict(self.store.values)))

    @rule(key=KEYS, value=VALUES)
    def put(self, key: bytes, value: bytes) -> None:
        self.store.change({key: value})
        self.changed()

    @rule(key=KEYS, other=KEYS)
    def depart(self, key: bytes, other: bytes) -> None:
        """Delete one key and put another in the same transaction."""
        if key in self.store.values and key != other:
            self.store.change({key: None, other: b"gone"})
            self.changed()

    @rule()
    def compact(self) -> None:
        self.store.compacted = self.store.revision

    @rule()
    def back_up(self) -> None:
        self.backup = self.store.copy()

    @rule()
    def restore(self) -> None:
        """The members stop, so watches break, and start with the backup."""
        self.store = self.backup.copy()
        self.break_watch()
        self.changed()

    # ------------------------------------------------------------ what happens on the way

    @rule()
    def break_watch(self) -> None:
        self.watched = None
        self.wire.clear()

    @rule(reachable=st.booleans())
    def cut_or_heal(self, reachable: bool) -> None:
        self.reachable = reachable

    @rule(late=st.booleans())
    def delay(self, late: bool) -> None:
        self.late = late

    @rule()
    @precondition(lambda self: self.watched is not None)
    def lose_what_was_changed(self) -> None:
        self.loses = True
        self.watched = self.store.revision + 1

    # ------------------------------------------------------------ the shell

    @rule(steps=st.integers(1, 20))
    def wait(self, steps: int) -> None:
        for _ in range(steps):
            self.now += STEP_S
            before = dict(self.follower.values)
            reachable = self.reachable
            self.step()
            if not reachable:
                assert self.follower.values == before, "silence is never a change"

    def step(self) -> None:
        try:
            if self.watched is None:
                self.begin()
            if self.watched is not None:
                self.go_on()
        except SessionEnd:
            self.break_watch()

    def begin(self) -> None:
        if self.reachable:
            listing = Listing(self.store.revision, dict(self.store.values))
            self.hear(self.follower.listed(listing, self.now, self.now))
            self.watched, self.loses = listing.revision + 1, False
            self.wire = [WatchMessage(listing.revision)]  # "created"

    def go_on(self) -> None:
        assert self.watched is not None
        if self.follower.tick(self.now):
            self.send_changes()
            self.wire.append(WatchMessage(self.store.revision, progress=True))
        if self.reachable:
            arrived, self.wire = self.wire, []
            if self.late:
                arrived, self.wire = arrived[:-1], arrived[-1:]
            for message in arrived:
                self.hear(self.follower.received(message, self.now))
        self.send_changes()

    def send_changes(self) -> None:
        assert self.watched is not None
        if self.watched <= self.store.compacted and self.watched <= self.store.revision:
            self.wire.append(WatchMessage(self.store.revision, cancelled="?", compacted=True))
            return
        for revision, delta in self.store.history:
            if revision >= self.watched:
                self.wire.append(WatchMessage(revision, delta))
        self.watched = max(self.watched, self.store.revision + 1)

    def hear(self, delta: Any) -> None:
        for key, value in delta.items():
            if value is None:
                self.mirror.pop(key, None)
            else:
                self.mirror[key] = value

    # ------------------------------------------------------------ what holds

    @invariant()
    def who_applies_the_differences_has_the_view(self) -> None:
        assert self.mirror == self.follower.values

    @invariant()
    def the_age_is_honest(self) -> None:
        """Each value of the view was in the store at some time since the age that it claims."""
        since_s = self.now - self.follower.age_s(self.now)
        if self.loses or since_s < 0:
            return
        at_s = max((when for when, _ in self.history if when < since_s), default=0.0)
        recent = [values for when, values in self.history if when >= at_s]
        for key in (b"a", b"b", b"c"):
            assert self.follower.values.get(key) in {values.get(key) for values in recent}

    def teardown(self) -> None:
        """Whatever was lost, within one interval of lists the view is what is there."""
        self.reachable, self.late = True, False
        self.wait(int((RESYNC_S + 5.0) / STEP_S))
        assert self.follower.values == self.store.values
        assert self.follower.age_s(self.now) <= 1.0 + 2 * STEP_S


TestFollowed = Followed.TestCase


def test_silence_moves_on_to_another_member() -> None:
    follower = Follower(RESYNC_S)
    follower.listed(Listing(1, {}), 0.0, 0.0)
    assert follower.tick(0.0), "it asks at once"
    assert not follower.tick(1.5), "and not again before the answer"
    assert follower.due_s() == 3.0
    with pytest.raises(SessionEnd, match="silent") as ended:
        follower.tick(3.0)
    assert ended.value.fault


@frozen
class Attempt:
    """How the network treats one renewal."""

    there_s: float | None
    """Until etcd gets it; None: it does not."""
    back_s: float | None
    """Until the answer is there; None: it is lost."""


ATTEMPTS = st.builds(
    Attempt,
    there_s=st.none() | st.floats(0, 4),
    back_s=st.none() | st.floats(0, 4),
)


@given(st.integers(2, 12), st.lists(ATTEMPTS, max_size=60), st.floats(0.1, 2))
@settings(max_examples=300)
def test_until_the_holder_s_deadline_the_lease_lives(
    ttl_s: int, attempts: list[Attempt], longest_s: float
) -> None:
    now_s, expires_s = 0.0, 0.3 + ttl_s  # granted 0.3 s after it was asked for
    holder = LeaseHolder(ttl_s, 0.0, longest_s)
    for attempt in attempts:
        assert holder.deadline_s <= expires_s
        patience_s = holder.patience_s(now_s)
        if patience_s is None:
            assert now_s >= holder.deadline_s
            break
        assert patience_s <= max(0.2, longest_s)
        sent_s = now_s
        if attempt.there_s is not None and sent_s + attempt.there_s < expires_s:
            expires_s = max(expires_s, sent_s + attempt.there_s + ttl_s)
            if attempt.back_s is not None and attempt.there_s + attempt.back_s < patience_s:
                holder = holder.confirmed(sent_s)
                now_s = sent_s + max(attempt.there_s + attempt.back_s, ttl_s / 3)
                continue
        now_s = sent_s + patience_s


@given(st.integers(2, 12), st.floats(0.001, 0.15), st.integers(1, 2), st.lists(st.booleans()))
def test_with_one_member_of_three_silent_no_lease_lapses(
    ttl_s: int, trip_s: float, silent: int, turns: list[bool]
) -> None:
    """Renewed at a third of its time; each attempt at a silent member costs its patience."""
    holder, now_s, at = LeaseHolder(ttl_s, 0.0, 1.5), ttl_s / 3, 0
    for comes_back in (*turns, False, False):
        while True:
            patience_s = holder.patience_s(now_s)
            assert patience_s is not None, "nothing remained of the lease"
            if at != silent or comes_back:
                break
            now_s, at = now_s + patience_s, (at + 1) % 3
        holder = holder.confirmed(now_s)
        now_s += max(2 * trip_s, ttl_s / 3)
        at = (at + 1) % 3


@given(st.floats(0.01, 100))
def test_etcd_gets_whole_seconds_never_fewer_than_asked_for(ttl_s: float) -> None:
    assert ttl_s <= whole_ttl_s(ttl_s) < max(2.0, ttl_s) + 1
