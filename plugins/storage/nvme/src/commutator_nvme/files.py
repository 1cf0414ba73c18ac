"""File descriptors that close automatically, and disk errors with advice."""

from __future__ import annotations

import errno
import fcntl
import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from commutator.errors import TierError

__all__ = ["Files", "disk_errors", "flush_folder", "lock_folder", "write_at"]

_OTHER_PATH = "or choose another path"
_REMEDIES = {
    errno.ENOSPC: "free some room, or lower capacity",
    errno.EDQUOT: "raise the quota, or lower capacity",
    errno.EFBIG: "lower segment_size",
    errno.EROFS: f"make the file system writable, {_OTHER_PATH}",
    errno.EACCES: f"give this user the right to write there, {_OTHER_PATH}",
    errno.EPERM: f"give this user the right to write there, {_OTHER_PATH}",
    errno.ENOTDIR: f"remove the file that is in the way, {_OTHER_PATH}",
    errno.EEXIST: f"remove the file that is in the way, {_OTHER_PATH}",
    errno.EMFILE: "raise the limit of open files (ulimit -n), or segment_size",
    errno.EIO: "the disk fails; see the system's log, and replace it",
}


@contextmanager
def disk_errors(doing: str) -> Iterator[None]:
    """Turn an OSError into a TierError with what was attempted and what to do."""
    try:
        yield
    except OSError as error:
        remedy = _REMEDIES.get(error.errno or 0, "see the system's log, " + _OTHER_PATH)
        raise TierError(f"nvme: cannot {doing}: {error.strerror}; {remedy}") from error


class Files:
    """Open descriptors. ``close``, or the end of this object, closes all of them."""

    def __init__(self) -> None:
        self._descriptors: list[int] = []
        self.close = weakref.finalize(self, _close, self._descriptors)

    def open(self, path: Path, flags: int = os.O_RDWR) -> int:
        """Raises OSError."""
        descriptor = os.open(path, flags | os.O_CLOEXEC, 0o600)
        self._descriptors.append(descriptor)
        return descriptor


def _close(descriptors: list[int]) -> None:
    while descriptors:
        os.close(descriptors.pop())


def lock_folder(files: Files, folder: Path) -> None:
    """Lock the folder against other processes until ``files`` is closed.

    Raises TierError when another process has the lock.
    """
    path = folder / "lock"
    with disk_errors(f"write {path}"):
        descriptor = files.open(path, os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.pread(descriptor, 20, 0).decode("ascii", "replace").strip()
            raise TierError(
                f"nvme: the folder {folder} is in use by process {holder or '(unknown)'}; stop it, "
                "or give each worker its own folder with {worker} in the path"
            ) from error
        os.truncate(descriptor, 0)
        write_at(descriptor, f"{os.getpid()}\n".encode(), 0)


def write_at(descriptor: int, data: bytes, offset: int) -> None:
    """Write all of ``data``. Raises OSError."""
    view = memoryview(data)
    while view:
        written = os.pwrite(descriptor, view, offset)
        view, offset = view[written:], offset + written


def flush_folder(folder: Path) -> None:
    """Make the creation and renaming of files durable. Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
