"""Whatever happens, the lease table and what its watchers heard agree."""

from __future__ import annotations

from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from commutator.backoff import Backoff
from commutator.contract.registry import Change, WorkerDown, WorkerUp
from commutator.contract.worker import EngineInfo, Role, WorkerRecord
from commutator.registry.changes import difference
from commutator.registry.memory import (
    Deregister,
    Event,
    KeepAlive,
    LeaseTable,
    Register,
    SetDraining,
    SetRole,
    Tick,
    step,
)

IDS = st.sampled_from(["a-0", "a-1", "b-0"])
TTLS = st.sampled_from([1.0, 2.0, 5.0])


def record(worker_id: str, port: int = 1, instance: str = "i") -> WorkerRecord:
    info = EngineInfo(
        kind="fake", version="1", model="m", max_model_len=1, block_size=1, kv_capacity_blocks=1
    )
    return WorkerRecord(
        worker_id=worker_id,
        engine="e",
        kind="fake",
        model="m",
        address=f"127.0.0.1:{port}",
        instance=instance,
        info=info,
    )


class Leases(RuleBasedStateMachine):
    """Runs the table beside a plain model: the time at which each live lease was last renewed."""

    def __init__(self) -> None:
        super().__init__()
        self.table = LeaseTable()
        self.now = 0.0
        self.view: dict[str, WorkerRecord] = {}
        self.model: dict[int, tuple[WorkerRecord, float, float]] = {}
        self.drained: set[str] = set()
        self.roles: dict[str, Role] = {}

    def apply(self, event: Event) -> bool:
        before = self.table
        self.table, changes, found = step(before, event, self.now)
        for change in changes:
            self.hear(change)
        return found

    def hear(self, change: Change) -> None:
        if isinstance(change, WorkerUp):
            known = self.view.get(change.record.worker_id)
            assert known != change.record, "up twice"
            if known is not None:
                same = evolve(known, draining=change.record.draining, role=change.record.role)
                assert same == change.record, "nothing else changes in a lease"
            self.view[change.record.worker_id] = change.record
        else:
            assert change.worker_id in self.view, "down without up"
            del self.view[change.worker_id]

    def lapse(self) -> None:
        self.model = {i: m for i, m in self.model.items() if m[2] > self.now}

    @rule(worker_id=IDS, port=st.integers(1, 2), instance=st.sampled_from("ij"), ttl_s=TTLS)
    def register(self, worker_id: str, port: int, instance: str, ttl_s: float) -> None:
        self.lapse()
        new = record(worker_id, port, instance)
        held = [m[0] for m in self.model.values() if m[0].worker_id == worker_id]
        free = all(one.instance == instance for one in held)
        assert self.apply(Register(new, ttl_s)) == free, "a name has one instance at a time"
        if free:
            self.model = {i: m for i, m in self.model.items() if m[0].worker_id != worker_id}
            self.model[self.table.last_id] = (new, ttl_s, self.now + ttl_s)

    @rule(lease_id=st.integers(1, 8))
    def keep_alive(self, lease_id: int) -> None:
        self.lapse()
        assert self.apply(KeepAlive(lease_id)) == (lease_id in self.model)
        if lease_id in self.model:
            kept, ttl_s, _ = self.model[lease_id]
            self.model[lease_id] = (kept, ttl_s, self.now + ttl_s)

    @rule(lease_id=st.integers(1, 8))
    def deregister(self, lease_id: int) -> None:
        self.lapse()
        assert self.apply(Deregister(lease_id, "stopped")) == (lease_id in self.model)
        self.model.pop(lease_id, None)

    @rule(worker_id=IDS, draining=st.booleans())
    def set_draining(self, worker_id: str, draining: bool) -> None:
        self.lapse()
        live = {kept.worker_id for kept, _, _ in self.model.values()}
        assert self.apply(SetDraining(worker_id, draining)) == (worker_id in live)
        if worker_id in live:
            (self.drained.add if draining else self.drained.discard)(worker_id)

    @rule(worker_id=IDS, role=st.sampled_from(Role))
    def set_role(self, worker_id: str, role: Role) -> None:
        self.lapse()
        live = {kept.worker_id for kept, _, _ in self.model.values()}
        assert self.apply(SetRole(worker_id, role)) == (worker_id in live)
        if worker_id in live:
            self.roles[worker_id] = role

    @rule(seconds=st.sampled_from([0.5, 1.0, 3.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.lapse()
        self.apply(Tick())

    @rule(seconds=st.sampled_from([0.5, 1.0, 3.0]))
    def wait_unnoticed(self, seconds: float) -> None:
        """No tick: the next event of whatever kind must let the lease lapse."""
        self.now += seconds

    @invariant()
    def the_view_is_the_table(self) -> None:
        assert sorted(self.view.values(), key=repr) == sorted(self.table.records(), key=repr)

    @invariant()
    def live_leases_are_in_the_table(self) -> None:
        for lease_id, (kept, _, expires_at) in self.model.items():
            if expires_at > self.now:
                drained = kept.worker_id in self.drained
                role = self.roles.get(kept.worker_id, kept.role)
                expected = evolve(kept, draining=drained, role=role)
                assert self.table.leases[lease_id].record == expected
        expiry = self.table.next_expiry()
        assert (expiry is None) == (not self.table.leases)


TestLeases = Leases.TestCase


@given(st.dictionaries(IDS, st.integers(1, 2)), st.dictionaries(IDS, st.integers(1, 2)))
def test_the_difference_turns_one_view_into_the_other(a: dict[str, int], b: dict[str, int]) -> None:
    view = {worker_id: record(worker_id, port) for worker_id, port in a.items()}
    present = [record(worker_id, port) for worker_id, port in b.items()]
    changes = difference(view, present)
    for change in changes:
        if isinstance(change, WorkerDown):
            del view[change.worker_id]
        else:
            known = view.get(change.record.worker_id)
            assert known != change.record, "nothing changed"
            assert known is None or known.address == change.record.address, "not the same process"
            view[change.record.worker_id] = change.record
    assert sorted(view.values(), key=repr) == sorted(present, key=repr)


@given(
    st.floats(0.01, 10),
    st.floats(1, 100),
    st.lists(st.floats(0, 200), min_size=1, max_size=100),
)
def test_backoff_is_bounded_and_starts_anew_after_health(
    first_s: float, more: float, spells: list[float]
) -> None:
    longest_s = first_s * more
    backoff, last = Backoff(first_s, longest_s), 0.0
    for healthy_s in spells:
        was_first = backoff.failures == 0
        backoff, wait_s = backoff.after_failure(healthy_s)
        assert first_s <= wait_s <= longest_s
        if healthy_s >= longest_s or was_first:
            assert wait_s == first_s
        else:
            assert wait_s == min(longest_s, last * 2)
        last = wait_s


def test_backoff_survives_a_very_long_row_of_failures() -> None:
    backoff = Backoff(0.5, 30.0)
    for _ in range(5000):
        backoff, wait_s = backoff.after_failure(0.0)
    assert wait_s == 30.0
