"""Follows the objects of one resource: a session is a list, then a watch from its version on. Pure.

No watch is ever resumed. Whatever ends a session (a break, silence, a version that is gone), the
next one lists again and compares, so that a delete nobody was told of is found. A session also ends
by itself every ``resync_s`` seconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import inf
from typing import Any

Json = dict[str, Any]
Delta = Mapping[str, Json | None]
"""The new state of objects by name; None: deleted."""

SILENCE_S = 70.0
"""The API server sends a bookmark about once a minute: a watch silent for longer is deaf."""
_ECHO_S = 5.0
"""After this time a watch has told of what this process has written itself."""


class Relist(Exception):  # noqa: N818 - not every end is an error
    """The session is over: list again."""

    def __init__(self, reason: str, *, fault: bool) -> None:
        """``fault``: something went wrong."""
        super().__init__(reason)
        self.fault = fault


class Reflector:
    """The objects of one resource, through any number of sessions.

    Times are seconds of one monotonic clock.
    """

    def __init__(self, resync_s: float, silence_s: float = SILENCE_S) -> None:
        self.objects: dict[str, Json] = {}
        self.version = ""
        """That of the session's list or last event: the watch goes on after it."""
        self.confirmed_s = -inf
        """When the API server last said something of the resource."""
        self._resync_s = resync_s
        self._silence_s = silence_s
        self._began_s = 0.0
        self._confirm_at_s = inf
        self._echoes: dict[str, float] = {}
        """By when the watch is to tell of an object that this process has written."""

    def age_s(self, now_s: float) -> float:
        """Seconds since ``confirmed_s``; infinite at first."""
        return now_s - self.confirmed_s

    def listed(self, items: Iterable[Json], version: str, asked_s: float, now_s: float) -> Delta:
        """Begin a session with a list that was asked for at ``asked_s``; returns the difference."""
        new = {str(item["metadata"]["name"]): item for item in items}
        delta: dict[str, Json | None] = {name: None for name in self.objects if name not in new}
        delta |= {name: item for name, item in new.items() if self.objects.get(name) != item}
        self.objects, self.version = new, version
        self.confirmed_s, self._began_s = asked_s, now_s
        self._confirm_at_s = inf
        self._echoes.clear()
        return delta

    def received(self, event: Json, now_s: float) -> Delta:
        """Take an event of the session's watch; returns what changed. Raises Relist."""
        kind, item = event.get("type"), event.get("object") or {}
        if kind == "ERROR":
            raise Relist(
                f"the watch was ended: {item.get('code')} {item.get('message') or ''}".rstrip(),
                fault=item.get("code") not in (410, 504),
            )
        version = version_of(item)
        if version.isdigit() and self.version.isdigit() and int(version) < int(self.version):
            raise Relist("its versions went back: was a backup restored?", fault=True)
        self.confirmed_s, self.version = now_s, version
        if kind == "BOOKMARK":
            return {}
        name = str(item["metadata"]["name"])
        self._echoes.pop(name, None)
        if kind == "DELETED":
            self.objects.pop(name, None)
            return {name: None}
        self.objects[name] = item
        return {name: item}

    def wrote(self, item: Json, now_s: float) -> None:
        """This process has written an object: a watch that does not tell of it is deaf."""
        name = str(item["metadata"]["name"])
        if name in self.objects and version_of(self.objects[name]) == version_of(item):
            return
        self._echoes.setdefault(name, now_s + _ECHO_S)

    def confirm_by(self, when_s: float) -> None:
        """Have the objects confirmed as of then, by a list if the watch says nothing."""
        self._confirm_at_s = when_s

    def due_s(self) -> float:
        """When ``tick`` has something to say."""
        ends_s = min(self._began_s + self._resync_s, self.confirmed_s + self._silence_s)
        return min([ends_s, self._confirm_at_s, *self._echoes.values()])

    def tick(self, now_s: float) -> None:
        """Raises Relist when the session is to end."""
        if any(until_s <= now_s for until_s in self._echoes.values()):
            raise Relist("it does not tell of what was written", fault=True)
        if now_s >= self.confirmed_s + self._silence_s:
            raise Relist(f"silent for {self._silence_s:g} s", fault=True)
        if now_s >= min(self._began_s + self._resync_s, self._confirm_at_s):
            raise Relist("time to list again", fault=False)


def version_of(item: Json) -> str:
    """An object's ``resourceVersion``."""
    return str((item.get("metadata") or {}).get("resourceVersion", ""))
