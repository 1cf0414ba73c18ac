"""What a sidecar tells of its server, and where it is asked."""

from __future__ import annotations

from attrs import frozen

from commutator.types import EngineInfo

__all__ = ["INFO", "LOAD", "Told"]

INFO = "/info"
"""Answers a ``Told``; 503 with a sentence while the server is not ready."""
LOAD = "/load"
"""Answers an ``EngineLoad``."""


@frozen
class Told:
    """Enough for a client to talk to the server by itself."""

    url: str
    info: EngineInfo
