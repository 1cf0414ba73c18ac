"""Where the prompt tokens of a recorded trace went: reused, new, or lost, and to what."""

from __future__ import annotations

import json
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import frozen

from commutator.errors import ConfigError
from commutator_doctor.findings import Checks, Found, Severity

_PART = 0.1
"""Of all prompt tokens; smaller losses are not worth a finding."""
_ALIKE = 0.5
"""Of two sketches, for prompts that are mostly the same text."""
_LEAST_REQUESTS = 20
_REMEMBERED = 20_000
"""Prompts whose sketches are compared with later ones."""
_GOOD = 0.5


@frozen(kw_only=True)
class Recorded:
    """A line of a trace."""

    tokens: int
    blocks: tuple[int, ...]
    block_tokens: int
    time_ms: float = 0.0
    cached_tokens: int | None = None
    worker: str | None = None
    salt: int | None = None
    sketch: frozenset[int] = frozenset()


@frozen(kw_only=True)
class HitRate:
    """Prompt tokens by what became of them; they add up to ``prompt_tokens``."""

    requests: int
    prompt_tokens: int
    reused: int | None
    """None where the trace does not say it; then no loss after the first sight is known either."""
    block_ends: int
    """In the last, partial block of each prompt."""
    new_text: int
    """Of text that no earlier prompt of the trace began with or contained, as far as known."""
    changed_beginnings: int
    """Of prompts that share most of their text with an earlier one, and begin otherwise."""
    salts: int
    """Of prompts that begin as an earlier one with another `cache_salt`."""
    elsewhere: int | None
    """Another worker had it."""
    evicted: int | None
    """The worker had it once, and not any more."""
    requests_changed: int = 0
    requests_salted: int = 0
    short_prompts: int = 0
    """Shorter than a block."""
    block_tokens: int = 16
    partial_reuses: int = 0
    """Requests that reused some, and less than their worker had once."""
    sketched: bool = False

    @property
    def repeated(self) -> int:
        """What an endless cache shared by all workers would have reused."""
        lost = self.block_ends + self.new_text + self.changed_beginnings + self.salts
        return self.prompt_tokens - lost

    def part(self, tokens: int | None) -> float:
        """``tokens`` of all."""
        return (tokens or 0) / self.prompt_tokens if self.prompt_tokens else 0.0


def read_trace(paths: Sequence[Path]) -> list[Recorded]:
    """The requests of one or several front doors' traces, in the order of their times.

    Raises ConfigError.
    """
    found: list[Recorded] = []
    for path in paths:
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
            found += [_recorded(json.loads(line)) for line in lines if line.strip()]
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError([str(error)], str(path)) from error
        except (ValueError, KeyError, TypeError) as error:
            problem = f"not a trace of the observer `recording`: {type(error).__name__}: {error}"
            raise ConfigError([problem], str(path)) from error
    return sorted(found, key=lambda one: one.time_ms)


def _recorded(line: Mapping[str, Any]) -> Recorded:
    return Recorded(
        tokens=int(line["input_length"]),
        blocks=tuple(line["hash_ids"]),
        block_tokens=int(line.get("block_tokens", 512)),
        time_ms=float(line["timestamp"]),
        cached_tokens=line.get("cached_length"),
        worker=line.get("worker"),
        salt=line.get("salt_id"),
        sketch=frozenset(line.get("sketch", ())),
    )


class _Sketches:
    """Finds an earlier prompt of mostly the same text."""

    def __init__(self) -> None:
        self._by_mark: dict[int, set[int]] = {}
        self._prompts: OrderedDict[int, Recorded] = OrderedDict()
        self._next = 0

    def like(self, one: Recorded) -> Recorded | None:
        shared = Counter(n for mark in one.sketch for n in self._by_mark.get(mark, ()))
        for number, count in shared.most_common(1):
            if count >= _ALIKE * len(one.sketch):
                return self._prompts[number]
        return None

    def add(self, one: Recorded) -> None:
        if not one.sketch:
            return
        self._prompts[self._next] = one
        for mark in one.sketch:
            self._by_mark.setdefault(mark, set()).add(self._next)
        self._next += 1
        if len(self._prompts) > _REMEMBERED:
            number, old = self._prompts.popitem(last=False)
            for mark in old.sketch:
                self._by_mark[mark].discard(number)


