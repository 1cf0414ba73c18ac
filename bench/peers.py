"""Talks to peers that run in environments of their own, for benchmarks and differential tests."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from bench.needs import needs

__all__ = ["DynamoPeer"]

ROOT = Path(__file__).resolve().parent.parent


class DynamoPeer:
    """Dynamo's hashes and radix tree, in a process that lives as long as the ``with`` block.

    Raises NotInstalledError when the peer is not installed.
    """

    def __init__(self) -> None:
        python = needs(ROOT / ".venv-dynamo" / "bin" / "python", "make peers")
        self._process = subprocess.Popen(
            [python, ROOT / "bench" / "peer_dynamo.py"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.communicate(timeout=30)

    def ask(self, what: str, **question: Any) -> Any:
        """One question; see ``peer_dynamo`` for what can be asked."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(json.dumps({"ask": what, **question}) + "\n")
        stdin.flush()
        if not (answer := stdout.readline()):
            raise RuntimeError(f"the peer's process ended while it was asked to {what}")
        return json.loads(answer)
