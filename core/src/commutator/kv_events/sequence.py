"""Orders an engine's event messages, and decides what to do when some are missing.

No I/O: the input is messages and the ends of replays, the output is actions. Live messages and the
answer to a replay request arrive at the same time and may repeat each other. Each has its own
watermark: a live message behind the live watermark means that the engine restarted; one behind the
replay's watermark only means that the replay was faster.
"""

from __future__ import annotations

from collections import deque

from attrs import define, field, frozen
from xxhash import xxh3_64_intdigest


@frozen
class Apply:
    """Apply this message."""

    body: bytes


@frozen
class Reset:
    """Forget every block that came from this source."""

    reason: str


@frozen
class Replay:
    """Ask the replay endpoint for the messages from ``first`` on; stop an older replay."""

    number: int
    """Identifies the replay in later calls."""
    first: int


@frozen
class GoOn:
    """Call ``go_on`` after other work was done: more messages wait than are applied at once."""


Action = Apply | Reset | Replay | GoOn


@frozen
class Position:
    """The last applied message; with a snapshot of the index, where its events continue."""

    sequence: int
    digest: int
    """Distinguishes the message from a restarted engine's with the same number."""


@define
class SequenceCounters:
    """Counts of a source's messages and replays."""

    applied: int = 0
    passed_over: int = 0
    """Live messages that a replay had applied or passed already, and copies."""
    gaps: int = 0
    lost: int = 0
    """Messages that no replay could recover."""
    replays: int = 0
    replays_failed: int = 0
    restarts: int = 0
    resyncs: int = 0
    """How often all blocks were dropped because messages were lost."""
    interruptions: int = 0
    """Later connections than the first, and times when the bus dropped messages of this reader."""


@define
class EventSequence:
    """One source's messages, applied in order and each once.

    ``can_replay``: the source has a replay endpoint. While a replay runs, at most ``max_held``
    live messages wait for it; then they are applied, ``most_at_once`` by each call, as requests
    must not wait for all of them. Without a replay endpoint, or when it cannot fill a gap, all
    blocks are dropped: a block whose removal was missed would attract requests for ever. Without
    an endpoint every new connection drops them too, because most come from a restarted engine,
    whose next message may happen to have the expected number.

    ``restarts``: the numbers may begin anew, as those of an engine's socket. If not, as on an event
    bus, a number that came before is a copy, or late; and a failed replay proves nothing.
    """

    can_replay: bool
    max_held: int = 10_000
    position: Position | None = None
    restarts: bool = True
    most_at_once: int = 64
    live: int = -1
    """Watermark of the live messages since the engine started."""
    replayed: int = -1
    """Watermark of the present or last replay."""
    counters: SequenceCounters = field(factory=SequenceCounters)
    failed_in_a_row: int = 0
    """The number of replays in a row, up to the last, that failed."""
    _held: deque[tuple[int, bytes]] = field(factory=deque)
    """Live messages that wait for a replay, or after it for their turn."""
    _going_on: bool = False
    """``GoOn`` was returned, and ``go_on`` not called yet."""
    _replay: int = 0
    _running: bool = False
    _asked_from: int = -1
    _asked_live: int = -1
    """The live watermark when the running replay was requested."""
    _anchored: bool = False
    """The running replay began with the message at ``position``, so there is no gap."""
    _unverified: bool = False
    """Nothing since the last connection has shown that the engine did not restart."""
    _connected: bool = False
    _quiet: bool = False
    """The last connection has brought no message yet."""
    _early: bool = False
    """A restarted engine's message came before its connection was reported."""
    _ahead: dict[int, int] = field(factory=dict)
    """Digests of replayed messages that may still come live, to detect a restarted engine's."""

    def __attrs_post_init__(self) -> None:
        if self.position is not None and not self.can_replay:
            # No replay can show a restart of the engine, but a repeated message number can.
            self.live = self.position.sequence

    def connected(self) -> list[Action]:
        """The connection is new: earlier messages were missed, perhaps of a restarted engine.

        Messages that waited for a replay may be those of an engine that restarted meanwhile, and
        the new replay has those that still count. Those of a bus stay valid, should it fail.
        """
        again, self._connected = self._connected, True
        early, self._early = self._early, False
        self._quiet = True
        if again:
            self.counters.interruptions += 1
        if self.restarts:
            self._held.clear()
        self._unverified = self.restarts and self.position is not None
        if self.can_replay:
            return [self._ask()]
        if self.position is None or not again or early:
            return []
        self.counters.resyncs += 1
        return [self._forget("after a new connection, missed messages cannot be detected")]

    def check(self) -> list[Action]:
        """A regular check is due: ask whether anything was missed."""
        return [self._ask()] if self.can_replay and not self._running and not self._held else []

    def on_live(self, sequence: int, body: bytes) -> list[Action]:
        """A message came on the live connection."""
        quiet, self._quiet = self._quiet, False
        if sequence <= self.live:
            if not self.restarts:
                self.counters.passed_over += 1
                return []
            self._early = not quiet
            return self._restarted(sequence, body)
        self.live = sequence
        if self._running or self._held:
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
            return [self._forget("the engine restarted while disconnected"), self._ask()]
        if sequence == position.sequence + 1 and self._anchored:
            return [self._apply(sequence, body, replayed=True)]
        if self._anchored and position.sequence > self._asked_from:
            return [self._ask()]  # the replay has a gap, but made progress: ask again
        return self._resync(sequence, body, replayed=True)

    def on_replay_end(self, number: int) -> list[Action]:
        """Replay ``number`` is complete."""
        if number != self._replay or not self._running:
            return []
        self._running = False
        self.failed_in_a_row = 0
        lost = self.position is not None and not self._anchored
        if lost and (self._unverified or not self._held):
            # Not even the last applied message is there: the engine restarted.
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
            reset = self._forget("after a new connection, no replay recovered the missed messages")
            return [reset, *self._drain()]
        return self._drain()

    def go_on(self) -> list[Action]:
        """Apply more of what waited for a replay."""
        self._going_on = False
        return [] if self._running else self._drain()

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
        """Apply what waited for the replay that just ended, or a part of it."""
        actions: list[Action] = []
        for _ in range(self.most_at_once):
            if not self._held:
                break
            sequence, body = self._held.popleft()
            known_to = -1 if self.position is None else self.position.sequence
            fruitless = known_to == self._asked_from and sequence <= self._asked_live
            if fruitless and sequence > known_to + 1:
                # The gap existed when the replay was requested, and the replay did not fill it.
                actions += self._skip_to(sequence, body)
                continue
            actions += self._advance(sequence, body)
            if self._running:  # a gap: the message is now the last in the queue
                self._held.rotate(1)
                break
        if self._held and not self._running and not self._going_on:
            self._going_on = True
            actions.append(GoOn())
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
        """Apply a live message although those before it are lost."""
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
            self._anchored = True  # the next message follows this one
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
