"""Traces as tables (CSV): Azure's, BurstGPT's, and request rates by time. Pure but for reading.

Their requests share no prefixes, because such tables tell none: each has block ids of its own.
"""

from __future__ import annotations

import csv
import math
import random
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path

from attrs import evolve, frozen

from commutator.errors import ConfigError
from commutator_replay.trace import TRACE_BLOCK_TOKENS, TraceRequest, checked, read_trace

_AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_BURSTGPT = ("Timestamp", "Request tokens", "Response tokens")
_RATES = (
    *("t_s", "requests_per_s", "arrival_cv"),
    *("input_p50", "input_p90", "input_p99"),
    *("output_p50", "output_p90", "output_p99"),
)
_QUANTILES = (0.5, 0.9, 0.99)
_FEWEST_ROWS = 2


def _is_table(path: Path) -> bool:
    """Whether the name says that it is a table."""
    return path.suffix.lower() == ".csv"


def is_rates(path: Path) -> bool:
    """Whether it is a table of rates."""
    if not _is_table(path):
        return False
    with path.open(newline="", encoding="utf-8") as file:
        return set(next(csv.reader(file), ())) >= set(_RATES)


@frozen(kw_only=True)
class Part:
    """What is used of a trace."""

    thin: float = 1.0
    """One in this many requests is kept."""
    begin_s: float = 0.0
    end_s: float | None = None
    copies: int = 1
    """Copies that run at once."""
    requests: int | None = None
    """The first of those that are left to arrive; None: all."""


def load_trace(path: Path, part: Part | None = None, seed: int = 0) -> list[TraceRequest]:
    """A part of a trace as Mooncake publishes them, of a table of requests, or drawn from rates.

    Raises ConfigError with each wrong line.
    """
    wanted = Part() if part is None else part
    if is_rates(path):
        try:
            rows = read_rates(path)
        except ValueError as error:
            raise ConfigError([str(error)], str(path)) from error
        end_s = math.inf if wanted.end_s is None else wanted.end_s
        trace = from_rates(rows, thin=wanted.thin, begin_s=wanted.begin_s, end_s=end_s, seed=seed)
    else:
        trace = checked(path, _read_table(path)) if _is_table(path) else read_trace(path)
        trace = _between(trace, wanted)
        if wanted.thin > 1:
            trace = thinned(trace, wanted.thin, seed)
    trace = superposed(trace, wanted.copies, seed)[: wanted.requests]
    if not trace:
        raise ConfigError(["no request is left: use more of the trace"], str(path))
    return trace


def _between(trace: Sequence[TraceRequest], part: Part) -> list[TraceRequest]:
    """The requests of a part of the time, which begins anew there."""
    begin_ms = part.begin_s * 1000
    end_ms = math.inf if part.end_s is None else part.end_s * 1000
    return [
        evolve(one, timestamp=one.timestamp - begin_ms)
        for one in trace
        if begin_ms <= one.timestamp < end_ms
    ]


