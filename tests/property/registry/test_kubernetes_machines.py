"""Reflector and view of the registry `kubernetes`, against models that lose, cut and restore."""

from __future__ import annotations

from typing import Any

import pytest
from attrs import evolve
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from commutator.contract.registry import WorkerDown, WorkerUp
from commutator_kubernetes.reflector import SILENCE_S, Reflector, Relist
from commutator_kubernetes.view import Beat, ClusterView, Desired, Entry, Places, Wish
from commutator_testing.registries import make_worker

Json = dict[str, Any]
NAMES = st.sampled_from([f"o-{n}" for n in range(5)])


def item(name: str, version: int, value: int = 0) -> Json:
    return {"metadata": {"name": name, "resourceVersion": str(version)}, "spec": {"value": value}}


class ServerAndReflector(RuleBasedStateMachine):
    """Whatever is lost on the way: after the next list both have the same, and all was told."""

    @initialize()
    def begin(self) -> None:
        self.now_s = 0.0
        self.version = 100_000
        self.objects: dict[str, Json] = {}
        self.reflector = Reflector(resync_s=300.0)
        self.told: dict[str, Json] = {}
        self.pending: list[Json] = []
        """Events that the watch has not delivered yet."""
        self.lossy = False
        """The watch has lost an event since the last list."""
        self.list()

    @rule()
    def list(self) -> None:
        self.take(
            self.reflector.listed(
                list(self.objects.values()), str(self.version), self.now_s, self.now_s
            )
        )
        self.pending.clear()
        self.lossy = False
        assert self.told == self.objects

    def take(self, delta: Any) -> None:
        for name, new in delta.items():
            if new is None:
                self.told.pop(name, None)
            else:
                self.told[name] = new

    @rule(name=NAMES, value=st.integers(0, 3))
    def write(self, name: str, value: int) -> None:
        self.version += 1
        kind = "MODIFIED" if name in self.objects else "ADDED"
        self.objects[name] = item(name, self.version, value)
        self.pending.append({"type": kind, "object": self.objects[name]})

    @rule(name=NAMES)
    def delete(self, name: str) -> None:
        if name in self.objects:
            self.version += 1
            gone = self.objects.pop(name)
            gone = item(name, self.version, gone["spec"]["value"])
            self.pending.append({"type": "DELETED", "object": gone})

    @rule()
    def bookmark(self) -> None:
        self.pending.append(
            {"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": str(self.version)}}}
        )

    @rule()
    def deliver(self) -> None:
        for event in self.pending:
            self.take(self.reflector.received(event, self.now_s))
        self.pending.clear()
        if not self.lossy:
            assert self.told == self.objects == self.reflector.objects

    @rule()
    def lose_an_event(self) -> None:
        if self.pending:
            self.pending.pop(0)
            self.lossy = True

    @rule(seconds=st.floats(0.1, 100.0))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds
        silent = self.now_s >= self.reflector.confirmed_s + SILENCE_S
        try:
            self.reflector.tick(self.now_s)
        except Relist:
            self.list()
        else:
            assert not silent, "silence is not peace"
            assert self.now_s < self.reflector.due_s()

    @rule()
    def version_is_gone(self) -> None:
        error = {"type": "ERROR", "object": {"code": 410, "message": "too old"}}
        with pytest.raises(Relist, match="too old") as raised:
            self.reflector.received(error, self.now_s)
        assert not raised.value.fault
        self.list()

    @rule(back=st.integers(1, 8))
    def a_backup_is_restored(self, back: int) -> None:
        before = int(self.reflector.version)
        self.version = max(1, min(self.version, before) - back)
        self.objects = {
            name: one
            for name, one in self.objects.items()
            if int(one["metadata"]["resourceVersion"]) <= self.version
        }
        event = {"type": "ADDED", "object": item("new", self.version)}
        with pytest.raises(Relist, match="went back"):
            self.reflector.received(event, self.now_s)
        self.list()

    @rule(name=NAMES)
    def own_write_is_not_told(self, name: str) -> None:
        self.write(name, 9)
        self.reflector.wrote(self.objects[name], self.now_s)
        self.pending.clear()
        self.now_s += 5.0
        with pytest.raises(Relist, match=r"silent|was written"):
            self.reflector.tick(self.now_s)
        self.list()

    @invariant()
    def the_age_is_true(self) -> None:
        if hasattr(self, "reflector"):
            assert self.reflector.age_s(self.now_s) >= 0.0


