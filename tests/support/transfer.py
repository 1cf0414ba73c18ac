"""Memory, files and another process, for tests that move bytes by NIXL."""

from __future__ import annotations

import base64
import ctypes
import json
import mmap
import os
import random
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from attrs import frozen

from commutator.contract.tier import Memory, Region, Span
from commutator_engine_kit.nixl.moves import BlockMove

PEER_PROGRAM = Path(__file__).with_name("transfer_peer.py")


class Buffer:
    """Page-aligned DRAM."""

    def __init__(self, size_bytes: int) -> None:
        self.bytes = mmap.mmap(-1, size_bytes)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.bytes))
        self.size_bytes = size_bytes

    def fill(self, seed: int) -> None:
        self.bytes[:] = random.Random(seed).randbytes(self.size_bytes)

    def clear(self) -> None:
        self.bytes[:] = bytes(self.size_bytes)

    @property
    def span(self) -> Span:
        return Span(self.address, self.size_bytes)

    @property
    def region(self) -> Region:
        return Region(memory=Memory.DRAM, span=self.span)

    def blocks(self, block_bytes: int) -> list[Span]:
        return blocks_of(self.span, block_bytes)


def blocks_of(span: Span, block_bytes: int) -> list[Span]:
    return [
        Span(span.address + start, block_bytes, span.device)
        for start in range(0, span.size_bytes, block_bytes)
    ]


def moves_between(local: Sequence[Span], remote: Sequence[Span]) -> list[BlockMove]:
    return [BlockMove(one, other) for one, other in zip(local, remote, strict=True)]


@contextmanager
def open_file(path: Path, size_bytes: int, *, direct: bool = False) -> Iterator[Span]:
    """A file with space for that many bytes, as a span for NIXL."""
    flags = os.O_RDWR | os.O_CREAT | (os.O_DIRECT if direct else 0)
    descriptor = os.open(path, flags)
    try:
        os.posix_fallocate(descriptor, 0, size_bytes)
        yield Span(0, size_bytes, descriptor)
    finally:
        os.close(descriptor)


@frozen
class PeerProcess:
    """Another process that lets its memory be read and written."""

    process: subprocess.Popen[str]
    metadata: bytes
    span: Span


@contextmanager
def peer_process(name: str, size_bytes: int, seed: int) -> Iterator[PeerProcess]:
    """Its memory is filled as ``Buffer.fill`` does. Killed at the end."""
    command = [sys.executable, str(PEER_PROGRAM), name, str(size_bytes), str(seed)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            told = json.loads(process.stdout.readline())
            yield PeerProcess(
                process, base64.b64decode(told["metadata"]), Span(told["address"], size_bytes)
            )
        finally:
            process.kill()
