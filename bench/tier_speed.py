"""``python -m bench.tier_speed FILE``: each tier of FILE beside the limits of its medium.

Needs no engine and no deployment. Blocks take the way that they take in an engine: reserved, moved
by NIXL, checked, committed. The raw limits of the medium (memcpy, NIXL alone, preadv and pwritev by
8 threads, boto3) are measured in the same rounds, each of them first in turn. Tiers keep their
options, but get the capacity that is needed, and a new folder or prefix, removed in the end.
Prints one JSON object for each tier, block size and operation. Exit code 1 when a tier could not be
measured; the others are.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import attrs
import click
from attrs import field, frozen

from bench.tier_blocks import TierBlocks, new_keys
from bench.tier_medium import RawMove, raw_ways, way_name
from commutator.config.load import load_config
from commutator.contract.tier import Direction, Memory, TierConfig
from commutator.errors import CommutatorError, ConfigError, TierError
from commutator_engine_kit.kv.arena import BlockArena
from commutator_engine_kit.kv.block_manager.actions import LoadResult
from commutator_engine_kit.kv.stores import part_blocks
from commutator_engine_kit.kv.tiers.block_io import PAGE_BYTES
from commutator_engine_kit.kv.tiers.setup import TierSetup, make_tiers

__all__ = [
    "Line",
    "measure",
    "measure_file",
]

ThingT = TypeVar("ThingT")


_SAMPLES = 100


_SEED = 7


_FILL_BYTES = 1 << 20


_DIRECTIONS = {
    "store": Direction.WRITE,
    "load": Direction.READ,
    "cold load": Direction.READ,
}


@frozen(kw_only=True)
class Line:
    """One result: a tier, a size, a direction, and whether the page cache could help."""

    tier: str
    block_bytes: int
    operation: str
    cache: str
    """ "warm" or "cold"."""
    gb_per_s: float
    p99_ms: float
    """Of one block alone."""
    raw_gb_per_s: dict[str, float] = field(factory=dict)
    """What the medium gave in the same rounds, by way."""

    def as_json(self) -> dict[str, Any]:
        """With the ratio to each raw limit."""
        return {
            "tier": self.tier,
            "block_bytes": self.block_bytes,
            "operation": self.operation,
            "cache": self.cache,
            "gb_per_s": round(self.gb_per_s, 3),
            "p99_ms": round(self.p99_ms, 3),
            "raw_gb_per_s": {way: round(rate, 3) for way, rate in self.raw_gb_per_s.items()},
            "ratio": {way: round(self.gb_per_s / r, 3) for way, r in self.raw_gb_per_s.items()},
        }


@click.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--block-kib", type=click.IntRange(1, 65536), default=1024, show_default=True)
@click.option("--total-mib", type=click.IntRange(1), default=64, show_default=True,
              help="Bytes of blocks in each round.")  # fmt: skip
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True,
              help="Rounds whose median counts.")  # fmt: skip
def main(file: Path, block_kib: int, total_mib: int, rounds: int) -> None:
    problems = 0
    for outcome in measure_file(file, block_kib << 10, total_mib << 20, rounds):
        if isinstance(outcome, Line):
            print(json.dumps(outcome.as_json()), flush=True)
        else:
            problems += 1
            print(f"error: {outcome}", file=sys.stderr)
    sys.exit(problems > 0)


def measure_file(
    file: Path, block_bytes: int, total_bytes: int, rounds: int
) -> Iterator[Line | Exception]:
    """The results of every tier of ``file`` that stores blocks, or why it was not measured."""
    try:
        loaded = load_config([file])
    except ConfigError as error:
        yield error
        return
    with ExitStack() as stack:
        capacity = _needed_bytes(block_bytes, total_bytes)
        configs = [_tailored(config, capacity, stack) for config in loaded.config.tiers]
        for setup in make_tiers(configs, loaded.host, f"tier-speed-{os.getpid()}"):
            if not setup.tier.writable:
                continue
            try:
                yield from measure(setup, block_bytes, total_bytes, rounds)
            except (CommutatorError, OSError) as error:
                yield error


def _tailored(config: TierConfig, capacity: int, stack: ExitStack) -> TierConfig:
    """The same tier with this capacity, in a folder or under a prefix of its own."""
    options = attrs.asdict(config, recurse=False)
    changes: dict[str, Any] = {}
    if "capacity" in options:
        changes["capacity"] = capacity
    if "path" in options:
        parent = Path(options["path"].replace("{worker}", "tier-speed"))
        parent.mkdir(parents=True, exist_ok=True)
        changes["path"] = tempfile.mkdtemp(prefix="tier-speed-", dir=parent)
        stack.callback(shutil.rmtree, changes["path"], ignore_errors=True)
    if "prefix" in options:
        changes["prefix"] = f"{options['prefix']}/tier-speed-{os.getpid()}"
    return attrs.evolve(config, **changes)


def _needed_bytes(block_bytes: int, total_bytes: int) -> int:
    """Capacity for the tier's blocks and the raw ones, each in whole pages with a header."""
    count = max(2, total_bytes // block_bytes)
    return 2 * (count + 1) * (block_bytes + block_bytes // 64 + 2 * PAGE_BYTES)


def measure(setup: TierSetup, block_bytes: int, total_bytes: int, rounds: int) -> list[Line]:
    """Store and load ``total_bytes`` in blocks, in turns with the raw ways.

    Raises TierError or TransferError when the tier cannot be used.
    """
    count = max(2, total_bytes // block_bytes)
    with ExitStack() as stack:
        bench = _Bench(setup, block_bytes, count)
        stack.enter_context(bench.blocks.opened())
        slots = [slot for slot in setup.tier.reserve(new_keys(count)) if slot is not None]
        if len(slots) < count:
            raise TierError(f"{setup.name}: no room for {count} blocks of {block_bytes} bytes more")
        raw = stack.enter_context(raw_ways(setup.tier, bench.arena, slots))
        lines = bench.rounds(raw, rounds)
        setup.tier.release(slots)
        return lines


def _rotated(things: list[ThingT], by: int) -> list[ThingT]:
    """Another one first, each time."""
    first = by % len(things)
    return things[first:] + things[:first]


def _random_memory(size_bytes: int) -> mmap.mmap:
    """Filled in parts: one call for random bytes gives less than 256 MiB."""
    try:
        memory = mmap.mmap(-1, size_bytes)
    except (OSError, OverflowError) as error:
        raise TierError(f"no memory for {size_bytes} bytes of blocks: {error}") from error
    draw = random.Random(_SEED)
    for start in range(0, size_bytes, _FILL_BYTES):
        end = min(start + _FILL_BYTES, size_bytes)
        memory[start:end] = draw.randbytes(end - start)
    return memory


class _Bench:
    def __init__(self, setup: TierSetup, block_bytes: int, count: int) -> None:
        self.setup = setup
        self._memory = _random_memory(block_bytes * count)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self.arena = BlockArena(
            memory=Memory.DRAM, address=address, block_bytes=block_bytes, count=count
        )
        self.blocks = TierBlocks(setup, self.arena, "tier-speed")

    def rounds(self, raw: dict[str, RawMove], rounds: int) -> list[Line]:
        everything = range(self.arena.count)
        taken: dict[tuple[str, str], list[float]] = {}

        def timed(name: str, way: str, call: Callable[[], None]) -> None:
            started_s = time.perf_counter()
            call()
            taken.setdefault((name, way), []).append(time.perf_counter() - started_s)

        cached = bool(self._files()) and self.setup.tier.alignment_bytes == 1
        calls = {
            name: {
                **{way: partial(move, direction, everything) for way, move in raw.items()},
                "tier": partial(self.store if name == "store" else self.load, everything),
            }
            for name, direction in _DIRECTIONS.items()
            if cached or name != "cold load"
        }
        for number in range(rounds + 1):
            for name, ways in calls.items():
                # A way that follows another over the same memory finds it in a cache.
                for way, call in _rotated(list(ways.items()), number):
                    self._drop_cache(name)
                    if (name, way) == ("store", "tier"):
                        self.blocks.free(everything)
                    timed(name, way, call)
            if not number:
                taken.clear()  # the first round touches memory and files
        rates = {
            key: len(self._memory) / statistics.median(seconds) / 1e9
            for key, seconds in taken.items()
        }
        p99_ms = self._latencies(cached=cached)
        warm = "warm" if cached or self.setup.tier.memory is Memory.DRAM else "cold"
        return [
            Line(
                tier=self.setup.name,
                block_bytes=self.arena.block_bytes,
                operation=name.removeprefix("cold "),
                cache="cold" if name.startswith("cold") else warm,
                gb_per_s=rates[name, "tier"],
                p99_ms=p99_ms[name],
                raw_gb_per_s={way_name(way, _DIRECTIONS[name]): rates[name, way] for way in raw},
            )
            for name in dict.fromkeys(name for name, _ in rates)
        ]

    def store(self, blocks: Sequence[int]) -> None:
        step = part_blocks(self.arena.block_bytes, self.setup.tier.memory)
        for start in range(0, len(blocks), step):
            self.blocks.store(blocks[start : start + step])

    def load(self, blocks: Sequence[int]) -> None:
        results = self.blocks.load(blocks)
        if bad := [result for result in results if result is not LoadResult.LOADED]:
            raise CommutatorError(f"{self.setup.name}: a block was not loaded: {bad[0].value}")

    def _latencies(self, *, cached: bool) -> dict[str, float]:
        """The 99th percentile of one block at a time, in milliseconds."""
        taken: dict[str, list[float]] = {"store": [], "load": []}
        for sample in range(_SAMPLES):
            block = sample % self.arena.count
            self.blocks.free([block])
            for name, call in (("store", self.store), ("load", self.load)):
                started_s = time.perf_counter()
                call([block])
                taken[name].append(time.perf_counter() - started_s)
            if cached:
                self._drop_cache("cold load")
                started_s = time.perf_counter()
                self.load([block])
                taken.setdefault("cold load", []).append(time.perf_counter() - started_s)
        return {name: statistics.quantiles(all_s, n=100)[98] * 1e3 for name, all_s in taken.items()}

    def _files(self) -> set[int]:
        regions = self.setup.tier.regions()
        return {region.span.device for region in regions if region.memory is Memory.FILE}

    def _drop_cache(self, name: str) -> None:
        if name == "cold load":
            for descriptor in self._files():
                os.fdatasync(descriptor)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


if __name__ == "__main__":
    main()
