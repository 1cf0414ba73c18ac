"""The secret of a run: 32 bytes that every process of one deployment knows, and nobody else."""

from __future__ import annotations

import hashlib
import hmac
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

from attrs import field, frozen

from commutator.errors import CommutatorError

SECRET_FILE = "COMMUTATOR_SECRET_FILE"  # noqa: S105 - the name of a variable
"""The environment variable with the path of the file that holds the run's secret.

It holds a path, not the secret, because environments end up in crash reports and logs.
"""

_SECRET_BYTES = 32
_PRIVATE = 0o600
_OTHERS = stat.S_IRWXG | stat.S_IRWXO
_MAX_FILE_BYTES = 1024


class SecretFileError(CommutatorError):
    """The file with the secret of a run is missing, damaged, or not private."""


@frozen
class RunSecret:
    """The secret of one run. Its ``repr`` does not show it."""

    _key: bytes = field(repr=False)

    @classmethod
    def new(cls) -> RunSecret:
        """A random secret."""
        return cls(os.urandom(_SECRET_BYTES))

    @classmethod
    def from_text(cls, text: str) -> RunSecret:
        """The secret made from a passphrase that several hosts share."""
        return cls(hashlib.sha256(b"commutator run secret\0" + text.encode()).digest())

    @classmethod
    def load(cls, path: str | Path) -> RunSecret:
        """The secret in a file that ``save`` wrote.

        Raises SecretFileError when the file is missing or is not such a file, or when it belongs to
        another user or can be read by one.
        """
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            with os.fdopen(descriptor, "rb") as file:
                status = os.fstat(descriptor)
                if not stat.S_ISREG(status.st_mode):
                    raise SecretFileError(f"run secret {path}: it is not a regular file")
                if status.st_uid != os.geteuid() or status.st_mode & _OTHERS:
                    raise SecretFileError(
                        f"run secret {path}: it must belong to this user and have mode 0600"
                    )
                text = file.read(_MAX_FILE_BYTES)
        except OSError as error:
            raise SecretFileError(f"run secret {path}: {error.strerror or error}") from error
        try:
            key = bytes.fromhex(text.decode("ascii"))
        except ValueError:
            key = b""
        if len(key) != _SECRET_BYTES:
            raise SecretFileError(f"run secret {path}: it does not hold {_SECRET_BYTES} hex bytes")
        return cls(key)

    def save(self, path: str | Path) -> None:
        """Write the secret to a new file that only this user can read. Raises OSError."""
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, _PRIVATE)
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(self._key.hex() + "\n")

    def mac(self, purpose: str, *parts: bytes) -> bytes:
        """32 bytes that only who knows the secret can compute; ``parts`` cannot be shifted."""
        digest = hmac.new(self._key, digestmod=hashlib.sha256)
        for part in (purpose.encode(), *parts):
            digest.update(len(part).to_bytes(4, "big"))
            digest.update(part)
        return digest.digest()


_adopted: list[RunSecret | None] = []


@contextmanager
def adopt(secret: RunSecret | None) -> Iterator[None]:
    """Make this process one of the run of ``secret`` inside the block; None: of no run."""
    _adopted.append(secret)
    try:
        yield
    finally:
        # Blocks of several tasks need not end in the order in which they began.
        del _adopted[next(i for i, one in reversed([*enumerate(_adopted)]) if one is secret)]


def secret_of_this_process() -> RunSecret | None:
    """The secret of the run that this process belongs to; None when it belongs to none.

    Raises SecretFileError when the environment names a file that cannot be used.
    """
    if _adopted:
        return _adopted[-1]
    path = os.environ.get(SECRET_FILE)
    return _load(path) if path else None


def proof_of_run(purpose: str, *parts: bytes) -> bytes:
    """32 bytes that only processes of this run can compute.

    Zeros in a process of no run, such as a test: it asks for no proof and gives none.
    """
    secret = secret_of_this_process()
    return bytes(_SECRET_BYTES) if secret is None else secret.mac(purpose, *parts)


@lru_cache(maxsize=1)
def _load(path: str) -> RunSecret:
    return RunSecret.load(path)


def run_folder() -> Path | None:
    """The private folder (mode 0700) of the run that started this process; None without a run.

    Only processes of this user can connect to the Unix sockets in it, or put others in their place.
    """
    path = os.environ.get(SECRET_FILE)
    if not path or _adopted:
        return None
    folder = Path(path).parent.absolute()
    status = folder.stat()
    private = status.st_uid == os.geteuid() and not status.st_mode & _OTHERS
    return folder if private else None
