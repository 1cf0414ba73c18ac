"""Runs `wrk`, a load generator in C, so that the client takes little of the machine."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from attrs import frozen

from bench.needs import needs_command
from bench.prompts import beginnings, endings

__all__ = ["WRK", "ChatLoad", "Measured"]

SCRIPT = Path(__file__).with_name("chat.lua")
WRK = ("wrk", "apt-get install wrk")
"""The command, and what installs it on Debian."""
ENDINGS_PER_S = 5_000
"""More than any front door answers, so that the endings of a run are new."""


@frozen
class Measured:
    """One run of wrk."""

    rate: float
    """Requests per second."""
    p50_ms: float
    p99_ms: float


@frozen
class ChatLoad:
    """Streaming chats, ``concurrency`` at a time, with prompts of every kind of text."""

    model: str
    words: int
    """Of each prompt; its beginning is shared, see ``bench.prompts``."""
    prefixes: int
    tokens: int
    """Of each answer."""
    concurrency: int
    keys: Sequence[str] = ()
    """API keys; each request has one of them."""

    def run(self, url: str, duration_s: int) -> Measured:
        """Raises RuntimeError when a request failed, NotInstalledError without wrk."""
        argv = [
            needs_command(*WRK), "-t1", f"-c{self.concurrency}", f"-d{duration_s}s",
            "--timeout", "30s", "-s", str(SCRIPT), f"{url}/v1/chat/completions",
        ]  # fmt: skip
        with tempfile.NamedTemporaryFile("w", prefix="bench-wrk-") as parts:
            parts.writelines(f"{part}\n" for part in self._parts(duration_s))
            parts.flush()
            env = {
                **os.environ,
                "BENCH_PARTS": parts.name,
                "BENCH_BEGINNINGS": str(self.prefixes),
                "BENCH_KEYS": " ".join(self.keys),
            }
            done = subprocess.run(argv, env=env, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"wrk failed: {done.stderr or done.stdout}")
        counted = json.loads(done.stdout.splitlines()[-1])
        if counted["refused"] or counted["broken"] or not counted["requests"]:
            raise RuntimeError(f"not every chat was answered: {counted}")
        return Measured(
            rate=counted["requests"] / counted["duration_us"] * 1e6,
            p50_ms=counted["p50_us"] / 1000,
            p99_ms=counted["p99_us"] / 1000,
        )

    def _parts(self, duration_s: int) -> Iterator[str]:
        """Of bodies: first the beginnings, then the endings."""
        for shared in beginnings(self.words, self.prefixes):
            yield (
                f'{{"model":"{self.model}","stream":true,"max_tokens":{self.tokens},'
                f'"messages":[{{"role":"user","content":"{shared}'
            )
        for own in endings(self.words, duration_s * ENDINGS_PER_S):
            yield f'{own}"}}]}}'
