"""Counts the connections that this process refused, and logs them at a bounded rate."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping

log = logging.getLogger("commutator.trust")

_LINE_EVERY_S = 10.0


class RefusalLog:
    """Counts refusals by service; ``note`` returns the line to log, at most one each interval."""

    def __init__(
        self, every_s: float = _LINE_EVERY_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.counts: Counter[str] = Counter()
        """Refused connections by service, since the process began."""
        self._every_s = every_s
        self._clock = clock
        self._quiet_until_s: dict[str, float] = {}
        self._unlogged: Counter[str] = Counter()

    def note(self, service: str, peer: str, reason: str) -> str | None:
        """Count one refusal. Returns the line to log; None while the last one is too recent."""
        self.counts[service] += 1
        now_s = self._clock()
        if now_s < self._quiet_until_s.get(service, 0.0):
            self._unlogged[service] += 1
            return None
        self._quiet_until_s[service] = now_s + self._every_s
        others = self._unlogged.pop(service, 0)
        more = f"; {others} more were refused since the last such line" if others else ""
        return f"{service}: refused a connection from {peer}: {reason}{more}"


_refusals = RefusalLog()
_lock = threading.Lock()


def will_refuse(service: str) -> None:
    """Count 0 refusals of a service that begins: a rate does not see a count begin at 1."""
    with _lock:
        _refusals.counts[service] += 0


def note_refusal(service: str, peer: str, reason: str) -> None:
    """Count and log a refused connection. Call it from any thread."""
    with _lock:
        line = _refusals.note(service, peer, reason)
    if line is not None:
        log.warning("%s", line)


def refused_connections() -> Mapping[str, int]:
    """Connections that this process refused since it began, by service, such as "token API".

    Services that refused none are there with 0.
    """
    with _lock:
        return dict(_refusals.counts)
