"""Request traces in the format of Mooncake (FAST'25): one JSON object a line."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
from attrs import evolve, frozen

from commutator.errors import ConfigError

__all__ = ["TRACE_BLOCK_TOKENS", "TraceRequest", "ideal_hit_ratio", "read_trace"]

TRACE_BLOCK_TOKENS = 512


@frozen
class TraceRequest:
    """One request. Equal first ``hash_ids`` mean an equal prefix, in blocks of 512 tokens."""

    timestamp: float
    """Milliseconds since the trace began."""
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]

    @property
    def full_blocks(self) -> Sequence[int]:
        """Ids of the blocks that the prompt fills; the last id of a line may be of a part."""
        return self.blocks(TRACE_BLOCK_TOKENS)

    def sped_up(self, factor: float) -> TraceRequest:
        """The same, so many times sooner."""
        return evolve(self, timestamp=self.timestamp / factor)

    def blocks(self, block_size: int) -> Sequence[int]:
        """Ids of the full blocks of another size, which divides 512, equal for equal prefixes."""
        parts = TRACE_BLOCK_TOKENS // block_size
        ids = [block * parts + part for block in self.hash_ids for part in range(parts)]
        return ids[: self.input_length // block_size]


def read_trace(path: Path, limit: int | None = None) -> list[TraceRequest]:
    """Every request, in order of time. Raises ConfigError, with the line, for a wrong one."""
    return sorted(_lines(path, limit), key=lambda request: request.timestamp)


def _lines(path: Path, limit: int | None) -> Iterator[TraceRequest]:
    decoder = msgspec.json.Decoder(TraceRequest)
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if limit is not None and number > limit:
                return
            try:
                yield decoder.decode(line)
            except msgspec.DecodeError as error:
                raise ConfigError([f"line {number}: {error}"], str(path)) from error


def ideal_hit_ratio(trace: Sequence[TraceRequest]) -> float:
    """The part of all prompt tokens that one infinite cache, seeing every request, would save."""
    seen: set[int] = set()
    saved = total = 0
    for request in trace:
        total += request.input_length
        for block in request.full_blocks:
            if block not in seen:
                break
            saved += TRACE_BLOCK_TOKENS
        seen.update(request.full_blocks)
    return saved / total if total else 0.0
