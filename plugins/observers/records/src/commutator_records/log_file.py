"""Files of lines that only their owner may read: written by a thread, rotated, never waited for.

What the disk cannot take in time is dropped and counted, never waited for.
"""

from __future__ import annotations

import asyncio
import fcntl
import itertools
import logging
import os
import stat
import threading
import time
from collections.abc import Callable
from io import TextIOWrapper
from logging.handlers import RotatingFileHandler
from pathlib import Path

from attrs import frozen

from commutator.contract.observer import PromptObserver, PromptObserverConfig
from commutator.contract.settings import NonNegativeInt, PositiveInt, PositiveSeconds, Size, setting

log = logging.getLogger(__name__)

_MODE = 0o600
_COLLECT_S = 0.05
"""Lines are written this long after the first of them, many at once."""
_MAX_WAITING_BYTES = 64 << 20
_COMPLAIN_S = 60.0

Line = bytes | Callable[[], bytes]
"""A line with its end, or what makes one in the thread that writes."""


@frozen(kw_only=True)
class FileObserverConfig(PromptObserverConfig):
    """Options of an observer that writes lines."""

    path: str = setting(
        "The file. Each front-door process writes one of its own: of `NAME.jsonl`, "
        "`NAME.0.jsonl`, `NAME.1.jsonl`, ..."
    )
    rotate_bytes: Size = setting("A file that is longer is rotated.", 256 << 20)
    rotate_s: PositiveSeconds = setting(
        "A file that the process opened longer ago is rotated.", 86_400.0
    )
    keep: NonNegativeInt = setting(
        "Rotated files that are kept: `NAME.0.jsonl.1` is the latest. 0 keeps none.", 10
    )
    max_waiting_lines: PositiveInt = setting(
        "Lines that wait to be written; what comes then is dropped and counted.", 10_000
    )


class FileObserver(PromptObserver):
    """Appends lines to a file in a thread of its own; ``add`` never waits."""

    def __init__(
        self,
        name: str,
        config: FileObserverConfig,
        dropped_line: Callable[[int], bytes] | None = None,
    ) -> None:
        """``name``: what the file is, for logs.

        ``dropped_line`` makes a line that says how many were dropped; without it the log says so.
        """
        self._name = name
        self._config = config
        self._dropped_line = dropped_line
        self._guard = threading.Lock()
        self._lines: list[Line] = []
        self._waiting_bytes = 0
        self._dropped = 0
        self._wake = threading.Event()
        self._stopped = False
        self._file: OwnFile | None = None
        self._thread: threading.Thread | None = None
        self._complained_s = -_COMPLAIN_S

    async def start(self) -> None:
        """Raises OSError when the file cannot be written, or is somebody else's."""
        self._file = await asyncio.to_thread(self._open_file)
        self._thread = threading.Thread(target=self._write_all, name=self._name, daemon=True)
        self._thread.start()

    async def stop(self) -> None:
        """Writes what waits."""
        self._stopped = True
        self._wake.set()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)
        if self._file is not None:
            self._file.close()

    def add(self, line: Line, size_bytes: int) -> None:
        """Have a line written, which takes about ``size_bytes`` of memory until then."""
        with self._guard:
            full = self._waiting_bytes + size_bytes > _MAX_WAITING_BYTES
            if full or len(self._lines) >= self._config.max_waiting_lines:
                self._dropped += 1
                return
            self._lines.append(line)
            self._waiting_bytes += size_bytes
        if not self._wake.is_set():
            self._wake.set()

    def _open_file(self) -> OwnFile:
        one = self._config
        return OwnFile(Path(one.path).expanduser(), one.rotate_bytes, one.rotate_s, one.keep)

    def _write_all(self) -> None:
        while not self._stopped:
            self._wake.wait()
            if not self._stopped:
                time.sleep(_COLLECT_S)
            self._wake.clear()
            self._write_waiting()
        self._write_waiting()

    def _write_waiting(self) -> None:
        with self._guard:
            waiting, self._lines, self._waiting_bytes = self._lines, [], 0
            dropped, self._dropped = self._dropped, 0
        lines = [line if isinstance(line, bytes) else line() for line in waiting]
        if dropped and self._dropped_line is not None:
            lines.append(self._dropped_line(dropped))
        elif dropped:
            log.warning("%s: the disk is too slow; %d lines were lost", self._name, dropped)
            dropped = 0
        if not lines:
            return
        assert self._file is not None
        try:
            self._file.write(lines)
        except OSError as error:
            with self._guard:
                self._dropped += dropped + len(waiting)
                lost = self._dropped
            if time.monotonic() - self._complained_s >= _COMPLAIN_S:
                self._complained_s = time.monotonic()
                where = self._file.path
                log.warning("%s %s: %s; %d lines were lost", self._name, where, error, lost)


class OwnFile(RotatingFileHandler):
    """A file that only its owner may read, rotated by size and by age.

    Its name gets the lowest number that no other process uses.
    """

    def __init__(self, path: Path, rotate_bytes: int, rotate_s: float, keep: int) -> None:
        self._lock_fd, self.path = _claim(path)
        self._rotate_s = rotate_s
        self._opened_s = 0.0
        try:
            super().__init__(self.path, maxBytes=rotate_bytes, backupCount=keep, encoding="utf-8")
        except BaseException:
            os.close(self._lock_fd)
            raise

    def write(self, lines: list[bytes]) -> None:
        """Append ``lines``. Raises OSError."""
        if self.stream is None:  # a rotation failed half-way
            self.stream = self._open()
        size = os.fstat(self.stream.fileno()).st_size
        due = size and time.monotonic() - self._opened_s >= self._rotate_s
        if due or (size and size + sum(map(len, lines)) > self.maxBytes):
            self.doRollover()
            if self.backupCount == 0:
                os.truncate(self.path, 0)
        left = b"".join(lines)
        while left:
            left = left[os.write(self.stream.fileno(), left) :]

    def close(self) -> None:
        """Idempotent: the library closes its handlers once more at the end of the process."""
        super().close()
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

    def _open(self) -> TextIOWrapper:
        descriptor = open_own(Path(self.baseFilename))
        self._opened_s = time.monotonic()
        return os.fdopen(descriptor, "a", encoding="utf-8")


def open_own(path: Path) -> int:
    """Open for appending what is ours, and no link; others may not read it. Raises OSError."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(path, flags, _MODE)
    found = os.fstat(descriptor)
    if found.st_uid != os.geteuid() or not stat.S_ISREG(found.st_mode):
        os.close(descriptor)
        raise PermissionError(f"{path}: not a file of this user")
    os.fchmod(descriptor, _MODE)
    return descriptor


def _claim(path: Path) -> tuple[int, Path]:
    """A lock that this process holds from now on, and the name of the file that it is for."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    for number in itertools.count():
        mine = path.with_name(f"{path.stem}.{number}{path.suffix}")
        descriptor = open_own(mine.with_name(mine.name + ".lock"))
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            continue
        return descriptor, mine
    raise AssertionError  # numbers do not end
