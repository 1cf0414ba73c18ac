"""Names pieces of memory, files and objects the way NIXL descriptors do."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from attrs import frozen

__all__ = ["Direction", "Memory", "Region", "Span"]


class Direction(StrEnum):
    """Which way bytes go, spelled as NIXL spells it."""

    READ = "READ"
    """From the remote side to the local one."""
    WRITE = "WRITE"
    """From the local side to the remote one."""


class Memory(StrEnum):
    """NIXL's kinds of memory, spelled as it spells them."""

    DRAM = "DRAM"
    VRAM = "VRAM"
    FILE = "FILE"
    OBJ = "OBJ"


class Span(NamedTuple):
    """One contiguous piece of a region: a tuple that is, as it stands, a NIXL descriptor.

    Thousands of them are made while a transfer waits to begin: a tuple takes a third of the time.
    """

    address: int
    """A byte address (DRAM, VRAM), or a byte offset (FILE, OBJ)."""
    size_bytes: int
    device: int = 0
    """The GPU (VRAM), the file descriptor (FILE) or the number of the object (OBJ)."""


@frozen
class Region:
    """A piece that NIXL must know before anything in it can be moved."""

    memory: Memory
    span: Span
    name: str = ""
    """The object's key (OBJ), or what NIXL's path mode wants (FILE); else empty."""
