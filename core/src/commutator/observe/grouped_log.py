"""A log handler for processes that log every request."""

from __future__ import annotations

import asyncio
import logging
import sys
from typing import TextIO

__all__ = ["GroupedLog"]


class GroupedLog(logging.Handler):
    """Writes ordinary lines in groups: one write, and one wake-up of the reader, for many requests.

    A line waits for at most ``delay_s``. Warnings are written at once, and so is what is logged
    outside of the event loop, each after everything before it. Only a process that is killed can
    lose lines: those of its last ``delay_s``.
    """

    def __init__(self, stream: TextIO | None = None, *, delay_s: float = 0.05) -> None:
        super().__init__()
        self._stream = stream or sys.stderr
        self._delay_s = delay_s
        self._lines: list[str] = []
        self._flush_is_due = False

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._lines.append(self.format(record))
        except Exception:  # noqa: BLE001 - a line that cannot be written must not fail a request
            self.handleError(record)
            return
        if record.levelno > logging.INFO:
            self.flush()
        elif not self._flush_is_due:
            try:
                loop = asyncio.get_running_loop()
            except RuntimeError:
                self.flush()
            else:
                self._flush_is_due = True
                loop.call_later(self._delay_s, self._due)

    def flush(self) -> None:
        """Write everything now. Called at the process's end, too."""
        self.acquire()
        try:
            lines, self._lines = self._lines, []
            if lines:
                self._stream.write("\n".join(lines) + "\n")
                self._stream.flush()
        except (OSError, ValueError):
            pass  # whoever read it went away; serving goes on
        finally:
            self.release()

    def _due(self) -> None:
        self._flush_is_due = False
        self.flush()
