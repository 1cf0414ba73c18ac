"""Waits for what a benchmark has started."""

from __future__ import annotations

import subprocess
import time
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path

__all__ = ["answer_of", "wait_until"]

_PAUSE_S = 0.1


def wait_until(
    true: Callable[[], bool],
    what: str,
    timeout_s: float,
    *,
    logs: Path | None = None,
    processes: Sequence[subprocess.Popen[bytes]] = (),
) -> None:
    """Raises TimeoutError, with the ends of the ``logs``, if it takes longer or a process ends.

    ``what`` is waited for: "a server's answer". ``logs`` is a folder of ``*.log``.
    """
    deadline_s = time.monotonic() + timeout_s
    while not true():
        ended = any(process.poll() is not None for process in processes)
        if ended or time.monotonic() > deadline_s:
            found = () if logs is None else logs.glob("*.log")
            ends = [file.read_text(errors="replace")[-2000:] for file in found]
            why = "a process ended" if ended else f"{timeout_s:g} s were not enough"
            raise TimeoutError("\n".join([f"waiting for {what}: {why}", *ends]))
        time.sleep(_PAUSE_S)


def answer_of(url: str) -> bytes | None:
    """The body of a successful answer; None while there is none."""
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            body: bytes = answer.read()
            return body
    except OSError:
        return None
