"""What strangers do, in the log: a few lines at once, then a sum each minute."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter

__all__ = ["Strangers"]

log = logging.getLogger(__name__)

_WINDOW_S = 60.0
_LINES = 10
"""That one kind of event may write in a minute."""
_ADDRESSES = 1024
"""That are told apart in a minute; what others do counts, too, but not whose it was."""


class Strangers:
    """Counts events that anybody can cause as often as he likes. Used from one event loop."""

    def __init__(self) -> None:
        self._all: Counter[str] = Counter()
        self._left_out: Counter[str] = Counter()
        self._by_address: Counter[str] = Counter()
        self._timer: asyncio.TimerHandle | None = None

    def add(self, what: str, address: str) -> bool:
        """Count one event of the kind ``what``; whether it may have a line of its own.

        ``address``: whose it is, empty where it is unknown.
        """
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_WINDOW_S, self._tell)
        self._all[what] += 1
        if self._all[what] <= _LINES:
            return True
        self._left_out[what] += 1
        if address and (address in self._by_address or len(self._by_address) < _ADDRESSES):
            self._by_address[address] += 1
        return False

    def _tell(self) -> None:
        """Say what had no line of its own in the minute that ends."""
        if self._left_out:
            counts = ", ".join(f"{count} {what}" for what, count in self._left_out.most_common())
            most = self._by_address.most_common(1)
            of_one = f"; {most[0][1]} of all by {most[0][0]}" if most else ""
            log.warning("in the last minute, without a line each: %s%s", counts, of_one)
        self._all.clear()
        self._left_out.clear()
        self._by_address.clear()
        self._timer = None
