"""A real file system that is full or cannot be written to, for one Python process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

__all__ = ["run_on_small_disk"]

_MOUNT_AND_RUN = 'mount -t tmpfs -o "$1,mode=700" tmpfs "$2" && shift 2 && exec "$@"'


def run_on_small_disk(folder: Path, code: str, options: str = "size=4m") -> str:
    """What ``code`` prints, with a file system of its own mounted on ``folder`` meanwhile.

    Needs user namespaces; where the kernel forbids them, the test is skipped.
    """
    folder.mkdir(exist_ok=True)
    unshare = ["unshare", "--user", "--map-root-user", "--mount"]
    if subprocess.run([*unshare, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this machine does not let users mount file systems")
    done = subprocess.run(
        [
            *unshare, "sh", "-c", _MOUNT_AND_RUN, "sh", options, str(folder),
            sys.executable, "-c", code,
        ],
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout
