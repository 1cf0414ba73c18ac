"""The tier: objects with the block's frame inside, named by the block's key."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from itertools import count
from urllib.parse import urlsplit

from commutator import Secret
from commutator.errors import TierError
from commutator.kv import (
    KEY_BYTES,
    UNBOUNDED,
    BlockKey,
    OpenedSlots,
    Slot,
    SlotGeometry,
    SlotTier,
    Stored,
)
from commutator.transfer import Memory, Region, Span
from commutator_s3.bucket import Bucket, Credentials
from commutator_s3.config import S3TierConfig

__all__ = ["S3Tier"]

log = logging.getLogger(__name__)


class S3Tier(SlotTier):
    """Blocks in a bucket that any number of workers share.

    A block is the object ``PREFIX/IDENTITY/XX/KEY``, where KEY is its key in hex and XX how that
    begins. A slot is what this worker knows of one object, in memory only; ``probe`` asks the
    bucket. Objects carry no other metadata, so a block that was written but not committed before a
    crash is found as committed afterwards: S3 shows whole objects only, and the frame inside tells
    what it is. Evicting deletes the object; one that is being read is deleted later, with the next
    call that reaches the bucket, or at the latest when the tier is closed. Making room deletes only
    what this instance has stored: what it found may be another worker's, and is forgotten.

    ``open`` raises TierError when the store cannot be reached or refuses; call it again later.
    Afterwards nothing needs to be opened again: while the store is away ``probe`` and ``evict``
    raise TierError and transfers fail; all of them work again as soon as it is back.
    """

    medium = "EXTERNAL"
    memory = Memory.OBJ
    backend = "OBJ"
    framed = True
    shared = True

    def __init__(self, config: S3TierConfig) -> None:
        self._config = config
        # NIXL's S3 client has no other switch: by default it goes on for 25 s when the store is
        # away. It reads them when the backend is made; what the operator set is left alone.
        os.environ.setdefault("AWS_RETRY_MODE", "standard")
        os.environ.setdefault("AWS_MAX_ATTEMPTS", "2")
        # At once: a secret that is not there will not come with time.
        self._credentials = Credentials(
            access_key=_reveal(config.access_key),
            secret_key=_reveal(config.secret_key),
            session_token=_reveal(config.session_token),
        )
        self._keys: dict[Slot, BlockKey] = {}
        self._found: set[BlockKey] = set()
        """Committed blocks that others stored, or a former life."""
        self._being_read: dict[Slot, BlockKey] = {}
        """Evicted, but still pinned."""
        self._doomed: set[BlockKey] = set()
        """Evicted; their objects are to be deleted."""
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
        capacity = UNBOUNDED if limit is None else limit // geometry.slot_bytes
        if not capacity:
            raise TierError(
                f"s3: a capacity of {limit} bytes holds no block of {geometry.slot_bytes} "
                "bytes; raise it"
            )
        self._slot_bytes = geometry.slot_bytes
        self._folder = "/".join(filter(None, (config.prefix.strip("/"), geometry.identity)))
        self._keys.clear()
        self._found.clear()
        self._being_read.clear()
        self._doomed.clear()
        bucket = Bucket(
            config.bucket,
            endpoint=config.endpoint,
            region=config.region,
            credentials=self._credentials,
            ca_file=config.ca_file,
            path_style=config.path_style,
            max_concurrency=config.max_concurrency,
            timeout_s=config.request_timeout_s,
        )
        try:
            bucket.check(create=config.create_bucket)
            known = self._list(bucket, min(capacity, config.list_limit))
        except TierError:
            bucket.close()
            raise
        self._bucket = bucket
        return OpenedSlots(capacity, known)

    def close_slots(self) -> None:
        self._doomed.update(self._being_read.values())
        try:
            self._delete_doomed()
        except TierError as error:
            log.warning("evicted objects stay, and may be found again: %s", error)
        self._bucket.close()

    def reserve(self, keys: Sequence[BlockKey]) -> list[Slot | None]:
        slots = super().reserve(keys)
        given = {slot: key for slot, key in zip(slots, keys, strict=True) if slot is not None}
        self._keys |= given
        # What is written now must not be deleted for what lay there before.
        anew = set(given.values())
        self._doomed -= anew
        self._being_read = {s: key for s, key in self._being_read.items() if key not in anew}
        return slots

    def place(self, slot: Slot, size_bytes: int) -> tuple[Span, Region | None]:
        """A span with a number of its own: NIXL must never know two objects by the same number."""
        span = Span(0, size_bytes, next(self._numbers))
        return span, Region(Memory.OBJ, span, self._name(self._keys[slot]))

    def probe(self, keys: Sequence[BlockKey]) -> list[Stored | None]:
        table = self.table
        self._delete_doomed()
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
            self._doomed.add(self._being_read.pop(slot))

    def make_room(self, keys: Iterable[BlockKey]) -> None:
        keys = set(keys)
        others, own = keys & self._found, keys - self._found
        self.table.evict(others)
        self._found -= others
        self.evict(own)

    def forget(self, blocks: Sequence[Stored]) -> None:
        read = {block.slot: block.key for block in blocks if self.table.is_pinned(block.slot)}
        self._bucket.delete([self._name(b.key) for b in blocks if b.slot not in read])
        self._being_read |= read
        self._found.difference_update(block.key for block in blocks)
        self._delete_doomed()

    def _delete_doomed(self) -> None:
        self._bucket.delete([self._name(key) for key in self._doomed])
        self._doomed.clear()

    def _name(self, key: BlockKey) -> str:
        digits = key.hex()
        return f"{self._folder}/{digits[:2]}/{digits}"

    def _is_ours(self, size_bytes: int) -> bool:
        # What is larger was written with another geometry, whatever its identity says.
        return 0 < size_bytes <= self._slot_bytes

    def _list(self, bucket: Bucket, most: int) -> list[Stored]:
        known: list[Stored] = []
        for name, size_bytes in bucket.listing(f"{self._folder}/", most) if most else ():
            key = _key_of(name)
            if key is not None and self._name(key) == name and self._is_ours(size_bytes):
                self._keys[len(known)] = key
                known.append(_stored(key, len(known), size_bytes))
        self._found.update(stored.key for stored in known)
        return known


def _stored(key: BlockKey, slot: Slot, size_bytes: int) -> Stored:
    return Stored(key=key, slot=slot, size_bytes=size_bytes, checksum=0)


def _reveal(secret: Secret | None) -> str | None:
    return None if secret is None else secret.reveal()


def _key_of(name: str) -> BlockKey | None:
    try:
        key = bytes.fromhex(name.rpartition("/")[2])
    except ValueError:
        return None
    return key if len(key) == KEY_BYTES else None
