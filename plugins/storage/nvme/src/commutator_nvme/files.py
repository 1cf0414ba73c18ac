"""Files of this user alone: opened without following links, closed automatically.

Another user who can write to the folder could otherwise let the tier overwrite another file through
a link, or give it blocks that nobody computed.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from commutator.errors import TierError

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
    errno.ELOOP: f"remove the symbolic link, which is never followed, {_OTHER_PATH}",
    errno.EMFILE: "raise the limit of open files (ulimit -n), or segment_size",
    errno.EIO: "the disk fails; see the system's log, and replace it",
}
_OTHERS = stat.S_IRWXG | stat.S_IRWXO


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
        """Open a regular file of this user alone; with O_CREAT it is made if it is missing.

        Raises OSError, also for a symbolic link, and TierError for anything else that is not such
        a file. A file that is refused is not changed.
        """
        # Without O_NONBLOCK a pipe in the file's place would wait for a writer for ever.
        guards = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        descriptor = os.open(path, flags & ~os.O_DIRECT | guards, 0o600)
        try:
            _check_file(path, os.fstat(descriptor))
            # With O_NONBLOCK io_uring would answer EAGAIN instead of waiting for the disk.
            fcntl.fcntl(descriptor, fcntl.F_SETFL, flags & os.O_DIRECT)
        except (OSError, TierError):
            os.close(descriptor)
            raise
        self._descriptors.append(descriptor)
        return descriptor

    def create(self, path: Path) -> int:
        """Open a new file in the place of whatever has this name. Raises OSError, TierError."""
        path.unlink(missing_ok=True)
        return self.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)

    def close_one(self, descriptor: int) -> None:
        """Close one descriptor before the others."""
        self._descriptors.remove(descriptor)
        os.close(descriptor)


def _close(descriptors: list[int]) -> None:
    while descriptors:
        os.close(descriptors.pop())


def _check_file(path: Path, found: os.stat_result) -> None:
    """Raise TierError unless it is a regular file that only this user can reach."""
    if not stat.S_ISREG(found.st_mode):
        raise TierError(f"nvme: {path} is no regular file; remove it, {_OTHER_PATH}")
    if found.st_nlink > 1:
        raise TierError(
            f"nvme: {path} has {found.st_nlink} names (hard links), so that it may be another "
            f"program's file; remove it, {_OTHER_PATH}"
        )
    _check_owner(path, found, "600")


def _check_owner(path: Path, found: os.stat_result, mode: str) -> None:
    """Raise TierError unless this user owns it and nobody else may use it."""
    if found.st_uid != os.geteuid():
        raise TierError(
            f"nvme: {path} belongs to user {found.st_uid}, and this process runs as user "
            f"{os.geteuid()}; change its owner if you trust its content, {_OTHER_PATH}"
        )
    if found.st_mode & _OTHERS:
        raise TierError(
            f"nvme: others may use {path} (mode {stat.S_IMODE(found.st_mode):o}): they could read "
            f"or replace KV blocks; if you trust its content, chmod {mode} it, {_OTHER_PATH}"
        )


def make_folder(folder: Path) -> None:
    """Make the folder with mode 0700 if it is missing; check that it is this user's alone.

    Raises TierError, also for a symbolic link, and for one of another user on the way to it.
    """
    with disk_errors(f"make the folder {folder}"):
        _check_links(folder.absolute())
        folder.mkdir(mode=stat.S_IRWXU, parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        _check_owner(folder, os.fstat(descriptor), "700")
    finally:
        os.close(descriptor)


def _check_links(folder: Path) -> None:
    """Refuse a link as the folder, and links to it that neither this user nor root made."""
    for path in (folder, *folder.parents):
        with suppress(FileNotFoundError):
            found = path.lstat()
            if not stat.S_ISLNK(found.st_mode):
                continue
            if path == folder:
                raise TierError(
                    f"nvme: {folder} is a symbolic link; give the path that it points to, "
                    f"{path.resolve()}"
                )
            if found.st_uid not in {0, os.geteuid()}:
                raise TierError(
                    f"nvme: {path}, on the way to {folder}, is a symbolic link of user "
                    f"{found.st_uid}; remove it, {_OTHER_PATH}"
                )


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
