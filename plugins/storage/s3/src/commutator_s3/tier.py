"""The `s3` tier: one object for each block, with a name that follows from the block's key."""

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
from commutator.contract.tier import BlockSeal
from commutator.errors import TierError
from commutator_engine_kit.kv import OpenedSlots, SlotTier
from commutator_s3.bucket import Bucket, Credentials
from commutator_s3.config import S3TierConfig

log = logging.getLogger(__name__)


class S3Tier(SlotTier):
    """Blocks in a bucket that any number of workers share.

    A block is the object ``PREFIX/IDENTITY/XX/NAME``: NAME is its key in hex, or what
    ``BlockSeal.name`` makes of it; XX are the first two digits of that. Each key of the tier has an
    IDENTITY of its own: objects are written under the current one, and looked up under all, the
    current one first. A slot is this worker's record of one object, in memory only; ``probe`` looks
    objects up in the bucket. Objects have no other metadata. A block that was written but not
    committed before a crash therefore counts as committed afterwards; that is safe, because S3
    shows only whole objects and each begins with a header. Evicting a block deletes its object. An
    object that is being read is deleted by the next call that reaches the bucket, or when the tier
    is closed. Making room deletes only objects that this instance stored; others stay in the
    bucket.

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
        self._names: dict[Slot, str] = {}
        """The name of each slot's object."""
        self._found: set[BlockKey] = set()
        """Committed blocks that another worker or an earlier process stored."""
        self._being_read: dict[Slot, BlockKey] = {}
        """Evicted blocks that are still pinned."""
        self._undeleted: set[BlockKey] = set()
        """Evicted blocks whose objects are not deleted yet."""
        self._numbers = count()
        self._folders: list[_Folder] = []
        """The current key's, and those of older keys."""
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
        prefix = config.prefix.strip("/")
        self._folders = [_Folder(prefix, seal.identity, seal) for seal in geometry.seals] or [
            _Folder(prefix, geometry.identity)
        ]
        self._names.clear()
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
        self._names |= {slot: self._folders[0].name(key) for slot, key in given.items()}
        # An object that is written now must not be deleted for its evicted predecessor.
        reserved = set(given.values())
        self._undeleted -= reserved
        self._being_read = {s: key for s, key in self._being_read.items() if key not in reserved}
        return slots

    def place(self, slot: Slot, size_bytes: int) -> tuple[Span, Region | None]:
        """A span with a fresh number: NIXL must never have two objects with one number."""
        span = Span(0, size_bytes, next(self._numbers))
        return span, Region(memory=Memory.OBJ, span=span, name=self._names[slot])

    def probe(self, keys: Sequence[BlockKey]) -> list[StoredBlock | None]:
        table = self.table
        self._delete_evicted()
        gone = set(self._being_read.values())
        unknown = [key for key in keys if table.lookup(key) is None and key not in gone]
        objects = self._bucket.first_found([self._all_names(key) for key in unknown])
        found = {
            key: one
            for key, one in zip(unknown, objects, strict=True)
            if one is not None and self._is_ours(one.size_bytes)
        }
        # None for a block that this worker is writing, and for all where there is no room.
        slots = dict(zip(found, self.reserve(list(found)), strict=True))
        new = [
            _stored(key, slot, found[key].size_bytes)
            for key, slot in slots.items()
            if slot is not None
        ]
        self._names |= {stored.slot: found[stored.key].name for stored in new}
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
        self._delete(b.key for b in blocks if b.slot not in read)
        self._being_read |= read
        self._found.difference_update(block.key for block in blocks)
        self._delete_evicted()

    def _delete_evicted(self) -> None:
        self._delete(self._undeleted)
        self._undeleted.clear()

    def _delete(self, keys: Iterable[BlockKey]) -> None:
        """Delete blocks' objects under every key: one that is left would be found again."""
        self._bucket.delete([name for key in keys for name in self._all_names(key)])

    def _all_names(self, key: BlockKey) -> list[str]:
        return [folder.name(key) for folder in self._folders]

    def _is_ours(self, size_bytes: int) -> bool:
        # A larger object was written with another geometry.
        return 0 < size_bytes <= self._slot_bytes

    def _list(self, bucket: Bucket, most: int) -> list[StoredBlock]:
        """Up to ``most`` blocks, from the first ``most`` objects of each folder."""
        known: dict[BlockKey, StoredBlock] = {}
        for folder in self._folders if most else ():
            for name, size_bytes in bucket.listing(f"{folder.path}/", most):
                key = folder.key_of(name)
                if key is None or key in known or not self._is_ours(size_bytes):
                    continue
                if len(known) == most:
                    break
                slot = len(known)
                self._names[slot] = name
                known[key] = _stored(key, slot, size_bytes)
        self._found.update(known)
        return list(known.values())


class _Folder:
    """The objects of one identity, with the names that one of the tier's keys gives them."""

    def __init__(self, prefix: str, identity: str, seal: BlockSeal | None = None) -> None:
        self.path = "/".join(filter(None, (prefix, identity)))
        self._seal = seal

    def name(self, key: BlockKey) -> str:
        """The name of a block's object."""
        digits = key.hex() if self._seal is None else self._seal.name(key)
        return f"{self.path}/{digits[:2]}/{digits}"

    def key_of(self, name: str) -> BlockKey | None:
        """The block of an object; None if it is none of ours."""
        digits = name.rpartition("/")[2]
        key = _key_of(digits) if self._seal is None else self._seal.key_of(digits)
        return key if key is not None and self.name(key) == name else None


def _stored(key: BlockKey, slot: Slot, size_bytes: int) -> StoredBlock:
    return StoredBlock(key=key, slot=slot, size_bytes=size_bytes, checksum=0)


def _reveal(secret: Secret | None) -> str | None:
    return None if secret is None else secret.reveal()


def _key_of(digits: str) -> BlockKey | None:
    try:
        key = bytes.fromhex(digits)
    except ValueError:
        return None
    return key if len(key) == KEY_BYTES else None
