"""The owners of blocks: each pair of adapter and tenant is written once, under a number.

The file has a line for each. Without a key a line is a checksum in 16 hex digits, seeded by the
index, and a JSON list of number, adapter and tenant; with a key it is that list, padded and sealed,
in hex. A line is written before the first record with its number. A damaged line is ignored; the
records with its number are then invalid. An owner whose last block is gone is forgotten, and the
file is written anew once most of its lines are of such owners: it never has more than twice as many
lines as owners of blocks, and some.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import sha256
from pathlib import Path

import xxhash
from attrs import frozen

from commutator import Slot, StoredBlock
from commutator.contract.tier import BlockSeal
from commutator.errors import TierError
from commutator_nvme.files import Files, disk_errors, flush_folder, write_at

_CHECKSUM_DIGITS = 16
_NO_OWNER = 0
_LARGEST_NUMBER = 2**32 - 1
_MOST_BYTES = 256
_SLACK_LINES = 64
_MOST_LINE_BYTES = 8192
_PADDING_BYTES = 64
"""A sealed line shows the length of its names only in steps of this."""


@frozen
class Owner:
    """The adapter and the tenant of the request that a block was computed for."""

    adapter: str | None = None
    tenant: str | None = None

    @classmethod
    def of(cls, stored: StoredBlock) -> Owner:
        """The block's owner; a name above 256 bytes is replaced by its digest."""
        return cls(_bounded(stored.adapter), _bounded(stored.tenant))


def _bounded(name: str | None) -> str | None:
    if name is None or len(name) <= _MOST_BYTES // 4:
        return name
    data = name.encode("utf-8", "surrogatepass")
    return name if len(data) <= _MOST_BYTES else f"sha256:{sha256(data).hexdigest()}"


class Owners:
    """The file ``path``. Number 0 is for blocks with neither adapter nor tenant.

    ``seals``: as in ``SlotGeometry``. Call ``open`` and ``start`` before all else.
    """

    def __init__(
        self, path: Path, nonce: int, files: Files, seals: Sequence[BlockSeal] = ()
    ) -> None:
        self._path = path
        self._nonce = nonce
        self._files = files
        self._seals = seals
        self._place = b"owner" + nonce.to_bytes(8, "little")
        self._descriptor: int | None = None
        self._end = 0
        self._lines = 0
        self._last = _NO_OWNER
        self._numbers: dict[Owner, int] = {}
        self._owners: dict[int, Owner] = {_NO_OWNER: Owner()}
        self._of_slot: dict[Slot, int] = {}
        self._blocks: Counter[int] = Counter()
        """How many blocks each owner has; without number 0."""

    def open(self, most: int) -> Mapping[int, Owner]:
        """Read the owners of at most ``most`` blocks, by number. Raises TierError."""
        with disk_errors(f"read {self._path}"):
            found = dict(self._read(2 * most + _SLACK_LINES))
        self._owners = {_NO_OWNER: Owner(), **found}
        return self._owners

    def start(self, used: Mapping[Slot, int]) -> None:
        """Forget all owners but those of these slots, which the index has. Raises TierError."""
        self._of_slot = {slot: number for slot, number in used.items() if number != _NO_OWNER}
        self._blocks = Counter(self._of_slot.values())
        self._rewrite()

    def number(self, owner: Owner, *, flush: bool) -> int:
        """The owner's number; writes it to the file before the first use. Raises TierError."""
        known = _NO_OWNER if owner == Owner() else self._numbers.get(owner)
        if known is not None:
            return known
        assert self._descriptor is not None, "start() comes first"
        number = self._unused()
        line = self._line(number, owner)
        with disk_errors(f"write {self._path}"):
            if not os.fstat(self._descriptor).st_nlink:
                raise TierError(f"nvme: {self._path} was removed; close and open the tier again")
            write_at(self._descriptor, line, self._end)
            if flush:
                os.fdatasync(self._descriptor)
        self._end += len(line)
        self._lines += 1
        self._last = number
        self._numbers[owner] = number
        self._owners[number] = owner
        return number

    def assign(self, slot: Slot, number: int) -> None:
        """The slot's record names this owner now."""
        self.release([slot])
        if number != _NO_OWNER:
            self._of_slot[slot] = number
            self._blocks[number] += 1

    def release(self, slots: Iterable[Slot]) -> None:
        """The slots' records are erased."""
        for slot in slots:
            number = self._of_slot.pop(slot, _NO_OWNER)
            if number != _NO_OWNER:
                self._blocks[number] -= 1
                if not self._blocks[number]:
                    del self._blocks[number]

    def prune(self) -> None:
        """Write the file anew if most of its lines are of owners without blocks.

        Owners that got a number and no block yet are forgotten, too. Raises TierError.
        """
        if self._lines > 2 * len(self._blocks) + _SLACK_LINES:
            self._rewrite()

    def _rewrite(self) -> None:
        owners = {n: self._owners[n] for n in sorted(self._blocks) if n in self._owners}
        lines = [self._line(number, owner) for number, owner in owners.items()]
        data = b"".join(lines)
        fresh = self._path.with_name("owners.new")
        with disk_errors(f"write {self._path}"):
            descriptor = self._files.create(fresh)
            write_at(descriptor, data, 0)
            os.fsync(descriptor)
            fresh.rename(self._path)
            flush_folder(self._path.parent)
        if self._descriptor is not None:
            self._files.close_one(self._descriptor)
        self._descriptor, self._end, self._lines = descriptor, len(data), len(lines)
        self._owners = {_NO_OWNER: Owner(), **owners}
        self._numbers = {owner: number for number, owner in owners.items()}
        self._last = max(self._last, max(owners, default=_NO_OWNER))

    def _unused(self) -> int:
        """The next number that no owner has, counted up: an old one is long in nobody's record."""
        number = self._last
        while True:
            number = number % _LARGEST_NUMBER + 1
            if number not in self._owners:
                return number

    def _read(self, most_lines: int) -> Iterator[tuple[int, Owner]]:
        """The intact lines. A file with more or longer lines than it can have is not believed."""
        try:
            descriptor = self._files.open(self._path)
        except FileNotFoundError:
            return
        with os.fdopen(os.dup(descriptor), "rb") as file:
            for _ in range(most_lines):
                line = file.readline(_MOST_LINE_BYTES)
                if not line:
                    break
                if (entry := self._parse(line.removesuffix(b"\n"))) is not None:
                    yield entry
        self._files.close_one(descriptor)

    def _line(self, number: int, owner: Owner) -> bytes:
        text = json.dumps([number, owner.adapter, owner.tenant]).encode()
        if not self._seals:
            return self._checksum(text) + text + b"\n"
        padded = text.ljust(-(-len(text) // _PADDING_BYTES) * _PADDING_BYTES)
        return self._seals[0].seal(padded, self._place).hex().encode() + b"\n"

    def _parse(self, line: bytes) -> tuple[int, Owner] | None:
        if (text := self._text(line)) is None:
            return None
        try:
            entry = json.loads(text)
        except (ValueError, RecursionError):
            return None
        match entry:
            case [int(number), str() | None as adapter, str() | None as tenant]:
                return (number, Owner(adapter, tenant)) if 0 < number <= _LARGEST_NUMBER else None
            case _:
                return None

    def _text(self, line: bytes) -> bytes | None:
        """The line's JSON; None when it is damaged, or of another index."""
        if not self._seals:
            text = line[_CHECKSUM_DIGITS:]
            return text if line[:_CHECKSUM_DIGITS] == self._checksum(text) else None
        try:
            sealed = bytes.fromhex(line.decode("ascii"))
        except ValueError:
            return None
        opened = (seal.unseal(sealed, self._place) for seal in self._seals)
        return next((text for text in opened if text is not None), None)

    def _checksum(self, text: bytes) -> bytes:
        return b"%016x" % xxhash.xxh3_64_intdigest(text, self._nonce)