def hit_rate(trace: Iterable[Recorded]) -> HitRate:
    """What became of the prompt tokens of ``trace``, which is in the order of its times."""
    seen: set[int] = set()
    by_worker: dict[str, set[int]] = {}
    sketches = _Sketches()
    sums: Counter[str] = Counter()
    block_tokens, knows, sketched = 16, True, False
    for one in trace:
        block_tokens = one.block_tokens
        size = one.block_tokens
        full = one.blocks[: one.tokens // size]
        sums["requests"] += 1
        sums["tokens"] += one.tokens
        sums["short"] += not full
        ends = one.tokens - len(full) * size
        before = _first_unseen(full, seen)
        unseen = (len(full) - before) * size
        cached = one.cached_tokens
        # An engine with smaller blocks reuses some of the last block, too.
        over = max(0, (cached or 0) - before * size)
        from_ends = min(over, ends)
        sums["ends"] += ends - from_ends
        unseen = max(0, unseen - (over - from_ends))
        like = sketches.like(one) if unseen and one.sketch else None
        if like is not None and like.salt != one.salt:
            sums["salts"] += unseen
            sums["salted"] += 1
        elif like is not None and before * 2 < len(full):
            sums["changed"] += unseen
            sums["changed_requests"] += 1
        else:
            sums["new"] += unseen
        sketched = sketched or bool(one.sketch)
        if cached is None or one.worker is None:
            knows = False
        else:
            own = by_worker.setdefault(one.worker, set())
            here = min(before, _first_unseen(full, own)) * size
            used = min(cached, before * size)
            sums["reused"] += cached
            sums["elsewhere"] += max(0, before * size - max(here, used))
            lost = max(0, here - used)
            sums["evicted"] += lost
            sums["partial"] += bool(lost and used)
            own.update(full)
        seen.update(full)
        sketches.add(one)
    return HitRate(
        requests=sums["requests"],
        prompt_tokens=sums["tokens"],
        reused=sums["reused"] if knows else None,
        block_ends=sums["ends"],
        new_text=sums["new"],
        changed_beginnings=sums["changed"],
        salts=sums["salts"],
        elsewhere=sums["elsewhere"] if knows else None,
        evicted=sums["evicted"] if knows else None,
        requests_changed=sums["changed_requests"],
        requests_salted=sums["salted"],
        short_prompts=sums["short"],
        block_tokens=block_tokens,
        partial_reuses=sums["partial"],
        sketched=sketched,
    )


def _first_unseen(blocks: Sequence[int], seen: set[int]) -> int:
    return next((i for i, block in enumerate(blocks) if block not in seen), len(blocks))


def hit_rate_lines(rate: HitRate) -> Iterator[str]:
    """A table of where the tokens went."""

    def line(title: str, tokens: int | None) -> str:
        if tokens is None:
            return f"{title:<44} not in this trace"
        return f"{title:<44} {tokens:>14,}  {rate.part(tokens):6.1%}"

    yield f"{rate.requests:,} requests, blocks of {rate.block_tokens} tokens"
    yield line("prompt tokens", rate.prompt_tokens)
    yield line("  reused", rate.reused)
    yield line("  lost: evicted, or its worker restarted", rate.evicted)
    yield line("  lost: another worker had it", rate.elsewhere)
    yield line("  lost: same text, other cache_salt", rate.salts)
    yield line("  lost: same text, other beginning", rate.changed_beginnings)
    yield line("  in the last, partial block", rate.block_ends)
    yield line("  new text", rate.new_text)


HIT_RATE: Checks[HitRate] = Checks("A recorded trace")
_WARNING, _NOTE = Severity.WARNING, Severity.NOTE


def _enough(rate: HitRate, tokens: int | None) -> bool:
    return rate.requests >= _LEAST_REQUESTS and rate.part(tokens) >= _PART


@HIT_RATE.add(
    "beginnings-change",
    "hit rate",
    _WARNING,
    means="Prompts share most of their text with earlier ones, and differ near their beginning: a "
    "date, an id, tools or documents in another order. Only equal beginnings are reused.",
    remedy="Move what changes to the end of the prompt; sort tools, documents and JSON keys.",
)
def _beginnings_change(rate: HitRate) -> Iterator[Found]:
    if _enough(rate, rate.changed_beginnings):
        text = (
            f"{rate.requests_changed:,} of {rate.requests:,} requests repeat a text behind another "
            f"beginning: {rate.part(rate.changed_beginnings):.1%} of all prompt tokens"
        )
        yield Found(text, {"tokens": rate.changed_beginnings, "requests": rate.requests_changed})


@HIT_RATE.add(
    "salts-differ",
    "hit rate",
    _WARNING,
    means="Prompts are alike and have different `cache_salt`s, or are of principals that share no "
    "KV.",
    remedy="Use one salt for those who may share; `shares_cache_with` of a principal lets it share "
    "another one's KV.",
)
def _salts_differ(rate: HitRate) -> Iterator[Found]:
    if _enough(rate, rate.salts):
        text = (
            f"{rate.requests_salted:,} of {rate.requests:,} requests repeat a text under another "
            f"salt: {rate.part(rate.salts):.1%} of all prompt tokens"
        )
        yield Found(text, {"tokens": rate.salts, "requests": rate.requests_salted})


@HIT_RATE.add(
    "reuse-evicted",
    "hit rate",
    _WARNING,
    means="The worker had the blocks once and has forgotten them: its KV memory is too small for "
    "the traffic, or it restarted.",
    remedy="Add storage tiers (`commutator size` says how large), more KV memory, or more workers.",
)
def _reuse_evicted(rate: HitRate) -> Iterator[Found]:
    if _enough(rate, rate.evicted):
        text = f"{rate.part(rate.evicted):.1%} of all prompt tokens had been at the same worker"
        yield Found(text, {"tokens": rate.evicted or 0})


@HIT_RATE.add(
    "reuse-elsewhere",
    "hit rate",
    _WARNING,
    means="Another worker had the blocks: the policy does not look for them, or chose balance.",
    remedy="Use `router: {kind: kv}`; with it, raise `overlap_score_weight`, or let workers read "
    "each other's KV by a tier of kind `peer` or `s3`.",
)
def _reuse_elsewhere(rate: HitRate) -> Iterator[Found]:
    if _enough(rate, rate.elsewhere):
        text = f"{rate.part(rate.elsewhere):.1%} of all prompt tokens were at another worker"
        yield Found(text, {"tokens": rate.elsewhere or 0})


@HIT_RATE.add(
    "blocks-too-long",
    "hit rate",
    _WARNING,
    means="Only full blocks are reused, and much of the prompts is in their last, partial block.",
    remedy="Use smaller blocks: `block_size` of the engine entry, `--block-size` of vLLM, "
    "`--page-size` of SGLang.",
)
def _blocks_too_long(rate: HitRate) -> Iterator[Found]:
    if _enough(rate, rate.block_ends):
        text = (
            f"{rate.part(rate.block_ends):.1%} of all prompt tokens are behind the last full block "
            f"of {rate.block_tokens}; {rate.short_prompts:,} prompts fill none"
        )
        yield Found(text, {"tokens": rate.block_ends, "short_prompts": rate.short_prompts})


@HIT_RATE.add(
    "reuse-in-parts",
    "hit rate",
    _NOTE,
    means="Requests reuse some of what their worker had, and not all: the end of a chain was "
    "evicted, or the model keeps states or windows, from which prompts resume at few places.",
    remedy="`commutator models SOURCE` says what the model keeps; `commutator kv why PROMPT` which "
    "block is missing, and why.",
)
def _reuse_in_parts(rate: HitRate) -> Iterator[Found]:
    if rate.requests >= _LEAST_REQUESTS and rate.partial_reuses > _PART * rate.requests:
        text = f"{rate.partial_reuses:,} of {rate.requests:,} requests"
        yield Found(text, {"requests": rate.partial_reuses})


@HIT_RATE.add(
    "text-is-new",
    "hit rate",
    _NOTE,
    means="Most of the text is new: no cache of any size could reuse it.",
    remedy="Nothing is wrong. Long shared instructions at the beginning are what caches reuse.",
)
def _text_is_new(rate: HitRate) -> Iterator[Found]:
    if rate.requests >= _LEAST_REQUESTS and rate.part(rate.new_text) > _GOOD:
        beside = "" if rate.sketched else " (this trace cannot tell changed beginnings from it)"
        yield Found(f"{rate.part(rate.new_text):.1%} of all prompt tokens{beside}")
