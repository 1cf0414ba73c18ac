"""The raw limits of a tier's medium, each moving the same blocks as the tier does, unchecked."""

from __future__ import annotations

import ctypes
import os
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from commutator.errors import CommutatorError
from commutator.kv.arena import BlockArena, bytes_at
from commutator.kv.tier import Slot, StorageTier
from commutator.transfer.bare import BareNixl
from commutator.transfer.spans import Direction, Memory, Span

__all__ = ["RawMove", "raw_ways", "way_name"]

_FILE_THREADS = 8
_FILES = "files"
_FILE_CALLS = {Direction.READ: "preadv", Direction.WRITE: "pwritev"}

RawMove = Callable[[Direction, Sequence[int]], None]
"""Moves the blocks of these numbers from the arena (WRITE) or into it (READ)."""


@contextmanager
def raw_ways(
    tier: StorageTier, arena: BlockArena, slots: Sequence[Slot]
) -> Iterator[dict[str, RawMove]]:
    """By name, what can be measured for this medium. ``slots`` are reserved, one for each block."""
    size = arena.block_bytes
    local = [arena.span(index) for index in range(arena.count)]
    if tier.memory is Memory.OBJ:
        with _boto3(tier.backend_parameters, local) as way:
            yield {} if way is None else {"boto3": way}
        return
    step = tier.alignment_bytes
    remote = [tier.place(slot, -(-size // step) * step)[0] for slot in slots]
    bare = BareNixl(
        f"bare-{uuid.uuid4().hex}",
        tier.backend,
        tier.backend_parameters,
        [arena.region, *tier.regions()],
    )

    def nixl(direction: Direction, blocks: Sequence[int]) -> None:
        bare.move(direction, [local[i] for i in blocks], [remote[i] for i in blocks], tier.memory)

    try:
        if tier.memory is Memory.FILE:
            with ThreadPoolExecutor(_FILE_THREADS) as pool:
                yield {_FILES: _files(pool, local, remote), "nixl": nixl}
        elif tier.memory is Memory.DRAM:
            yield {"memcpy": _memcpy(local, remote), "nixl": nixl}
        else:
            yield {"nixl": nixl}
    finally:
        bare.close()


def way_name(way: str, direction: Direction) -> str:
    """What a way is called when it goes in one direction."""
    return _FILE_CALLS[direction] if way == _FILES else way


def _memcpy(local: Sequence[Span], remote: Sequence[Span]) -> RawMove:
    def move(direction: Direction, blocks: Sequence[int]) -> None:
        for index in blocks:
            ours, theirs = local[index], remote[index]
            if direction is Direction.WRITE:
                ctypes.memmove(theirs.address, ours.address, ours.size_bytes)
            else:
                ctypes.memmove(ours.address, theirs.address, ours.size_bytes)

    return move


def _files(pool: ThreadPoolExecutor, local: Sequence[Span], remote: Sequence[Span]) -> RawMove:
    """Read and write whole blocks by preadv and pwritev, several at a time."""

    def move_one(direction: Direction, index: int) -> None:
        file = remote[index]
        call = os.pwritev if direction is Direction.WRITE else os.preadv
        if call(file.device, [bytes_at(local[index])], file.address) != local[index].size_bytes:
            raise CommutatorError("the file system moved less than a block")

    def move(direction: Direction, blocks: Sequence[int]) -> None:
        for _ in pool.map(lambda index: move_one(direction, index), blocks):
            pass

    return move


@contextmanager
def _boto3(parameters: Mapping[str, str], local: Sequence[Span]) -> Iterator[RawMove | None]:
    """PUT and GET with the same concurrency; None when boto3 is not installed."""
    try:
        boto3, config = import_module("boto3"), import_module("botocore.config")
    except ImportError:
        yield None
        return
    at_once = int(parameters["num_threads"])
    client: Any = boto3.client(
        "s3",
        endpoint_url=parameters.get("endpoint_override"),
        region_name=parameters.get("region"),
        aws_access_key_id=parameters.get("access_key"),
        aws_secret_access_key=parameters.get("secret_key"),
        aws_session_token=parameters.get("session_token"),
        verify=parameters.get("ca_bundle"),
        config=config.Config(
            max_pool_connections=at_once,
            s3={"addressing_style": "virtual" if _virtual(parameters) else "path"},
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
        ),
    )
    place = {"Bucket": parameters["bucket"]}
    prefix = f"commutator-kv-bench/{uuid.uuid4().hex}"

    def move_one(direction: Direction, index: int) -> None:
        data, key = bytes_at(local[index]), f"{prefix}/{index}"
        if direction is Direction.WRITE:
            client.put_object(**place, Key=key, Body=bytes(data))
        else:
            data[:] = client.get_object(**place, Key=key)["Body"].read()

    with ThreadPoolExecutor(at_once) as pool:

        def move(direction: Direction, blocks: Sequence[int]) -> None:
            for _ in pool.map(lambda index: move_one(direction, index), blocks):
                pass

        try:
            yield move
        finally:
            for index in range(len(local)):
                client.delete_object(**place, Key=f"{prefix}/{index}")


def _virtual(parameters: Mapping[str, str]) -> bool:
    return parameters.get("use_virtual_addressing") == "true"
