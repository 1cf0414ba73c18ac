"""The `s3` tier: one object for each block, named by the block's key."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from itertools import count
from urllib.parse import urlsplit

from commutator import (
    KEY_BYTES,
    UNBOUNDED,
    BlockKey,
    Memory,
    Region,
    Secret,
    Slot,
    SlotGeometry,
    Span,
    StoredBlock,
)
from commutator.errors import TierError
from commutator.kv import OpenedSlots, SlotTier
from commutator_s3.bucket import Bucket, Credentials
from commutator_s3.config import S3TierConfig

__all__ = ["S3Tier"]

log = logging.getLogger(__name__)


class S3Tier(SlotTier):
    """Blocks in a bucket that any number of workers share.

    A block is the object ``PREFIX/IDENTITY/XX/KEY``: KEY is its key in hex, XX the first two digits
    of it. A slot is this worker's record of one object, in memory only; ``probe`` looks objects up
    in the bucket. Objects have no other metadata. A block that was written but not committed before
    a crash therefore counts as committed afterwards; that is safe, because S3 shows only whole
    objects and each begins with a header. Evicting a block deletes its object. An object that is
    being read is deleted by the next call that reaches the bucket, or when the tier is closed.
    Making room deletes only objects that this instance stored; others stay in the bucket.

    ``open`` raises TierError when the store refuses or cannot be reached; call it again later. An
    open tier never needs to be reopened: while the store is unreachable, ``probe`` and ``evict``
    raise TierError and transfers fail; afterwards they work again.
    """

    medium = "EXTERNAL"
    memory = Memory.OBJ
    backend = "OBJ"
    framed = True
    shared = True

    def __init__(self, config: S3TierConfig) -> None:
        self._config = config
        # NIXL's S3 client has no other setting; its default is to retry for 25 s. It reads these
        # when the backend is created. Values that the operator set have precedence.
        os.environ.setdefault("AWS_RETRY_MODE", "standard")
        os.environ.setdefault("AWS_MAX_ATTEMPTS", "2")
        # Read now: a secret that is missing now does not appear later.
        self._credentials = Credentials(
            access_key=_reveal(config.access_key),
            secret_key=_reveal(config.secret_key),
            session_token=_reveal(config.session_token),
        )
        self._keys: dict[Slot, BlockKey] = {}
        self._found: set[BlockKey] = set()
        """Committed blocks that another worker or an earlier process stored."""
        self._being_read: dict[Slot, BlockKey] = {}
        """Evicted blocks that are still pinned."""
        self._undeleted: set[BlockKey] = set()
        """Evicted blocks whose objects are not deleted yet."""
        self._numbers = count()
        self._folder = ""
        self._slot_bytes = 0

    @property
    def backend_parameters(self) -> Mapping[str, str]:
        config, credentials = self._config, self._credentials
        parameters = {
            "bucket": config.bucket,
            "region": config.region,
            "use_virtual_addressing": str(not config.path_style).lower(),
            "num_threads": str(config.max_concurrency),
            # Otherwise uploads are chunked with a trailer, which simple servers do not know.
            "req_checksum": "required",
            "resp_checksum": "required",
        }
        if config.endpoint is not None:
            parameters["endpoint_override"] = config.endpoint
            parameters["scheme"] = urlsplit(config.endpoint).scheme
        optional = {
            "access_key": credentials.access_key,
            "secret_key": credentials.secret_key,
            "session_token": credentials.session_token,
            "ca_bundle": config.ca_file,
        }
        return parameters | {name: value for name, value in optional.items() if value is not None}

    def open_slots(self, geometry: SlotGeometry) -> OpenedSlots:
        config, limit = self._config, self._config.capacity
        capacity = UNBOUNDED if limit is None else geometry.slots_in(limit)
        self._slot_bytes = geometry.slot_bytes
        self._folder = "/".join(filter(None, (config.prefix.strip("/"), geometry.identity)))
        self._keys.clear()
        self._found.clear()
        self._being_read.clear()
        self._undeleted.clear()
        bucket = Bucket(config, self._credentials)
        try:
            bucket.check(create=config.create_bucket)
            known = self._list(bucket, min(capacity, config.list_limit))
        except TierError:
            bucket.close()
            raise
        self._bucket = bucket
        return OpenedSlots(capacity, known)

    def close_slots(self) -> None:
        self._undeleted.update(self._being_read.values())
        try:
            self._delete_evicted()
        except TierError as error:
            log.warning("evicted objects remain in the bucket, and may be found again: %s", error)
        self._bucket.close()

    def reserve(self, keys: Sequence[BlockKey]) -> list[Slot | None]:
        slots = super().reserve(keys)
        given = {slot: key for slot, key in zip(slots, keys, strict=True) if slot is not None}
        self._keys |= given
        # An object that is written now must not be deleted for its evicted predecessor.
        reserved = set(given.values())
        self._undeleted -= reserved
        self._being_read = {s: key for s, key in self._being_read.items() if key not in reserved}
        return slots

    def place(self, slot: Slot, size_bytes: int) -> tuple[Span, Region | None]:
        """A span with a fresh number: NIXL must never have two objects with one number."""
        span = Span(0, size_bytes, next(self._numbers))
        return span, Region(memory=Memory.OBJ, span=span, name=self._name(self._keys[slot]))

    def probe(self, keys: Sequence[BlockKey]) -> list[StoredBlock | None]:
        table = self.table
        self._delete_evicted()
        gone = set(self._being_read.values())
        unknown = [key for key in keys if table.lookup(key) is None and key not in gone]
        sizes = self._bucket.sizes([self._name(key) for key in unknown])
        found = {
            key: size
            for key, size in zip(unknown, sizes, strict=True)
            if size is not None and self._is_ours(size)
        }
        # None for a block that this worker is writing, and for all where there is no room.
        slots = zip(found, self.reserve(list(found)), strict=True)
        new = [_stored(key, slot, found[key]) for key, slot in slots if slot is not None]
        self.commit(new)
        self._found.update(stored.key for stored in new)
        return self.lookup(keys)

    def unpin(self, slot: Slot) -> None:
        super().unpin(slot)
        if slot in self._being_read and not self.table.is_pinned(slot):
            self._undeleted.add(self._being_read.pop(slot))

    def make_room(self, keys: Iterable[BlockKey]) -> None:
        keys = set(keys)
        others, own = keys & self._found, keys - self._found
        self.table.evict(others)
        self._found -= others
        self.evict(own)

    def forget(self, blocks: Sequence[StoredBlock]) -> None:
        read = {block.slot: block.key for block in blocks if self.table.is_pinned(block.slot)}
        self._bucket.delete([self._name(b.key) for b in blocks if b.slot not in read])
        self._being_read |= read
        self._found.difference_update(block.key for block in blocks)
        self._delete_evicted()

    def _delete_evicted(self) -> None:
        self._bucket.delete([self._name(key) for key in self._undeleted])
        self._undeleted.clear()

    def _name(self, key: BlockKey) -> str:
        digits = key.hex()
        return f"{self._folder}/{digits[:2]}/{digits}"

    def _is_ours(self, size_bytes: int) -> bool:
        # A larger object was written with another geometry.
        return 0 < size_bytes <= self._slot_bytes

    def _list(self, bucket: Bucket, most: int) -> list[StoredBlock]:
        known: list[StoredBlock] = []
        for name, size_bytes in bucket.listing(f"{self._folder}/", most) if most else ():
            key = _key_of(name)
            if key is not None and self._name(key) == name and self._is_ours(size_bytes):
                self._keys[len(known)] = key
                known.append(_stored(key, len(known), size_bytes))
        self._found.update(stored.key for stored in known)
        return known


def _stored(key: BlockKey, slot: Slot, size_bytes: int) -> StoredBlock:
    return StoredBlock(key=key, slot=slot, size_bytes=size_bytes, checksum=0)


def _reveal(secret: Secret | None) -> str | None:
    return None if secret is None else secret.reveal()


def _key_of(name: str) -> BlockKey | None:
    try:
        key = bytes.fromhex(name.rpartition("/")[2])
    except ValueError:
        return None
    return key if len(key) == KEY_BYTES else None
