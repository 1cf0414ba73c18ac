"""Whatever is lost, delayed or restarted: what is applied is one life's messages, in order, once.

A simulated engine publishes, restarts and answers replays from a short memory; the live connection
loses messages, and replays run beside it, are cut off, or fail.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from attrs import define, field
from hypothesis import given, settings
from hypothesis import strategies as st

from commutator.kv_events.sequence import Action, Apply, EventSequence, GoOn, Replay, Reset

Message = tuple[int, bytes]


@define
class World:
    """The engine, the network between, and what the front door has applied since a reset."""

    keep: int
    sequence: EventSequence
    life: int = 0
    log: list[Message] = field(factory=list)
    live: deque[Message] = field(factory=deque)
    asked: Replay | None = None
    answer: deque[Message] | None = None
    goes_on: bool = False
    applied: list[bytes] = field(factory=list)

    def do(self, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case Apply(body):
                    self.applied.append(body)
                case Reset():
                    self.applied.clear()
                case Replay():
                    self.asked, self.answer = action, None
                case GoOn():
                    assert not self.goes_on
                    self.goes_on = True

    def publish(self, *, lost: bool = False) -> None:
        message = (len(self.log), f"{self.life}:{len(self.log)}".encode())
        self.log.append(message)
        if not lost:
            self.live.append(message)

    def deliver(self) -> None:
        if self.live:
            self.do(self.sequence.on_live(*self.live.popleft()))

    def restart(self) -> None:
        """The connection breaks, what was under way in it is delivered, and it is made anew."""
        while self.live:
            self.deliver()
        self.life += 1
        self.log = []
        self.do(self.sequence.connected())

    def replay(self, *, hole: bool = False) -> None:
        """The next message of the replay that runs, or its end."""
        if self.asked is None:
            return
        if self.answer is None:
            kept = self.log[-self.keep :]
            self.answer = deque(message for message in kept if message[0] >= self.asked.first)
        if hole and self.answer:
            self.answer.popleft()
        number = self.asked.number
        if self.answer:
            self.do(self.sequence.on_replayed(number, *self.answer.popleft()))
        else:
            self.asked = None
            self.do(self.sequence.on_replay_end(number))

    def fail(self) -> None:
        if self.asked is not None:
            number, self.asked = self.asked.number, None
            self.do(self.sequence.on_replay_failed(number))

    def go_on(self) -> None:
        if self.goes_on:
            self.goes_on = False
            self.do(self.sequence.go_on())

    def settle(self) -> None:
        for _ in range(2_000):
            if self.live:
                self.deliver()
            elif self.asked is not None:
                self.replay()
            elif self.goes_on:
                self.go_on()
            else:
                return
        raise AssertionError("replays never come to an end")


STEPS = (
    ["publish"] * 6 + ["lose"] * 2 + ["deliver"] * 6 + ["replay"] * 6 + ["hole", "fail", "go_on"]
)
MORE = ["restart", "check", "connect", "stale"]


def step(world: World, name: str) -> None:
    simple = {
        "publish": world.publish,
        "deliver": world.deliver,
        "replay": world.replay,
        "fail": world.fail,
        "go_on": world.go_on,
        "restart": world.restart,
    }
    match name:
        case "lose":
            world.publish(lost=True)
        case "hole":
            world.replay(hole=True)
        case "check":
            world.do(world.sequence.check())
        case "connect":
            world.do(world.sequence.connected())
        case "stale":
            assert world.sequence.on_replayed(0, 3, b"of a replay that was stopped") == []
            assert world.sequence.on_replay_end(0) == []
        case _:
            simple[name]()


def bodies(world: World) -> list[bytes]:
    return [body for _, body in world.log]


@settings(max_examples=1000, deadline=None)
@given(
    st.integers(1, 12),
    st.integers(1, 12),
    st.integers(1, 4),
    st.lists(st.sampled_from(STEPS + MORE)),
)
def test_with_replay_the_end_is_known_and_nothing_lies_between(
    keep: int, max_held: int, most_at_once: int, names: list[str]
) -> None:
    sequence = EventSequence(can_replay=True, max_held=max_held, most_at_once=most_at_once)
    world = World(keep, sequence)
    world.do(world.sequence.connected())
    for name in names:
        step(world, name)
    world.settle()
    world.do(world.sequence.check())
    world.settle()
    log = bodies(world)
    assert world.applied == log[len(log) - len(world.applied) :], "a suffix, each once, in order"
    assert bool(world.applied) == bool(log)
    if not {"fail", "hole"} & set(names):
        assert len(world.applied) >= min(keep, len(log)), "all that could be had"


@settings(max_examples=500, deadline=None)
@given(st.lists(st.sampled_from(["publish", "publish", "lose", "deliver", "check", "connect"])))
def test_without_replay_a_gap_drops_what_was_known(names: list[str]) -> None:
    world = World(0, EventSequence(can_replay=False))
    for name in names:
        step(world, name)
    world.publish()
    world.settle()
    log = bodies(world)
    assert world.applied
    assert world.applied == log[len(log) - len(world.applied) :]


@settings(max_examples=500, deadline=None)
@given(st.lists(st.sampled_from(["publish", "publish", "deliver", "replay", "check", "connect"])))
def test_nothing_is_dropped_when_nothing_is_lost(names: list[str]) -> None:
    world = World(1000, EventSequence(can_replay=True, most_at_once=2))
    world.do(world.sequence.connected())
    for name in names:
        step(world, name)
    world.settle()
    world.do(world.sequence.check())
    world.settle()
    assert world.applied == bodies(world)
    counters = world.sequence.counters
    assert (counters.restarts, counters.resyncs, counters.gaps) == (0, 0, 0)
