"""In which order an engine's event messages are applied, and what to do when some are missing.

Pure: messages and the ends of replays go in, actions come out. Messages come twice, live and in
answer to a replay request, and both run at the same time; each has its own watermark, because a
live message behind the live watermark means that the engine began anew, while one behind the
replay's only means that the replay was faster.
"""

from __future__ import annotations

from collections import deque

from attrs import define, field, frozen
from xxhash import xxh3_64_intdigest

__all__ = ["Action", "Apply", "EventSequence", "Position", "Replay", "Reset", "SequenceCounters"]


@frozen
class Apply:
    """Take this message into account."""

    body: bytes


@frozen
class Reset:
    """Forget every block that came from this source."""

    reason: str


@frozen
class Replay:
    """Ask the replay endpoint for the messages from ``first`` on; stop an older replay."""

    number: int
    """Goes with everything that is reported of this replay."""
    first: int


Action = Apply | Reset | Replay


@frozen
class Position:
    """The last message that was applied; with a snapshot of the index, where to go on."""

    sequence: int
    digest: int
    """Tells it from the message that a restarted engine sent under the same number."""


@define
class SequenceCounters:
    """What happened to a source's messages."""

    applied: int = 0
    passed_over: int = 0
    """Live messages that a replay had brought, or had already gone beyond."""
    gaps: int = 0
    lost: int = 0
    """Messages that no replay could bring back."""
    replays: int = 0
    replays_failed: int = 0
    restarts: int = 0
    resyncs: int = 0
    """Times that everything known was dropped because messages were lost."""


