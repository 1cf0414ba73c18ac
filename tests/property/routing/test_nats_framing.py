"""Whatever a network does to frames and pages: what is applied is the stream, in order, once.

A simulated host publishes messages of all sizes and answers requests for pages from a short memory;
frames are lost, copied, late, and cut off; replays fail, or are given up for others.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from attrs import define, field
from hypothesis import example, given, settings
from hypothesis import strategies as st

from commutator.kv_events.publisher import MessageHistory
from commutator.kv_events.sequence import Action, Apply, EventSequence, Replay, Reset
from commutator_nats.framing import Frame, Incoming, Reassembly, head, page, split

MOST = 10
"""Bytes of a message that fit into a frame; pages hold a little more."""
INSTANCE = "ours"


@define
class World:
    """A host, a front door, and the subject between."""

    kept: MessageHistory
    sequence: EventSequence = field(factory=lambda: EventSequence(can_replay=True, restarts=False))
    incoming: Incoming = field(factory=lambda: Incoming(INSTANCE))
    subject: deque[Frame] = field(factory=deque)
    asked: Replay | None = None
    replay: Reassembly | None = None
    log: list[bytes] = field(factory=list)
    applied: list[bytes] = field(factory=list)
    resets: int = 0

    def do(self, actions: Sequence[Action]) -> None:
        for action in actions:
            match action:
                case Apply(body):
                    self.applied.append(body)
                case Reset():
                    self.applied.clear()
                    self.resets += 1
                case Replay():
                    self.asked, self.replay = action, Reassembly(action.first)

    def publish(self, size: int) -> None:
        body = f"{len(self.log)}:".encode().ljust(size, b"x")
        self.log.append(body)
        self.subject.extend(split(INSTANCE, self.kept.append(body), body, MOST))

    def deliver(self) -> None:
        if not self.subject:
            return
        frame = self.subject.popleft()
        message = self.incoming.feed(frame)
        if message is not None:
            self.do(self.sequence.on_live(*message))
        elif self.incoming.is_behind(frame):
            self.do(self.sequence.connected())

    def next_page(self, rest: int = 60) -> None:
        if self.asked is None or self.replay is None:
            return
        asked, number = self.asked, self.asked.number
        answer = page(self.kept, self.replay.first, self.replay.offset, rest)
        for message in self.replay.feed(answer):
            self.do(self.sequence.on_replayed(number, *message))
        if answer.complete and self.asked is asked:
            self.asked = None
            self.do(self.sequence.on_replay_end(number))

    def fail(self) -> None:
        if self.asked is not None:
            number, self.asked = self.asked.number, None
            self.do(self.sequence.on_replay_failed(number))

    def settle(self) -> None:
        self.subject.append(head(INSTANCE, self.kept.end))
        for _ in range(5_000):
            if self.subject:
                self.deliver()
            elif self.asked is not None:
                self.next_page()
            else:
                return
        raise AssertionError("replays never come to an end")


STEPS = st.one_of(
    st.tuples(st.just("publish"), st.integers(4, 45)),
    st.tuples(
        st.sampled_from(
            [
                "deliver",
                "deliver",
                "deliver",
                "lose",
                "copy",
                "swap",
                "foreign",
                "page",
                "page",
                "interrupted",
                "fail",
            ]
        ),
        st.integers(0, 30),
    ),
)


def step(world: World, name: str, number: int) -> None:
    subject = world.subject
    match name:
        case "publish":
            world.publish(number)
        case "deliver":
            world.deliver()
        case "lose" if subject:
            subject.popleft()
        case "copy" if subject:
            subject.insert(min(number, len(subject)), subject[0])
        case "swap" if len(subject) > 1:
            subject.rotate(-1)
        case "foreign":
            subject.appendleft(Frame("another", number, 0, 1, b"never"))
        case "page":
            world.next_page(41 + number)
        case "interrupted":  # what was under way is lost
            subject.clear()
            world.do(world.sequence.connected())
        case "fail":
            world.fail()


@settings(max_examples=300, deadline=None)
@example(1, [("publish", 4), ("deliver", 0), ("interrupted", 0), ("fail", 0)])
@given(st.integers(1, 12), st.lists(STEPS, max_size=60))
def test_the_end_is_known_and_nothing_lies_between(keep: int, steps: list[tuple[str, int]]) -> None:
    world = World(MessageHistory(keep))
    world.do(world.sequence.connected())
    for name, number in steps:
        step(world, name, number)
    world.settle()
    log = world.log
    assert world.applied == log[len(log) - len(world.applied) :], "a suffix, each once, in order"
    assert bool(world.applied) == bool(log)
    if not any(name == "fail" for name, _ in steps):
        assert len(world.applied) >= min(keep, len(log)), "all that could be had"
    assert not world.sequence.counters.restarts


@settings(max_examples=200, deadline=None)
@given(st.lists(STEPS.filter(lambda step: step[0] != "fail"), max_size=60))
def test_with_a_long_memory_nothing_is_ever_forgotten(steps: list[tuple[str, int]]) -> None:
    world = World(MessageHistory(1_000))
    world.do(world.sequence.connected())
    for name, number in steps:
        step(world, name, number)
    world.settle()
    assert world.applied == world.log
    assert world.resets == 0


@given(st.lists(st.binary(max_size=40), max_size=30), st.integers(0, 30), st.integers(0, 200))
def test_a_history_is_bounded_and_has_the_last(
    bodies: list[bytes], first: int, most_bytes: int
) -> None:
    kept = MessageHistory(10, most_bytes)
    for number, body in enumerate(bodies):
        assert kept.append(body) == number
    held = list(kept.since(0))
    assert kept.end == len(bodies)
    assert held == [(number, bodies[number]) for number in range(kept.begin, kept.end)]
    assert len(held) <= 10
    assert sum(len(body) for _, body in held) <= most_bytes
    assert list(kept.since(first)) == [message for message in held if message[0] >= first]
