"""Ranks of one worker on several nodes, whatever happens to processes, hosts and messages."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from attrs import define, field
from hypothesis import given, settings
from hypothesis import strategies as st

from commutator.backoff import Backoff
from commutator_ray.epochs import Epoch, Epochs, Member

SILENCE_S = 10.0
TICK_S = 0.5
LOST_S = 14.0
"""When a host that is cut off is taken for lost, and its actors are started on another."""
ENDED_S = 6.0
"""When an actor that was replaced has been ended, after its host can be reached again."""
CALM_S = 90.0
"""Longest until all ranks run after the last fault: silence, a stop, and the longest back-off."""

numbers = itertools.count()


@define(eq=False)
class Host:
    """Where the actor of one rank runs: its member, and its process."""

    member: Member
    epochs: Epochs | None
    """Beside rank 0."""
    is_cut_off: bool = False
    changed_s: float = 0.0
    """When it was cut off, or no longer."""
    running: Epoch | None = None
    """Of the process itself, which may outlive its member for a while."""
    ends_at_s: float | None = None
    """When a process that was told to stop has stopped."""


@define
class World:
    """The hosts of a group; those that are cut off are replaced, and run on for a while."""

    nodes: int
    now_s: float = 0.0
    hosts: dict[int, Host] = field(factory=dict)
    replaced: list[Host] = field(factory=list)
    started: list[tuple[Epoch, int]] = field(factory=list)
    drops: Iterator[bool] = field(factory=lambda: itertools.repeat(False))
    stop_s: float = 1.0

    def __attrs_post_init__(self) -> None:
        for rank in range(self.nodes):
            self.begin(rank)

    def begin(self, rank: int) -> None:
        """Start the actor of a rank on a host."""
        name = f"m{next(numbers)}"
        epochs = None
        if rank == 0:
            backoff = Backoff(first_s=0.5, longest_s=30.0)
            epochs = Epochs(self.nodes, name, silence_s=SILENCE_S, backoff=backoff)
        self.hosts[rank] = Host(Member(rank, name, silence_s=SILENCE_S), epochs)

    def tick(self) -> None:
        """Half a second passes for everybody."""
        self.now_s += TICK_S
        for rank, host in list(self.hosts.items()):
            if host.is_cut_off and self.now_s - host.changed_s >= LOST_S:
                self.replaced.append(host)
                self.begin(rank)
        for host in list(self.replaced):
            if not host.is_cut_off and self.now_s - host.changed_s >= ENDED_S:
                self.replaced.remove(host)
        for host in (*self.hosts.values(), *self.replaced):
            self.act(host)
        self.check()

    def act(self, host: Host) -> None:
        """What the process beside a member does, as ``HostedRank``."""
        member = host.member
        if host.ends_at_s is not None:
            if self.now_s < host.ends_at_s:
                return
            host.running = host.ends_at_s = None
        if host.running is None:
            member.stopped()
        first = host if member.rank == 0 else self.hosts[0]
        reaches = host is first or not (host.is_cut_off or first.is_cut_off)
        if reaches and not next(self.drops):
            assert first.epochs is not None
            port = 0 if member.runs else next(numbers)
            answer = first.epochs.hear(member.beat("a", port), self.now_s)
            if not next(self.drops):
                member.hear(answer, self.now_s)
        if host.running is not None and member.has_to_stop(self.now_s):
            host.ends_at_s = self.now_s + self.stop_s
        elif host.running is None and (epoch := member.to_start(self.now_s)) is not None:
            member.started(epoch)
            host.running = epoch
            self.started.append((epoch, member.rank))

    def check(self) -> None:
        """No two ranks of different epochs meet, and none twice."""
        assert len(self.started) == len(set(self.started)), "a rank joins an epoch once"
        places: dict[tuple[str, int], set[str]] = {}
        for epoch, _ in self.started:
            places.setdefault((epoch.master_address, epoch.master_port), set()).add(epoch.name)
        assert all(len(names) == 1 for names in places.values()), "each epoch has its own place"

    def all_run(self) -> bool:
        """Whether all ranks run in one epoch."""
        running = [host.running for host in self.hosts.values() if host.ends_at_s is None]
        return len(running) == self.nodes and None not in running and len(set(running)) == 1

    def happens(self, fault: str, rank: int) -> None:
        host = self.hosts[rank]
        if fault == "process ends":
            if host.ends_at_s is None:
                host.running = None
        elif fault == "actor is killed":  # the guard ends its process
            if not host.is_cut_off:
                self.begin(rank)
        elif fault == "host is cut off":
            if not host.is_cut_off:
                host.is_cut_off, host.changed_s = True, self.now_s
        elif fault == "host is back":
            self.heal()

    def heal(self) -> None:
        """All hosts are connected again; those that were replaced run on for a moment."""
        for host in (*self.hosts.values(), *self.replaced):
            if host.is_cut_off:
                host.is_cut_off, host.changed_s = False, self.now_s

    def run(self, seconds: float) -> None:
        for _ in range(round(seconds / TICK_S)):
            self.tick()


FAULTS = ("process ends", "actor is killed", "host is cut off", "host is back")
steps = st.lists(
    st.tuples(st.sampled_from(FAULTS), st.integers(0, 3), st.sampled_from([0.0, 0.5, 3.0, 12.0])),
    max_size=12,
)


@settings(max_examples=300, deadline=None)
@given(
    nodes=st.integers(2, 4),
    stop_s=st.sampled_from([0.0, 0.5, 4.0, 10.0]),
    steps=steps,
    drops=st.lists(st.booleans(), min_size=1, max_size=40),
)
def test_ranks_of_different_epochs_never_meet_and_all_run_in_the_end(
    nodes: int, stop_s: float, steps: list[tuple[str, int, float]], drops: list[bool]
) -> None:
    world = World(nodes, stop_s=stop_s)
    world.drops = itertools.cycle(drops)
    for fault, rank, wait_s in steps:
        world.happens(fault, rank % nodes)
        world.run(wait_s)
    world.drops = itertools.repeat(False)
    world.heal()
    world.run(CALM_S)
    assert world.all_run()
    (epoch,) = {host.running for host in world.hosts.values()}
    world.run(CALM_S)
    assert {host.running for host in world.hosts.values()} == {epoch}, "nothing restarts them"


@given(nodes=st.integers(2, 4), lost=st.integers(0, 3), fault=st.sampled_from(FAULTS[:3]))
def test_a_lost_rank_ends_the_epoch_of_all(nodes: int, lost: int, fault: str) -> None:
    world = World(nodes)
    world.run(5)
    assert world.all_run()
    before = world.hosts[0].running
    old = list(world.hosts.values())
    world.happens(fault, lost % nodes)
    world.run(SILENCE_S + TICK_S + world.stop_s + TICK_S)
    assert all(host.running != before for host in old if host in world.hosts.values())
    world.run(CALM_S)
    assert world.all_run()
    assert all(host.running is None for host in world.replaced), "nor does one that was cut off"


def test_nobody_starts_before_all_are_there() -> None:
    epochs = Epochs(3, "e")
    members = [Member(rank, f"m{rank}") for rank in range(3)]
    for member in members[:2]:
        member.hear(epochs.hear(member.beat("a", 1), 0.0), 0.0)
        assert member.to_start(0.0) is None
    assert epochs.hear(members[2].beat("a", 1), 30.0) is None, "the first two are silent by now"


def test_groups_that_fail_are_tried_less_and_less_often() -> None:
    world = World(2)
    moments = []
    for _ in range(300):
        world.happens("process ends", 1)
        count = len(world.started)
        world.tick()
        if len(world.started) > count:
            moments.append(world.now_s)
    waits = [b - a for a, b in itertools.pairwise(moments)]
    assert max(waits) >= 15
    assert waits[0] < 5


def test_an_epoch_does_not_meet_where_one_did_that_rank_0_never_began() -> None:
    epochs = Epochs(2, "e")
    first, second = Member(0, "m0"), Member(1, "m1")
    epochs.hear(first.beat("a", 1), 0.0)
    second.hear(epoch := epochs.hear(second.beat("a", 0), 0.0), 0.0)
    assert epoch is not None
    second.started(epoch)
    second.stopped()
    assert epochs.hear(second.beat("a", 0), 1.0) is None
    assert epochs.hear(second.beat("a", 0), 2.0) is None
    again = epochs.hear(first.beat("a", 2), 2.0)
    assert again is not None
    assert again.master_port == 2


def test_a_rank_that_was_replaced_and_comes_back_disturbs_nobody() -> None:
    world = World(2)
    world.run(5)
    world.happens("host is cut off", 1)
    world.run(LOST_S + CALM_S)
    (epoch,) = {host.running for host in world.hosts.values()}
    world.heal()
    world.run(CALM_S)
    assert {host.running for host in world.hosts.values()} == {epoch}
