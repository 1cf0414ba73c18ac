"""Names for KV blocks: a hash of the block's tokens, chained to the hash of the block before."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence

from xxhash import xxh3_64_intdigest

__all__ = ["block_keys", "root_key"]


def root_key(lora_name: str | None, cache_salt: str | None) -> int:
    """What a request's first block is chained to: equal only for requests that may share KV."""
    if lora_name is None and cache_salt is None:
        return 0
    return xxh3_64_intdigest(repr((lora_name, cache_salt)).encode())


def block_keys(token_ids: Sequence[int], block_size: int, root: int) -> list[int]:
    """Unsigned 64-bit keys of the full blocks of ``token_ids``.

    They are this engine's own, as every engine has its own. Raises OverflowError for a token id
    below 0 or over 32 bits.
    """
    data = array("I", token_ids).tobytes()
    size = block_size * 4
    key, keys = root, []
    for (block,) in struct.iter_unpack(f"{size}s", data[: len(data) // size * size]):
        key = xxh3_64_intdigest(block, key)
        keys.append(key)
    return keys
