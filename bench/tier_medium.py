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

from commutator.contract.tier import Direction, Memory, Region, Slot, Span, StorageTier
from commutator.errors import CommutatorError, TransferError
from commutator_engine_kit.kv.arena import BlockArena, bytes_at
from commutator_engine_kit.nixl.library import make_agent, nixl_errors

__all__ = [
    "BareNixl",
    "RawMove",
    "raw_ways",
    "way_name",
]

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
    prefix = f"tier-speed/{uuid.uuid4().hex}"

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


class BareNixl:
    """An agent of its own for one backend. Checks nothing, and spins while it waits."""

    def __init__(
        self, name: str, backend: str, parameters: Mapping[str, str], regions: Sequence[Region]
    ) -> None:
        """Raises TransferError when NIXL is not there, or refuses."""
        self._name = name
        self._backend = backend
        self._nixl = make_agent(name)
        with nixl_errors(f"set {name} up"):
            self._nixl.create_backend(backend, dict(parameters))
            self._registered = [
                self._nixl.register_memory(
                    [(r.span.address, r.span.size_bytes, r.span.device, r.name)],
                    str(r.memory),
                    [backend],
                )
                for r in regions
            ]

    def move(
        self, direction: Direction, local: Sequence[Span], remote: Sequence[Span], memory: Memory
    ) -> None:
        """Between DRAM and ``remote``, span by span. Raises TransferError."""
        with nixl_errors(f"move {len(local)} spans"):
            handle = self._nixl.initialize_xfer(
                str(direction),
                self._nixl.get_xfer_descs(_tuples(local), str(Memory.DRAM)),
                self._nixl.get_xfer_descs(_tuples(remote), str(memory)),
                self._name,
                b"",
                [self._backend],
            )
            state = self._nixl.transfer(handle)
            while state == "PROC":
                state = self._nixl.check_xfer_state(handle)
            handle.release()
        if state != "DONE":
            raise TransferError(f"bare NIXL ended a transfer with {state}")

    def close(self) -> None:
        """Let go of what was registered."""
        with nixl_errors(f"close {self._name}"):
            for registered in self._registered:
                self._nixl.deregister_memory(registered, [self._backend])


def _tuples(spans: Sequence[Span]) -> list[tuple[int, int, int]]:
    return [(span.address, span.size_bytes, span.device) for span in spans]
