"""What a prompt leaves behind: every form in which a tier might show its tokens, salt or keys."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b, md5, sha1, sha256

import xxhash
from attrs import frozen
from tests.support.kv_rig import BLOCK_TOKENS, content

from commutator.contract.block import BlockStored, KvEvent
from commutator.routing.prefix_index.hashing import hash_root, local_block_hashes

__all__ = ["Prompt", "shown", "told"]


@frozen
class Prompt:
    """A chain of blocks as ``KvRig.offload`` takes it."""

    keys: Sequence[bytes]
    salt: str
    adapter: str

    def traces(self) -> Iterator[tuple[str, bytes]]:
        """(what it is, its bytes) of all that must not be readable."""
        for what, text in (("salt", self.salt), ("adapter", self.adapter)):
            yield what, text.encode()
            yield from _digests(what, text.encode())
        if (root := hash_root(self.salt)) is not None:
            yield "salt's routing hash", struct.pack("<Q", root)
        tokens = [token for key in self.keys for token in key[:BLOCK_TOKENS]]
        for local in local_block_hashes(tokens, BLOCK_TOKENS):
            yield "tokens' routing hash", struct.pack("<Q", local)
        for key in self.keys:
            ids = list(key[:BLOCK_TOKENS])
            for form in ("<%dI", ">%dI", "<%dQ", "<%dH"):
                packed = struct.pack(form % len(ids), *ids)
                if len(packed) >= 8:
                    yield f"tokens as {form}", packed
                yield from _digests("tokens", packed)
            yield "tokens as text", json.dumps(ids)[1:-1].encode()
            yield "key", key
            yield from _digests("key", key)
            yield "KV", content(key)[:32]


def _digests(what: str, data: bytes) -> Iterator[tuple[str, bytes]]:
    for name, make in (("sha256", sha256), ("sha1", sha1), ("md5", md5), ("blake2b", blake2b)):
        yield f"{name} of {what}", make(data, usedforsecurity=False).digest()
    yield f"xxh3 of {what}", struct.pack("<Q", xxhash.xxh3_64_intdigest(data))


def shown(prompts: Iterable[Prompt], places: Mapping[str, bytes]) -> list[str]:
    """Each trace of a prompt that is in one of ``places``: raw, reversed, or as hex digits."""
    found = []
    lower = {place: data.lower() for place, data in places.items()}
    for prompt in prompts:
        for what, trace in prompt.traces():
            hexes = {trace.hex().encode(), trace[::-1].hex().encode()}
            for place, data in places.items():
                if trace in data or trace[::-1] in data or any(h in lower[place] for h in hexes):
                    found.append(f"{what} in {place}")
    return found


def told(events: Iterable[KvEvent]) -> dict[tuple[str | None, str | None], int]:
    """How many blocks KV events told of, for each salt and adapter."""
    counts: dict[tuple[str | None, str | None], int] = {}
    for event in events:
        if isinstance(event, BlockStored):
            whose = event.cache_salt, event.adapter
            counts[whose] = counts.get(whose, 0) + len(event.block_hashes)
    return counts
