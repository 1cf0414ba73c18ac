"""Request traces in the format of Mooncake (FAST'25), which front doors record, too.

One JSON object a line. In recorded traces `block_tokens` says how long blocks are.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
from attrs import evolve, field, frozen

from commutator.errors import ConfigError

TRACE_BLOCK_TOKENS = 512
_UNIX_MS = 1e11
"""Times from here on, of 1973, count from 1970: those of recorded traffic."""
_MAX_PROBLEMS = 20
"""Reported for one trace; in another format every line is wrong."""


@frozen
class TraceRequest:
    """One request. Equal first ``hash_ids`` mean an equal prefix."""

    timestamp: float
    """Milliseconds since the trace began."""
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]
    line: int = field(default=0, eq=False)
    """Line in the file; 0 if it is from no file."""
    block_tokens: int = TRACE_BLOCK_TOKENS
    """Prompt tokens of each of ``hash_ids``; fewer of the last one."""

    @property
    def full_blocks(self) -> Sequence[int]:
        """Ids of the blocks that the prompt fills; the last id of a line may be a partial block."""
        return self.blocks(self.block_tokens)

    def sped_up(self, factor: float) -> TraceRequest:
        """The same request, ``factor`` times as early."""
        return evolve(self, timestamp=self.timestamp / factor)

    def blocks(self, block_size: int) -> Sequence[int]:
        """Ids of the full blocks of another size, equal for equal prefixes.

        The size is a part of ``block_tokens``, or a multiple.
        """
        if block_size > self.block_tokens:
            step = block_size // self.block_tokens  # an id tells the whole prefix that it ends
            return self.hash_ids[step - 1 :: step][: self.input_length // block_size]
        parts = self.block_tokens // block_size
        ids = [block * parts + part for block in self.hash_ids for part in range(parts)]
        return ids[: self.input_length // block_size]


class _Row(msgspec.Struct):
    """The keys that a line must have, and ``block_tokens``; others are ignored."""

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]
    block_tokens: Annotated[int, msgspec.Meta(ge=1)] = TRACE_BLOCK_TOKENS


def read_trace(path: Path) -> list[TraceRequest]:
    """Every request, ordered by time; Unix times count from the first.

    Raises ConfigError with each wrong line.
    """
    return checked(path, _lines(path))


def checked(path: Path, lines: Iterable[tuple[int, TraceRequest | str]]) -> list[TraceRequest]:
    """The same of lines, each with its number and its request, or what is wrong with it."""
    trace: list[TraceRequest] = []
    problems: list[str] = []
    for number, found in lines:
        if len(problems) == _MAX_PROBLEMS:
            break
        if isinstance(found, str):
            problems.append(f"line {number}: {found}")
        elif problem := _problem(found):
            problems.append(f"line {number}: {problem}")
        else:
            trace.append(found)
    if not problems and not trace:
        problems.append("no requests; a trace has one JSON object a line")
    if problems:
        raise ConfigError(problems, str(path))
    trace.sort(key=lambda request: request.timestamp)
    first_ms = trace[0].timestamp
    if first_ms >= _UNIX_MS:
        trace = [evolve(one, timestamp=one.timestamp - first_ms) for one in trace]
    return trace


def _lines(path: Path) -> Iterator[tuple[int, TraceRequest | str]]:
    """The request of each line, or what is wrong with it. Blank lines may be at the end only."""
    decoder = msgspec.json.Decoder(_Row)
    blank: list[int] = []
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                blank.append(number)
                continue
            yield from ((skipped, "blank, between requests; remove it") for skipped in blank)
            blank.clear()
            try:
                row = decoder.decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                yield number, f"{error}; expected one JSON object a line, as Mooncake publishes"
            else:
                yield number, TraceRequest(**msgspec.structs.asdict(row), line=number)


def _problem(request: TraceRequest) -> str | None:
    """What is wrong with the request, and what to do."""
    tokens, ids = request.input_length, len(request.hash_ids)
    needed = -(-tokens // request.block_tokens)
    # The block that the answer begins may be named.
    with_answer = tokens // request.block_tokens + 1
    if request.timestamp < 0:
        return f"timestamp {request.timestamp} is negative; count milliseconds from the start"
    if tokens < 1:
        return f"input_length {tokens}; a prompt has at least 1 token, so leave the line out"
    if request.output_length < 0:
        return f"output_length {request.output_length} is negative; give the answer's tokens"
    if ids not in (needed, with_answer):
        return (
            f"input_length {tokens} needs {needed} hash_ids and there are {ids}; give one for each "
            f"{request.block_tokens} tokens and for what is left of them"
        )
    return None


def uncached_tokens(trace: Sequence[TraceRequest]) -> list[int]:
    """Prompt tokens of each request that an infinite cache shared by all workers would not hold."""
    seen: set[int] = set()
    uncached = []
    for one in trace:
        blocks = one.full_blocks
        cached = next((i for i, block in enumerate(blocks) if block not in seen), len(blocks))
        seen.update(blocks)
        uncached.append(one.input_length - cached * one.block_tokens)
    return uncached


def ideal_hit_ratio(trace: Sequence[TraceRequest]) -> float:
    """The part of all prompt tokens that such a cache would hold."""
    total = sum(one.input_length for one in trace)
    return (total - sum(uncached_tokens(trace))) / total if total else 0.0


_PROMPT_TOKENS = (50, 450)
_ANSWER_TOKENS = (50, 350)


def with_chats(trace: Sequence[TraceRequest], per_request: float, seed: int) -> list[TraceRequest]:
    """``trace`` with ``per_request`` chats added for each of its requests.

    Prompts of 50 to 450 tokens, answers of 50 to 350, at times of the trace, all drawn uniformly.
    No chat shares a block with another request.
    """
    if not trace:
        return []
    rng = random.Random(seed)  # noqa: S311 - reproducible chance is the point
    first_ms, last_ms = trace[0].timestamp, trace[-1].timestamp
    chats = [
        TraceRequest(
            timestamp=rng.uniform(first_ms, last_ms),
            input_length=rng.randint(*_PROMPT_TOKENS),
            output_length=rng.randint(*_ANSWER_TOKENS),
            hash_ids=(-1 - number,),  # those of traces are not negative
        )
        for number in range(round(per_request * len(trace)))
    ]
    return sorted([*trace, *chats], key=lambda request: request.timestamp)


def at_rate(trace: Sequence[TraceRequest], per_s: float) -> list[TraceRequest]:
    """The same requests with their times scaled, so that ``per_s`` arrive per second on average."""
    first_ms, last_ms = trace[0].timestamp, trace[-1].timestamp
    factor = len(trace) / per_s * 1000 / max(1e-3, last_ms - first_ms)
    return [evolve(one, timestamp=(one.timestamp - first_ms) * factor) for one in trace]
