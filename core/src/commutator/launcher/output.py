"""What `serve` prints: the lines of every process and its own log, each with its source."""

from __future__ import annotations

import json
import logging
import queue
import sys
import threading
import time
import zlib
from collections.abc import Callable
from datetime import datetime
from functools import lru_cache
from importlib.metadata import entry_points
from typing import Literal, TextIO

_COLOURS = (36, 33, 32, 35, 34, 96, 93, 92, 95, 94)
_RESET, _DIM = "\x1b[0m", "\x1b[2m"
_QUEUED_LINES = 10_000


@lru_cache(1)
def _clock(unix_s: int) -> str:
    """The time of day; asking for the time zone costs more than all else about a line."""
    return datetime.fromtimestamp(unix_s).astimezone().strftime("%H:%M:%S")


class Printer:
    """Writes in its own thread, so that a paused terminal does not block the supervisor.

    Lines beyond a bounded queue are dropped and counted.
    """

    def __init__(
        self,
        form: Literal["text", "json"],
        *,
        log: TextIO | None = None,
        out: TextIO | None = None,
        colour: bool = False,
    ) -> None:
        self._form = form
        self._log = log or sys.stderr
        self._out = out or sys.stdout
        self._colour = colour
        made = next(iter(entry_points(group="commutator.logs", name="json")), None)
        self._as_json: Callable[[str, str, str], str] = made.load()() if made else _plain_json
        self._queue: queue.Queue[tuple[TextIO, str] | None] = queue.Queue(_QUEUED_LINES)
        self._dropped = 0
        self._thread = threading.Thread(target=self._write, name="printer", daemon=True)
        self._thread.start()

    def line(self, process: str, stream: str, message: str) -> None:
        """One line of a process. Never blocks."""
        self._put(self._log, self._format(process, stream, message))

    def announce(self, text: str, summary: str) -> None:
        """``text`` for people, on standard output; in JSON the one-line ``summary`` instead."""
        if self._form == "json":
            text = self._format("supervisor", "log", summary)
        self._put(self._out, text)

    def close(self, timeout_s: float = 1.0) -> None:
        """Write the queued lines, waiting at most ``timeout_s``."""
        self._put_nowait_or_drop(None)
        self._thread.join(timeout_s)

    def _format(self, process: str, stream: str, message: str) -> str:
        if self._form == "json":
            return self._as_json(process, stream, message) + "\n"
        stamp, name = _clock(int(time.time())), f"[{process}]"
        if self._colour:
            colour = _COLOURS[zlib.crc32(process.encode()) % len(_COLOURS)]
            stamp, name = f"{_DIM}{stamp}{_RESET}", f"\x1b[{colour}m{name}{_RESET}"
        return f"{stamp} {name} {message}\n"

    def _put(self, file: TextIO, text: str) -> None:
        if self._dropped and not self._queue.full():
            dropped, self._dropped = self._dropped, 0
            notice = self._format("supervisor", "log", f"WARNING {dropped} lines were dropped")
            self._put_nowait_or_drop((self._log, notice))
        self._put_nowait_or_drop((file, text))

    def _put_nowait_or_drop(self, item: tuple[TextIO, str] | None) -> None:
        try:
            self._queue.put_nowait(item)
        except queue.Full:
            self._dropped += 1

    def _write(self) -> None:
        broken: set[TextIO] = set()
        while (item := self._queue.get()) is not None:
            file, text = item
            if file in broken:
                continue
            try:
                file.write(text)
                if self._queue.empty():
                    file.flush()
            except (OSError, ValueError):
                broken.add(file)  # its reader has closed it; serving continues


def _plain_json(process: str, stream: str, message: str) -> str:
    """Where commutator-records, whose lines have more fields, is not installed."""
    stamp = datetime.now().astimezone().isoformat(timespec="milliseconds")
    fields = {"timestamp": stamp, "process": process, "stream": stream, "body": message}
    return json.dumps(fields, ensure_ascii=False)


class PrinterHandler(logging.Handler):
    """Sends the supervisor's own log through the printer."""

    def __init__(self, printer: Printer) -> None:
        super().__init__()
        self._printer = printer
        self.setFormatter(logging.Formatter("%(levelname)s %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        for line in self.format(record).splitlines():
            self._printer.line("supervisor", "log", line)