TestServerAndReflector = ServerAndReflector.TestCase
TestServerAndReflector.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)

PLACES = Places("c", "default")


def sealed(name: str, value: object, version: int = 1) -> Json:
    return {
        "metadata": {"name": name, "resourceVersion": str(version)},
        "spec": {"sealed": PLACES.encoded(name, value)},
    }


WORKERS, HOLDERS = st.integers(0, 2), st.integers(0, 1)
DURATION_S = 15.0


class ClusterAndView(RuleBasedStateMachine):
    """What watchers were told is what the view holds.

    Nobody is removed for a silence that was not seen from its beginning to its end.
    """

    @initialize()
    def begin(self) -> None:
        self.view, self.now_s, self.beats = ClusterView(PLACES, DURATION_S), 0.0, 0
        self.told: dict[str, Any] = {}
        self.entries: dict[str, Entry] = {}
        self.draining: dict[str, bool] = {}
        self.heard_s: dict[str, float] = {}
        """When each process was last seen to do something, or could not have been."""

    def take(self, changes: Any) -> None:
        for change in changes:
            if isinstance(change, WorkerUp):
                self.told[change.record.worker_id] = change.record
            else:
                assert isinstance(change, WorkerDown)
                del self.told[change.worker_id]

    def put(self, name: str, value: object) -> None:
        self.take(self.view.apply({name: sealed(name, value)}, self.now_s))

    @rule(number=WORKERS, of=HOLDERS, port=st.integers(1, 3))
    def register(self, number: int, of: int, port: int) -> None:
        record, holder = make_worker(f"w-{number}", port, instance=f"i{of}"), f"process.c-p{of}"
        entry = Entry(record=record, lease=str(port), holder=holder)
        self.entries[record.worker_id] = entry
        self.heard_s.setdefault(holder, self.now_s)
        self.put(PLACES.name("worker", record.worker_id), entry)

    @rule(number=WORKERS)
    def leave(self, number: int) -> None:
        if (entry := self.entries.get(f"w-{number}")) is not None:
            self.entries[f"w-{number}"] = gone = evolve(entry, gone="stopped")
            self.put(PLACES.name("worker", f"w-{number}"), gone)

    @rule(number=WORKERS)
    def delete(self, number: int) -> None:
        self.entries.pop(f"w-{number}", None)
        name = PLACES.name("worker", f"w-{number}")
        self.take(self.view.apply({name: None}, self.now_s))

    @rule(number=WORKERS, draining=st.booleans())
    def wish(self, number: int, draining: bool) -> None:
        self.draining[f"w-{number}"] = draining
        wish = Wish(worker_id=f"w-{number}", desired=Desired(draining=draining))
        self.put(PLACES.name("wish", f"w-{number}"), wish)

    @rule(of=HOLDERS)
    def beat(self, of: int) -> None:
        self.beats += 1
        self.heard_s[f"process.c-p{of}"] = self.now_s
        self.put(f"process.c-p{of}", Beat(duration_s=DURATION_S, number=self.beats))

    @rule(seconds=st.floats(0.5, 20.0))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds
        self.take(self.view.overdue(self.now_s, self.now_s))

    @rule(seconds=st.floats(0.5, 60.0))
    def server_is_away(self, seconds: float) -> None:
        self.now_s += seconds
        self.view.recovered(self.now_s)
        for name in self.heard_s:
            if not self.view.has_lapsed(name):
                self.heard_s[name] = self.now_s
        self.take(self.view.overdue(self.now_s, self.now_s))

    @invariant()
    def all_agree(self) -> None:
        if not hasattr(self, "view"):
            return
        assert self.told == self.view.records
        assert self.told.keys() <= self.entries.keys()
        for worker_id, entry in self.entries.items():
            silent_s = self.now_s - self.heard_s[entry.holder]
            lapsed = self.view.has_lapsed(entry.holder)
            assert lapsed == (silent_s >= DURATION_S)
            assert (worker_id in self.told) == (entry.gone is None and not lapsed)
            if worker_id in self.told:
                assert self.told[worker_id].draining == self.draining.get(worker_id, False)


TestClusterAndView = ClusterAndView.TestCase
TestClusterAndView.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