@define
class EventSequence:
    """One source's messages, applied in order and each once.

    ``can_replay``: the source has a replay endpoint. While a replay runs, at most ``max_held``
    live messages wait for it. Without a replay endpoint, or when it cannot fill a gap, what was
    known is dropped: a block whose removal was missed would attract requests for ever. Without one
    that goes for every new connection, too, as most come of an engine that began anew, and the
    number of its next message may happen to fit.
    """

    can_replay: bool
    max_held: int = 10_000
    position: Position | None = None
    live: int = -1
    """Watermark of the live messages of this life of the engine."""
    replayed: int = -1
    """Watermark of the replay that runs or ran last."""
    counters: SequenceCounters = field(factory=SequenceCounters)
    failed_in_a_row: int = 0
    """How many of the last replays failed, one after the other."""
    _held: deque[tuple[int, bytes]] = field(factory=deque)
    _replay: int = 0
    _running: bool = False
    _asked_from: int = -1
    _asked_live: int = -1
    """The live watermark when the running replay was asked for."""
    _anchored: bool = False
    """The running replay began with the message at ``position``, so nothing lies between."""
    _unverified: bool = False
    """Since the last connection nothing has shown that the engine is the same."""
    _connected: bool = False
    _quiet: bool = False
    """The last connection has brought nothing yet."""
    _early: bool = False
    """A new life was heard before its connection was told of."""
    _ahead: dict[int, int] = field(factory=dict)
    """Digests of replayed messages that may still come live, to tell them from a new life's."""

    def __attrs_post_init__(self) -> None:
        if self.position is not None and not self.can_replay:
            # No replay can tell another life of the engine; a message that came before can.
            self.live = self.position.sequence

    @property
    def replaying(self) -> bool:
        return self._running

    def connected(self) -> list[Action]:
        """The connection is new: what was sent before was missed, perhaps by another life.

        What waited for a replay came from before, so the new replay has it too, if it still counts.
        """
        again, self._connected = self._connected, True
        early, self._early = self._early, False
        self._quiet = True
        self._held.clear()
        self._unverified = self.position is not None
        if self.can_replay:
            return [self._ask()]
        if self.position is None or not again or early:
            return []
        self.counters.resyncs += 1
        return [self._forget("after a new connection nothing can tell what was missed")]

    def check(self) -> list[Action]:
        """A regular check is due: ask whether anything was missed."""
        return [self._ask()] if self.can_replay and not self._running else []

    def on_live(self, sequence: int, body: bytes) -> list[Action]:
        """A message came on the live connection."""
        quiet, self._quiet = self._quiet, False
        if sequence <= self.live:
            self._early = not quiet
            return self._restarted(sequence, body)
        self.live = sequence
        if self._running:
            self._hold(sequence, body)
            return []
        return self._advance(sequence, body)

    def on_replayed(self, number: int, sequence: int, body: bytes) -> list[Action]:
        """A message came in answer to replay ``number``."""
        if number != self._replay or not self._running or sequence <= self.replayed:
            return []
        self.replayed = sequence
        position = self.position
        if position is None:
            return [self._apply(sequence, body, replayed=True)]
        if sequence < position.sequence:
            return []
        if sequence == position.sequence:
            self._anchored = True
            self._unverified = False
            if xxh3_64_intdigest(body) == position.digest:
                return []
            self.counters.restarts += 1
            return [self._forget("the engine restarted while it was not heard"), self._ask()]
        if sequence == position.sequence + 1 and self._anchored:
            return [self._apply(sequence, body, replayed=True)]
        if self._anchored and position.sequence > self._asked_from:
            return [self._ask()]  # the answer has a hole; it brought us forward, so ask again
        return self._resync(sequence, body, replayed=True)

    def on_replay_end(self, number: int) -> list[Action]:
        """Replay ``number`` is complete."""
        if number != self._replay or not self._running:
            return []
        self._running = False
        self.failed_in_a_row = 0
        lost = self.position is not None and not self._anchored
        if lost and (self._unverified or not self._held):
            # Not even the last message we applied is kept: another life of the engine.
            self.counters.restarts += 1
            return [self._forget("the engine restarted and has sent less than before"), self._ask()]
        return self._drain()

    def on_replay_failed(self, number: int) -> list[Action]:
        """Replay ``number`` was not answered, or not to its end."""
        if number != self._replay or not self._running:
            return []
        self._running = False
        self.counters.replays_failed += 1
        self.failed_in_a_row += 1
        if self._unverified and not self._anchored:
            self.counters.resyncs += 1
            reset = self._forget("after a new connection no replay showed what was missed")
            return [reset, *self._drain()]
        return self._drain()

    def _advance(self, sequence: int, body: bytes) -> list[Action]:
        known_to = -1 if self.position is None else self.position.sequence
        if sequence == known_to + 1:
            self._ahead.clear()
            return [self._apply(sequence, body)]
        if sequence <= known_to:
            replayed = self._ahead.pop(sequence, None)
            if replayed not in (None, xxh3_64_intdigest(body)):
                return self._restarted(sequence, body)
            self.counters.passed_over += 1
            return []
        if not self.can_replay:
            return self._skip_to(sequence, body)
        self.counters.gaps += 1
        self._hold(sequence, body)
        return [self._ask()]

    def _drain(self) -> list[Action]:
        """Apply what waited for the replay that just ended."""
        actions: list[Action] = []
        while self._held:
            sequence, body = self._held.popleft()
            known_to = -1 if self.position is None else self.position.sequence
            fruitless = known_to == self._asked_from and sequence <= self._asked_live
            if fruitless and sequence > known_to + 1:
                # The gap was there when the replay was asked for, and it brought nothing.
                actions += self._skip_to(sequence, body)
                continue
            actions += self._advance(sequence, body)
            if self._running:  # a gap: the message went to the end of those that wait
                self._held.rotate(1)
                break
        return actions

    def _restarted(self, sequence: int, body: bytes) -> list[Action]:
        self.counters.restarts += 1
        self._held.clear()
        self._running = False
        self.live = sequence
        reset = self._forget(f"the engine restarted: message {sequence} came again")
        if sequence == 0 or not self.can_replay:
            return [reset, self._apply(sequence, body)]
        self._hold(sequence, body)
        return [reset, self._ask()]

    def _skip_to(self, sequence: int, body: bytes) -> list[Action]:
        """What lies before this live message cannot be had."""
        if self.position is None:
            return [self._apply(sequence, body)]
        self.counters.gaps += 1
        return self._resync(sequence, body)

    def _resync(self, sequence: int, body: bytes, *, replayed: bool = False) -> list[Action]:
        assert self.position is not None
        lost = sequence - self.position.sequence - 1
        self.counters.resyncs += 1
        self.counters.lost += lost
        reset = self._forget(f"{lost} messages before {sequence} are lost")
        return [reset, self._apply(sequence, body, replayed=replayed)]

    def _apply(self, sequence: int, body: bytes, *, replayed: bool = False) -> Apply:
        if self.position is None:
            self._anchored = True  # what comes next follows this message
        digest = xxh3_64_intdigest(body)
        self.position = Position(sequence, digest)
        if replayed:
            self._ahead[sequence] = digest
            if len(self._ahead) > self.max_held:
                del self._ahead[next(iter(self._ahead))]
        self.counters.applied += 1
        return Apply(body)

    def _forget(self, reason: str) -> Reset:
        self.position = None
        self._unverified = False
        self._ahead.clear()
        return Reset(reason)

    def _hold(self, sequence: int, body: bytes) -> None:
        if len(self._held) >= self.max_held:
            self._held.popleft()
        self._held.append((sequence, body))

    def _ask(self) -> Replay:
        self._replay += 1
        self._running = True
        self._anchored = False
        self.replayed = -1
        self._asked_from = -1 if self.position is None else self.position.sequence
        self._asked_live = self.live
        self.counters.replays += 1
        return Replay(self._replay, max(self._asked_from, 0))