def _read_table(path: Path) -> Iterator[tuple[int, TraceRequest | str]]:
    """The line and the request of each row, or what is wrong with it.

    Columns of Azure (TIMESTAMP, ContextTokens, GeneratedTokens) and of BurstGPT (Timestamp in
    seconds, Request tokens, Response tokens) are known; others are ignored. Times count from the
    first row.
    """
    with path.open(newline="", encoding="utf-8") as file:
        rows = csv.DictReader(file)
        columns = tuple(rows.fieldnames or ())
        time_s: Callable[[str], float]
        if set(columns) >= set(_AZURE):
            time_s, names = _azure_s, _AZURE
        elif set(columns) >= set(_BURSTGPT):
            time_s, names = float, _BURSTGPT
        else:
            known = "; ".join(", ".join(one) for one in (_AZURE, _BURSTGPT, _RATES))
            yield 1, f"columns {', '.join(columns)}; expected those of one of: {known}"
            return
        when, prompt, answer = names
        begun_s: float | None = None
        blocks = 0
        for line, row in enumerate(rows, 2):
            try:
                now_s = time_s(row[when])
                input_length, output_length = int(row[prompt]), int(row[answer])
            except (TypeError, ValueError) as error:
                yield line, f"{error}; expected a time and two numbers of tokens"
                continue
            begun_s = now_s if begun_s is None else begun_s
            ids = tuple(range(blocks, blocks + -(-input_length // TRACE_BLOCK_TOKENS)))
            blocks += len(ids)
            time_ms = (now_s - begun_s) * 1000
            yield line, TraceRequest(time_ms, input_length, output_length, ids, line)


def _azure_s(text: str) -> float:
    """Seconds of a time with up to 7 digits after the point, of which Python reads 6."""
    head, point, digits = text.partition(".")
    zone = ""
    for sign in "+-":
        if sign in digits:
            digits, _, offset = digits.partition(sign)
            zone = sign + offset
    text = f"{head}{point}{digits[:6]}{zone}"
    when = datetime.fromisoformat(text)
    return (when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp()


# ----------------------------------------------------------------------------------- rates


@frozen
class RateRow:
    """Requests from ``time_s`` on until the next row."""

    time_s: float
    requests_per_s: float
    cv: float
    """Coefficient of variation of the gaps between them."""
    input_tokens: Sequence[float]
    """The quantiles 0.5, 0.9 and 0.99 of prompts."""
    output_tokens: Sequence[float]
    """The same of answers."""


def read_rates(path: Path) -> list[RateRow]:
    """The rows of a table of rates. Raises ValueError that says what is wrong with it."""
    with path.open(newline="", encoding="utf-8") as file:
        rows = csv.DictReader(file)
        missing = set(_RATES) - set(rows.fieldnames or ())
        if missing:
            raise ValueError(f"columns {', '.join(sorted(missing))} are missing")
        found: list[RateRow] = []
        for line, row in enumerate(rows, 2):
            try:
                values = [float(row[name]) for name in _RATES]
            except (TypeError, ValueError) as error:
                raise ValueError(f"line {line}: {error}; expected numbers") from error
            if min(values) < 0 or (found and values[0] <= found[-1].time_s):
                raise ValueError(f"line {line}: expected a later time, and no negative number")
            found.append(RateRow(values[0], values[1], values[2], values[3:6], values[6:9]))
    if len(found) < _FEWEST_ROWS:
        raise ValueError("expected two rows or more")
    return found


def from_rates(
    rows: Sequence[RateRow], *, thin: float, begin_s: float, end_s: float, seed: int
) -> list[TraceRequest]:
    """Requests drawn from rates divided by ``thin``, between two times of the table.

    Gaps are drawn from a Gamma distribution of the row's variation, lengths from a distribution
    with the row's quantiles; means are not used.
    """
    rng = random.Random(seed)  # noqa: S311 - reproducible chance is the point
    requests: list[TraceRequest] = []
    width_s = rows[-1].time_s - rows[-2].time_s
    ends = [*(row.time_s for row in rows[1:]), rows[-1].time_s + width_s]
    blocks = 0
    debt = 0.0
    for row, row_ends_s in zip(rows, ends, strict=True):
        time_s, until_s = max(begin_s, row.time_s), min(end_s, row_ends_s)
        rate = row.requests_per_s / thin
        if time_s >= until_s or rate <= 0:
            continue
        # Gaps in units of the mean: what is left of one at the end of a row goes on in the next.
        time_s += debt / rate
        while time_s < until_s:
            input_length = _length(rng, row.input_tokens)
            ids = tuple(range(blocks, blocks + -(-input_length // TRACE_BLOCK_TOKENS)))
            blocks += len(ids)
            requests.append(
                TraceRequest(
                    (time_s - begin_s) * 1000, input_length, _length(rng, row.output_tokens), ids
                )
            )
            time_s += _gap(rng, row.cv) / rate
        debt = (time_s - until_s) * rate
    return requests


def _gap(rng: random.Random, cv: float) -> float:
    if cv <= 0:
        return 1.0
    shape = 1 / cv**2
    return rng.gammavariate(shape, 1 / shape)


def _length(rng: random.Random, values: Sequence[float]) -> int:
    """A length by its quantiles, in between by the logarithm; at least 1."""
    draw = rng.random()
    points = [(0.0, max(1.0, values[0] / 8)), *zip(_QUANTILES, values, strict=True)]
    points.append((1.0, values[-1] * 1.5))
    for (low, low_tokens), (high, high_tokens) in pairwise(points):
        if draw <= high:
            part = (draw - low) / (high - low)
            low_log, high_log = math.log(max(1.0, low_tokens)), math.log(max(1.0, high_tokens))
            return max(1, round(math.exp(low_log + part * (high_log - low_log))))
    return max(1, round(points[-1][1]))


# ------------------------------------------------------------------------- more, or fewer


def thinned(trace: Sequence[TraceRequest], factor: float, seed: int) -> list[TraceRequest]:
    """Each request is kept with the chance ``1 / factor``."""
    rng = random.Random(seed)  # noqa: S311 - reproducible chance is the point
    return [one for one in trace if rng.random() * factor < 1]


def superposed(trace: Sequence[TraceRequest], copies: int, seed: int) -> list[TraceRequest]:
    """Copies of the trace, each shifted in time, round its end, with block ids of its own."""
    if not trace or copies == 1:
        return list(trace)
    rng = random.Random(seed)  # noqa: S311 - reproducible chance is the point
    first_ms = trace[0].timestamp
    span_ms = trace[-1].timestamp - first_ms + 1
    most = max((max(one.hash_ids, default=0) for one in trace), default=0) + 1
    shifts = [0.0, *(rng.uniform(0, span_ms) for _ in range(copies - 1))]
    made = [
        evolve(
            one,
            timestamp=first_ms + (one.timestamp - first_ms + shift) % span_ms,
            hash_ids=tuple(block + copy * most for block in one.hash_ids),
        )
        for copy, shift in enumerate(shifts)
        for one in trace
    ]
    return sorted(made, key=lambda one: one.timestamp)
