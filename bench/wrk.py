"""Runs `wrk`, a load generator in C, so that the client takes little of the machine."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from attrs import frozen

from bench.needs import needs_command

__all__ = ["WRK", "ChatLoad", "Measured"]

SCRIPT = Path(__file__).with_name("chat.lua")
WRK = ("wrk", "apt-get install wrk")
"""The command, and what installs it on Debian."""
VOCABULARY = """
    the of and to in is that for it as was with be by on not he his but at are this have from or
    had an they which one you were all her she there would their we him been has when who will no
    more if out so said what up its about than into them can only other time new some could these
    two may first then do any like my now over such our man me even most made after also did many
    off before must well back through years where much your way down should because long people
    each just state those mister how too little good world make very year still see work
"""


@frozen
class Measured:
    """One run of wrk."""

    rate: float
    """Requests per second."""
    p50_ms: float
    p99_ms: float


@frozen
class ChatLoad:
    """So many streaming chats at the same time, all alike but for their words."""

    model: str
    words: int
    """Of each prompt; all but at most 20 of them are a shared prefix."""
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
        done = subprocess.run(
            argv, env=self._environment(), capture_output=True, text=True, check=False
        )
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

    def _environment(self) -> dict[str, str]:
        return {
            **os.environ,
            "BENCH_MODEL": self.model,
            "BENCH_TOKENS": str(self.tokens),
            "BENCH_WORDS": str(self.words),
            "BENCH_PREFIXES": str(self.prefixes),
            "BENCH_KEYS": " ".join(self.keys),
            "BENCH_VOCABULARY": " ".join(VOCABULARY.split()),
        }
