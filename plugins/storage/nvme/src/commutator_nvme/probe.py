"""Finds a working kind of I/O for a folder's files by a small real transfer."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import uuid
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path

from attrs import frozen

from commutator import Memory, Region, Span
from commutator.contract.tier import Direction
from commutator.errors import TierError, TransferError
from commutator_engine_kit.nixl import TransferAgent, TransferPath
from commutator_nvme.config import Backend, Direct, Io, NvmeConfig
from commutator_nvme.files import disk_errors
from commutator_nvme.segments import PAGE_BYTES

_TIMEOUT_S = 10.0
_PARAMETERS: Mapping[Io, Mapping[str, str]] = {
    "uring": {"use_uring": "true"},
    "aio": {"use_aio": "true"},
}


@frozen
class Access:
    """A kind of I/O that works."""

    parameters: Mapping[str, str]
    direct: bool
    """Whether the files are opened with O_DIRECT."""


def find_access(folder: Path, config: NvmeConfig) -> Access:
    """The best working kind of I/O in ``folder`` that the options allow. Takes about 20 ms.

    Raises TierError when none works.
    """
    problems: list[str] = []
    for direct, parameters in product(_directs(config.direct), _parameters(config)):
        with _scratch_file(folder, direct=direct) as descriptor:
            if descriptor is None:
                problems.append(f"the file system of {folder} has no direct I/O; set direct: off")
                continue
            try:
                _try(descriptor, config.backend, parameters)
            except TransferError as error:
                problems.append(str(error))
            else:
                return Access(parameters, direct)
    if config.backend != "POSIX":
        problems.append("GDS needs an NVIDIA GPU and GPUDirect storage; else set backend: POSIX")
    raise TierError(f"nvme: no kind of I/O works in {folder}: {'; '.join(dict.fromkeys(problems))}")


def _directs(direct: Direct) -> Sequence[bool]:
    return {"auto": (True, False), "on": (True,), "off": (False,)}[direct]


def _parameters(config: NvmeConfig) -> Sequence[Mapping[str, str]]:
    if config.backend != "POSIX":
        return [{}]
    return [parameters for name, parameters in _PARAMETERS.items() if config.io in {"auto", name}]


@contextlib.contextmanager
def _scratch_file(folder: Path, *, direct: bool) -> Iterator[int | None]:
    """A temporary file of one page; None when it cannot be opened for direct I/O."""
    path = folder / f"probe-{uuid.uuid4().hex}"
    with disk_errors(f"write in {folder}"):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with disk_errors(f"write in {folder}"):
            os.posix_fallocate(descriptor, 0, PAGE_BYTES)
            if direct:
                os.close(descriptor)
                descriptor = -1
                with contextlib.suppress(OSError):
                    descriptor = os.open(
                        path, os.O_RDWR | os.O_DIRECT | os.O_NOFOLLOW | os.O_CLOEXEC
                    )
        yield descriptor if descriptor >= 0 else None
    finally:
        if descriptor >= 0:
            os.close(descriptor)
        path.unlink(missing_ok=True)


def _try(descriptor: int, backend: Backend, parameters: Mapping[str, str]) -> None:
    """Write a page and read it back. Raises TransferError."""
    agent = TransferAgent(f"nvme-probe-{uuid.uuid4().hex}", {backend: parameters})
    page = mmap.mmap(-1, PAGE_BYTES)
    pattern = os.urandom(PAGE_BYTES)
    page[:] = pattern
    local = Span(ctypes.addressof(ctypes.c_char.from_buffer(page)), PAGE_BYTES)
    remote = Span(0, PAGE_BYTES, descriptor)
    try:
        agent.register(
            [Region(memory=Memory.DRAM, span=local), Region(memory=Memory.FILE, span=remote)],
            backend,
        )
        for direction in (Direction.WRITE, Direction.READ):
            path = TransferPath(direction, Memory.DRAM, Memory.FILE, backend)
            agent.start(path, [local], [remote]).wait(_TIMEOUT_S)
            if direction is Direction.WRITE:
                page[:] = bytes(PAGE_BYTES)
        if page[:] != pattern:
            raise TransferError(f"{backend} read other bytes than it wrote")
    finally:
        agent.close()
