"""The observer `audit`: a line of JSON for each request of a client, in files that are rotated.

Lines are made in the event loop and written by a thread. What the disk cannot take in time is
dropped, never waited for; the next line that is written says how many were.
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
from io import TextIOWrapper
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any

import msgspec
from attrs import frozen

from commutator.contract.observer import AnsweredRequest, Observer, ObserverConfig
from commutator.contract.settings import NonNegativeInt, PositiveInt, PositiveSeconds, Size, setting

__all__ = ["AuditConfig", "AuditLog"]

log = logging.getLogger(__name__)

_MODE = 0o600
_COLLECT_S = 0.05
"""Lines are written this long after the first of them, many at once."""
_MAX_WAITING_BYTES = 64 << 20
_MAX_BODY_BYTES = 64 << 10
_COMPLAIN_S = 60.0


@frozen(kw_only=True)
class AuditConfig(ObserverConfig):
    """Writes who asked for what, and what they got."""

    path: str = setting(
        "The file. Each front-door process writes one of its own: of `audit.jsonl`, "
        "`audit.0.jsonl`, `audit.1.jsonl`, ..."
    )
    prompts: bool = setting("Write the first 64 KiB of requests' bodies as well: prompts.", False)
    rotate_bytes: Size = setting("A file that is longer is rotated.", 256 << 20)
    rotate_s: PositiveSeconds = setting(
        "A file that the process opened longer ago is rotated.", 86_400.0
    )
    keep: NonNegativeInt = setting(
        "Rotated files that are kept: `audit.0.jsonl.1` is the latest. 0 keeps none.", 10
    )
    max_waiting_lines: PositiveInt = setting(
        "Lines that wait to be written; what comes then is dropped and counted.", 10_000
    )


class AuditLog(Observer):
    """Writes a line for each answered request; all but the bodies of prompts by default."""

    def __init__(self, config: AuditConfig) -> None:
        self._config = config
        self._guard = threading.Lock()
        self._lines: list[bytes] = []
        self._waiting_bytes = 0
        self._dropped = 0
        self._wake = threading.Event()
        self._stopped = False
        self._encode = msgspec.json.Encoder().encode
        self._file: AuditFile | None = None
        self._thread: threading.Thread | None = None
        self._complained_s = -_COMPLAIN_S

    async def start(self) -> None:
        """Raises OSError when the file cannot be written, or is somebody else's."""
        one = self._config
        self._file = await asyncio.to_thread(
            AuditFile, Path(one.path), one.rotate_bytes, one.rotate_s, one.keep
        )
        self._thread = threading.Thread(target=self._write_all, name="audit", daemon=True)
        self._thread.start()

    async def stop(self) -> None:
        """Writes what waits."""
        self._stopped = True
        self._wake.set()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)
        if self._file is not None:
            self._file.close()

    def request_answered(self, answered: AnsweredRequest) -> None:
        line = self._line(answered)
        with self._guard:
            full = self._waiting_bytes + len(line) > _MAX_WAITING_BYTES
            if full or len(self._lines) >= self._config.max_waiting_lines:
                self._dropped += 1
                return
            self._lines.append(line)
            self._waiting_bytes += len(line)
        if not self._wake.is_set():
            self._wake.set()

    def _line(self, one: AnsweredRequest) -> bytes:
        said: dict[str, Any] = {
            "time": _timestamp(time.time()),
            "request_id": one.request_id,
            "principal": one.principal,
            "peer": one.peer,
            "method": one.method,
            "path": one.path,
            "model": one.model or None,
            "status": one.status,
            "reason": one.reason,
            "workers": one.workers,
            "prompt_tokens": one.prompt_tokens,
            "cached_tokens": one.cached_tokens,
            "generated_tokens": one.generated_tokens,
            "duration_s": round(one.duration_s, 6),
        }
        if self._config.prompts:
            said["body"] = one.body[:_MAX_BODY_BYTES].decode(errors="replace")
        return self._encode(said) + b"\n"

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
            lines, self._lines, self._waiting_bytes = self._lines, [], 0
            dropped, self._dropped = self._dropped, 0
        if dropped:
            lines.append(
                self._encode({"time": _timestamp(time.time()), "dropped": dropped}) + b"\n"
            )
        if not lines:
            return
        assert self._file is not None
        try:
            self._file.write(lines)
        except OSError as error:
            with self._guard:
                self._dropped += dropped + len(lines) - bool(dropped)
                lost = self._dropped
            if time.monotonic() - self._complained_s >= _COMPLAIN_S:
                self._complained_s = time.monotonic()
                log.warning("audit log %s: %s; %d lines were lost", self._file.path, error, lost)


class AuditFile(RotatingFileHandler):
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
        descriptor = _open_own(Path(self.baseFilename))
        self._opened_s = time.monotonic()
        return os.fdopen(descriptor, "a", encoding="utf-8")


def _open_own(path: Path) -> int:
    """Open for appending what is ours, and no link. Raises OSError."""
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
        descriptor = _open_own(mine.with_name(mine.name + ".lock"))
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            continue
        return descriptor, mine
    raise AssertionError  # numbers do not end


def _timestamp(unix_s: float) -> str:
    """In UTC, as RFC 3339 has it."""
    whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(unix_s))
    return f"{whole}.{int(unix_s % 1 * 1_000):03d}Z"
