"""The observer `audit`: a line of JSON for each request of a client, in files that are rotated.

Lines are made in the event loop and written by a thread. What the disk cannot take in time is
dropped, never waited for; the next line that is written says how many were.
"""

from __future__ import annotations

import time
from typing import Any

import msgspec
from attrs import frozen

from commutator.contract.observer import AnsweredRequest
from commutator.contract.settings import setting
from commutator_records.log_file import FileObserver, FileObserverConfig

_MAX_BODY_BYTES = 64 << 10


@frozen(kw_only=True)
class AuditConfig(FileObserverConfig):
    """Writes who asked for what, and what they got."""

    prompts: bool = setting("Write the first 64 KiB of requests' bodies as well: prompts.", False)


class AuditLog(FileObserver):
    """Writes a line for each answered request; all but the bodies of prompts by default."""

    def __init__(self, config: AuditConfig) -> None:
        self._prompts = config.prompts
        self._encode = msgspec.json.Encoder().encode
        super().__init__("audit log", config, self._say_dropped)

    def request_answered(self, answered: AnsweredRequest) -> None:
        line = self._line(answered)
        self.add(line, len(line))

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
        if self._prompts:
            said["body"] = one.body[:_MAX_BODY_BYTES].decode(errors="replace")
        return self._encode(said) + b"\n"

    def _say_dropped(self, number: int) -> bytes:
        return self._encode({"time": _timestamp(time.time()), "dropped": number}) + b"\n"


def _timestamp(unix_s: float) -> str:
    """In UTC, as RFC 3339 has it."""
    whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(unix_s))
    return f"{whole}.{int(unix_s % 1 * 1_000):03d}Z"
