"""Follows a range of keys: a session is a list, then a watch from the next revision on. Pure.

No watch is ever resumed. Whatever ends a session (a break, silence, a compaction, a member that has
lost its leader), the next one lists again and compares, so that a delete nobody was told of is
found. A session also ends by itself every ``resync_s`` seconds, because etcd has lost deletes of
watches around compactions.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf

from attrs import field, frozen

Delta = Mapping[bytes, bytes | None]
"""The new values of keys; None: deleted."""

_HEARTBEAT_S = 1.0
_SILENCE_S = 3.0


@frozen
class Listing:
    """All keys of the range, as of one revision."""

    revision: int
    values: Mapping[bytes, bytes]


@frozen
class WatchMessage:
    """One message of a watch."""

    revision: int
    """The member's revision when it sent the message."""
    delta: Delta = field(factory=dict)
    """What changed, in whole revisions."""
    progress: bool = False
    """Whether it answers a progress request: everything before that was sent."""
    cancelled: str | None = None
    """Why etcd ended the watch."""
    compacted: bool = False
    """It was ended because the revisions to begin with are no longer there."""


class SessionEnd(Exception):  # noqa: N818 - not every end is an error
    """The session is over: list again, at another member if this one is at ``fault``."""

    def __init__(self, reason: str, *, fault: bool) -> None:
        super().__init__(reason)
        self.fault = fault


class Follower:
    """The values of a range of keys, through any number of sessions.

    Times are seconds of one monotonic clock.
    """

    def __init__(self, resync_s: float) -> None:
        self.values: dict[bytes, bytes] = {}
        self.revision = 0
        """That of the session's list: the watch begins after it."""
        self._resync_s = resync_s
        self.confirmed_s = -inf
        """As of when ``values`` were certainly complete at the member."""
        self._began_s = 0.0
        self._heard_s = 0.0
        self._asked_s: float | None = None
        """When the progress request was sent that is not answered yet."""
        self._ask_at_s = 0.0

    def age_s(self, now_s: float) -> float:
        """Seconds since ``confirmed_s``; infinite at first."""
        return now_s - self.confirmed_s

    def listed(self, listing: Listing, asked_s: float, now_s: float) -> Delta:
        """Begin a session with a list that was asked for at ``asked_s``; returns the difference."""
        new = listing.values
        delta: dict[bytes, bytes | None] = {key: None for key in self.values if key not in new}
        delta |= {key: value for key, value in new.items() if self.values.get(key) != value}
        self.values, self.revision = dict(new), listing.revision
        self.confirmed_s = asked_s
        self._began_s = self._heard_s = self._ask_at_s = now_s
        self._asked_s = None
        return delta

    def received(self, message: WatchMessage, now_s: float) -> Delta:
        """Take a message of the session's watch; returns what changed. Raises SessionEnd."""
        self._heard_s = now_s
        if message.compacted:
            raise SessionEnd("the revisions to watch were compacted", fault=False)
        if message.cancelled is not None:
            raise SessionEnd(message.cancelled, fault=True)
        if message.revision < self.revision:
            raise SessionEnd("etcd's revision went back: was a backup restored?", fault=False)
        if message.progress and self._asked_s is not None:
            # etcd before 3.4.25 and 3.5.8 may answer before it sent the last changes: then the age
            # is too small, until these come or the next list.
            self.confirmed_s, self._asked_s = self._asked_s, None
        for key, value in message.delta.items():
            if value is None:
                self.values.pop(key, None)
            else:
                self.values[key] = value
        return message.delta

    def confirm_by(self, when_s: float) -> None:
        """Have ``values`` confirmed as of then, if that is before the next heartbeat."""
        self._ask_at_s = min(self._ask_at_s, when_s)

    def due_s(self) -> float:
        """When ``tick`` has something to do next."""
        ends_s = min(self._began_s + self._resync_s, self._heard_s + _SILENCE_S)
        return ends_s if self._asked_s is not None else min(ends_s, self._ask_at_s)

    def tick(self, now_s: float) -> bool:
        """Whether to send a progress request now. Raises SessionEnd."""
        if now_s >= self._heard_s + _SILENCE_S:
            raise SessionEnd(f"silent for {_SILENCE_S:g} s", fault=True)
        if now_s >= self._began_s + self._resync_s:
            raise SessionEnd("time to list again", fault=False)
        if self._asked_s is not None or now_s < self._ask_at_s:
            return False
        self._asked_s, self._ask_at_s = now_s, now_s + _HEARTBEAT_S
        return True
