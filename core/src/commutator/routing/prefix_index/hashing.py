"""Names KV blocks by their tokens: local block hashes, and sequence hashes chained from them.

Both agree with NVIDIA Dynamo's router, so that events and indexes can be compared with it. Only
full blocks have a hash. An engine's own block hashes are never used across processes.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import islice, repeat

import xxhash

from commutator.contract.block import media_in
from commutator.contract.request import MediaIdentity

HASH_SEED = 1337

TOKEN_BYTES = 4
_UINT64 = 1 << 64

_hash64 = xxhash.xxh3_64_intdigest


def hash_seed(adapter: str | None = None) -> int:
    """The seed of local block hashes: 1337, moved by the adapter if there is one.

    ``adapter`` is its digest, or the name that an engine has for it, which is no digest.
    """
    if not adapter:
        return HASH_SEED
    return (HASH_SEED + _hash64(adapter.encode())) % _UINT64


def hash_root(cache_salt: str | None = None) -> int | None:
    """The parent hash of the first block, so that only prompts of one salt share hashes.

    None without a salt: the chain then begins with the first block, as Dynamo's does.
    """
    return None if cache_salt is None else _hash64(cache_salt.encode("utf-8", "surrogatepass"))


def local_block_hashes(
    token_ids: Sequence[int], block_size: int, *, adapter: str | None = None
) -> list[int]:
    """One hash for each full block: xxh3_64 of its tokens as little-endian 32-bit integers.

    ``block_size`` is in tokens. C-contiguous arrays of unsigned 32-bit integers are fastest, then
    lists. Raises ValueError when a token is no unsigned 32-bit integer.
    """
    if block_size < 1:
        raise ValueError(f"block_size must be at least 1, not {block_size}")
    blocks = len(token_ids) // block_size
    if not blocks:
        return []
    pieces = _splitter(block_size * TOKEN_BYTES, blocks).unpack_from(_token_integers(token_ids))
    return list(map(_hash64, pieces, repeat(hash_seed(adapter))))


def chain_hashes(local_hashes: Iterable[int], parent: int | None = None) -> list[int]:
    """The sequence hash of each block: its local hash, chained to everything before it.

    ``parent`` is the sequence hash of the block before the first; None when there is none.
    """
    pack, hash64, seed = _PAIR.pack, _hash64, HASH_SEED
    remaining = iter(local_hashes)
    first = [] if parent is not None else list(islice(remaining, 1))
    previous = first[0] if first else parent
    rest = [previous := hash64(pack(previous, each), seed) for each in remaining]
    return first + rest


def sequence_hashes(
    token_ids: Sequence[int],
    block_size: int,
    *,
    adapter: str | None = None,
    cache_salt: str | None = None,
    known: Sequence[int] = (),
    media: Sequence[MediaIdentity] = (),
) -> list[int]:
    """The sequence hash of every full block of ``token_ids``.

    ``known`` are the sequence hashes of its first blocks, if they were computed before: only the
    blocks after them are hashed. ``media`` is all that some of the tokens stand for. Raises
    ValueError as ``local_block_hashes`` does, and when more blocks are known than there are.
    """
    if not known:
        local = local_block_hashes(token_ids, block_size, adapter=adapter)
        if media:
            local = _with_media(local, block_size, media, 0)
        return chain_hashes(local, hash_root(cache_salt))
    if len(known) * block_size > len(token_ids):
        raise ValueError(f"{len(known)} blocks are known of {len(token_ids)} tokens")
    rest = token_ids[len(known) * block_size :]
    local = local_block_hashes(rest, block_size, adapter=adapter)
    if media:
        local = _with_media(local, block_size, media, len(known))
    return [*known, *chain_hashes(local, known[-1])]


def _with_media(
    local: Iterable[int], block_size: int, media: Sequence[MediaIdentity], first: int
) -> list[int]:
    """The local hashes of block ``first`` and those after it, moved where media are in them."""
    moved = []
    for number, each in enumerate(local, start=first):
        inside = media_in(media, number * block_size, (number + 1) * block_size)
        moved.append(_hash64(each.to_bytes(8, "little") + inside, HASH_SEED) if inside else each)
    return moved


_PAIR = struct.Struct("<QQ")


def _token_integers(token_ids: Sequence[int]) -> array[int] | memoryview:
    """The tokens as little-endian 32-bit integers."""
    if not isinstance(token_ids, (list, tuple)):
        try:
            view = memoryview(token_ids)  # type: ignore[arg-type]
        except TypeError:
            pass
        else:
            words = view.format in ("I", "L") and view.itemsize == TOKEN_BYTES
            if words and view.c_contiguous and sys.byteorder == "little":
                return view
            token_ids = view.tolist()
    result = array("I")
    try:
        # The fastest conversion of a list: it makes no copy and counts no references.
        result.fromlist(token_ids if isinstance(token_ids, list) else list(token_ids))
    except (OverflowError, TypeError) as error:
        raise ValueError(f"a token id is no unsigned 32-bit integer: {error}") from None
    if sys.byteorder == "big":
        result.byteswap()
    return result


@lru_cache(maxsize=32)
def _splitter(size_bytes: int, pieces: int) -> struct.Struct:
    """A struct that cuts bytes into ``pieces`` pieces in one call."""
    return struct.Struct(f"{size_bytes}s" * pieces)
