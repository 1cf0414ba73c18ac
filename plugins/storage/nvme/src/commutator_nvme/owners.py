"""The owners of blocks: each pair of adapter and tenant is written once, under a number.

The file has a line for each: a checksum in 16 hex digits, seeded by the index, and a JSON list of
number, adapter and tenant. A line is written before the first record with its number. A damaged
line is ignored; the records with its number are then invalid.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping
from pathlib import Path

import xxhash
from attrs import frozen

from commutator.errors import TierError
from commutator_nvme.files import Files, disk_errors, flush_folder, write_at

__all__ = ["Owner", "Owners"]

_CHECKSUM_DIGITS = 16
_NO_OWNER = 0


@frozen
class Owner:
    """The adapter and the tenant of the request that a block was computed for."""

    lora_name: str | None = None
    tenant: str | None = None


class Owners:
    """The file ``path``. Number 0 is for blocks with neither adapter nor tenant."""

    def __init__(self, path: Path, nonce: int, files: Files) -> None:
        self._path = path
        self._nonce = nonce
        self._files = files
        self._descriptor: int | None = None
        self._end = 0
        self._numbers: dict[Owner, int] = {Owner(): _NO_OWNER}

    def open(self) -> Mapping[int, Owner]:
        """Read every owner, by number. Raises TierError."""
        with disk_errors(f"read {self._path}"):
            try:
                lines = self._path.read_bytes().split(b"\n")
            except FileNotFoundError:
                lines = []
        self._numbers |= dict(entry for line in lines if (entry := self._parse(line)) is not None)
        return {number: owner for owner, number in self._numbers.items()}

    def keep(self, used: Collection[int]) -> None:
        """Replace the file by one with only these numbers. Raises TierError."""
        self._numbers = {
            owner: number
            for owner, number in self._numbers.items()
            if number in used or number == _NO_OWNER
        }
        data = b"".join(
            self._line(number, owner) for owner, number in self._numbers.items() if number
        )
        fresh = self._path.with_name("owners.new")
        with disk_errors(f"write {self._path}"):
            descriptor = self._files.open(fresh, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
            write_at(descriptor, data, 0)
            os.fsync(descriptor)
            fresh.rename(self._path)
            flush_folder(self._path.parent)
        self._descriptor, self._end = descriptor, len(data)

    def number(self, owner: Owner, *, flush: bool) -> int:
        """The owner's number; writes it to the file before the first use. Raises TierError."""
        known = self._numbers.get(owner)
        if known is not None:
            return known
        assert self._descriptor is not None, "keep() comes first"
        number = max(self._numbers.values()) + 1
        line = self._line(number, owner)
        with disk_errors(f"write {self._path}"):
            if not os.fstat(self._descriptor).st_nlink:
                raise TierError(f"nvme: {self._path} was removed; close and open the tier again")
            write_at(self._descriptor, line, self._end)
            if flush:
                os.fdatasync(self._descriptor)
        self._end += len(line)
        self._numbers[owner] = number
        return number

    def _line(self, number: int, owner: Owner) -> bytes:
        text = json.dumps([number, owner.lora_name, owner.tenant]).encode()
        return self._checksum(text) + text + b"\n"

    def _parse(self, line: bytes) -> tuple[Owner, int] | None:
        text = line[_CHECKSUM_DIGITS:]
        if not text or line[:_CHECKSUM_DIGITS] != self._checksum(text):
            return None
        number, lora_name, tenant = json.loads(text)
        return Owner(lora_name, tenant), number

    def _checksum(self, text: bytes) -> bytes:
        return b"%016x" % xxhash.xxh3_64_intdigest(text, self._nonce)
