"""The relay beside a worker: how its process is started, and where other hosts reach it."""

from __future__ import annotations

import sys
from urllib.parse import urlsplit

import attrs
import msgspec

from commutator.contract.engine import RelayStart
from commutator.contract.launcher import LaunchPlan
from commutator.engine.protocol import INSTANCE
from commutator.trust import in_url

__all__ = ["relay_plan", "relayed_address"]


def relay_plan(start: RelayStart, instance: str) -> LaunchPlan:
    """The process of a relay for one ``instance`` of a worker."""
    value = msgspec.json.encode(attrs.asdict(start)).decode()
    return LaunchPlan(
        argv=(sys.executable, "-m", start.rules.module),
        address=start.url,
        env={RelayStart.VARIABLE: value, INSTANCE: instance},
    )


def relayed_address(address: str, host: str, port: int, *, tls: bool) -> str:
    """The ``address`` of an engine as others reach it, by a relay at ``host`` and ``port``."""
    parts = urlsplit(address)
    scheme = "https" if tls else "http"
    return parts._replace(scheme=scheme, netloc=f"{in_url(host)}:{port}").geturl()
