"""One transfer that was handed to NIXL."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from attrs import define, field

from commutator.errors import TransferCancelledError, TransferError, TransferTimeoutError
from commutator.transfer.nixl_library import nixl_errors
from commutator.transfer.request import Request

__all__ = ["POLL_S", "Transfer", "poll_pause_s"]

log = logging.getLogger(__name__)

POLL_S = 100e-6
"""Between two looks at transfers under way: short beside a megabyte's way to a disk, and long
enough for other threads to run."""
_LONGEST_POLL_S = 1e-3
_LOOKS_PER_WAIT = 10


def poll_pause_s(waited_s: float) -> float:
    """How long to wait before the next look, after so long without news.

    A tenth of the wait so far delays nothing by more than that; looking at an object store's slow
    transfers every 100 us would cost as much CPU as the transfers themselves.
    """
    return min(_LONGEST_POLL_S, max(POLL_S, waited_s / _LOOKS_PER_WAIT))


@define(eq=False)
class Transfer:
    """Bytes under way. Both sides must stay as they are until it is done.

    It is never taken back: NIXL lets a transfer be released while bytes still arrive, and reads of
    files that were released so make later reads on the same agent end too early. Giving up on
    a transfer only means to wait for it elsewhere, in ``TransferAgent.reap``.
    """

    token: int
    """Its number, unique within the process."""
    request: Request
    _nixl: Any = field(repr=False)
    _handle: Any = field(repr=False)
    _on_end: Callable[[Transfer], None] = field(repr=False)
    moved_bytes: int = 0
    """What NIXL's telemetry says it moved; set when it has succeeded and telemetry knows."""
    abandoned: bool = False
    """Nobody waits for it; the memory is pinned until it is reaped."""
    _ended: bool = False
    _error: TransferError | None = None

    def done(self) -> bool:
        """Whether every byte has arrived. Never waits.

        Raises TransferError when it failed. What was at the destination may then be overwritten in
        part, but nothing touches it any more.
        """
        if not self._ended:
            self._look(lambda: self._nixl.check_xfer_state(self._handle))
        if self._error is not None:
            raise self._error
        return self._ended

    def wait(self, timeout_s: float, cancelled: Callable[[], bool] = lambda: False) -> None:
        """Return when every byte has arrived.

        Raises TransferError when it failed, TransferTimeoutError when it took longer than this, and
        TransferCancelledError as soon as ``cancelled`` answers True. After the latter two the
        memory stays pinned until ``TransferAgent.reap`` returns the token.
        """
        started_s = time.monotonic()
        deadline_s = started_s + timeout_s
        while not self.done():
            if cancelled():
                self.abandoned = True
                raise TransferCancelledError(f"{self.request} was cancelled", self.token)
            now_s = time.monotonic()
            if now_s >= deadline_s:
                self.abandoned = True
                raise TransferTimeoutError(f"{self.request} took over {timeout_s} s", self.token)
            time.sleep(poll_pause_s(now_s - started_s))

    def post(self) -> None:
        """Begin. Called once, by the agent."""
        self._look(lambda: self._nixl.transfer(self._handle))

    def _look(self, call: Callable[[], str]) -> None:
        try:
            with nixl_errors(self.request):
                state = call()
            if state == "PROC":
                return
            if state != "DONE":
                self._error = TransferError(f"NIXL could not {self.request}: {state}")
        except TransferError as error:
            self._error = error
        self._ended = True
        if self._error is None:
            self.moved_bytes = self._counted()
        try:
            with nixl_errors("release a transfer"):
                self._handle.release()
        finally:
            self._on_end(self)

    def _counted(self) -> int:
        try:
            return int(self._nixl.get_xfer_telemetry(self._handle).totalBytes)
        except Exception:
            # The bytes are there all the same; only the count of them is too low.
            log.debug("NIXL cannot count the bytes that it moved", exc_info=True)
            return 0
