"""Causes of a low hit rate, planted into traces that the observer writes."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commutator.contract.request import (
    FinishReason,
    GenerateRequest,
    RequestOutcome,
    RequestSummary,
    SamplingParams,
)
from commutator.errors import ConfigError
from commutator_doctor.hit_rate import (
    HIT_RATE,
    HitRate,
    Recorded,
    hit_rate,
    hit_rate_lines,
    read_trace,
)
from commutator_records.recording import RecordingConfig, TraceRecorder

BLOCK = 16
Served = tuple[Sequence[int], str | None, str, int]
"""Tokens, salt, worker and tokens that it had cached."""


def text(seed: int, tokens: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(50_000) for _ in range(tokens)]


SYSTEM = text(0, 1600)


def recorded(tmp_path: Path, served: Sequence[Served]) -> HitRate:
    """The hit rate of a trace that the observer has written."""
    path = tmp_path / "trace.jsonl"

    async def record() -> None:
        config = RecordingConfig(kind="recording", prompts=True, path=str(path))
        observer = TraceRecorder(config)
        await observer.start()
        for tokens, salt, worker, cached in served:
            request = GenerateRequest(
                request_id="r",
                token_ids=tuple(tokens),
                sampling=SamplingParams(max_tokens=9),
                cache_salt=salt,
            )
            summary = RequestSummary(
                request_id="r",
                model="m",
                prompt_tokens=len(tokens),
                max_tokens=9,
                user="u",
                principal="p",
            )
            observer.prompt_received(summary, request)
            outcome = RequestOutcome(
                worker_id=worker,
                finish_reason=FinishReason.STOP,
                generated_tokens=1,
                cached_tokens=cached,
                duration_s=0.1,
            )
            observer.request_finished(summary, outcome)
        await observer.stop()

    asyncio.run(record())
    return hit_rate(read_trace(sorted(tmp_path.glob("trace*.jsonl"))))


def codes(rate: HitRate) -> set[str]:
    return {one.code for one in HIT_RATE.findings(rate)}


def questions(count: int = 40) -> list[list[int]]:
    return [text(1000 + number, 64) for number in range(count)]


def test_a_shared_beginning_that_is_reused_is_no_fault(tmp_path: Path) -> None:
    served: list[Served] = [
        (SYSTEM + one, None, "w", 1600 if number else 0) for number, one in enumerate(questions())
    ]
    rate = recorded(tmp_path, served)
    assert codes(rate) == set()
    assert rate.reused == 39 * 1600
    assert rate.new_text == 1600 + 40 * 64


def test_a_changing_beginning_is_named(tmp_path: Path) -> None:
    served: list[Served] = [
        ([number, *text(number, 19), *SYSTEM, *one], None, "w", 0)
        for number, one in enumerate(questions(), 1)
    ]
    rate = recorded(tmp_path, served)
    assert codes(rate) == {"beginnings-change"}
    (finding,) = HIT_RATE.findings(rate)
    assert "39 of 40 requests" in finding.text
    assert rate.changed_beginnings > 0.9 * rate.prompt_tokens


def test_different_salts_are_named(tmp_path: Path) -> None:
    served: list[Served] = [
        (SYSTEM + one, f"tenant-{number}", "w", 0) for number, one in enumerate(questions())
    ]
    rate = recorded(tmp_path, served)
    assert codes(rate) == {"salts-differ"}
    assert rate.requests_salted == 39


def test_evictions_are_named(tmp_path: Path) -> None:
    served: list[Served] = [(SYSTEM + one, None, "w", 0) for one in questions()]
    rate = recorded(tmp_path, served)
    assert codes(rate) == {"reuse-evicted"}
    assert rate.evicted == 39 * 1600


def test_balance_is_named(tmp_path: Path) -> None:
    seen: set[str] = set()
    served: list[Served] = []
    for number, one in enumerate(questions()):
        worker = f"w-{number % 20}"
        served.append((SYSTEM + one, None, worker, 1600 if worker in seen else 0))
        seen.add(worker)
    rate = recorded(tmp_path, served)
    assert codes(rate) == {"reuse-elsewhere"}
    assert rate.elsewhere == 19 * 1600


def test_ends_of_blocks_are_named(tmp_path: Path) -> None:
    served: list[Served] = [(text(7, 15), None, "w", 0)] * 40
    rate = recorded(tmp_path, served)
    assert codes(rate) == {"blocks-too-long"}
    assert rate.short_prompts == 40


def test_reuse_of_a_part_is_noted(tmp_path: Path) -> None:
    served: list[Served] = [
        (SYSTEM + one, None, "w", 1024 if number else 0) for number, one in enumerate(questions())
    ]
    assert codes(recorded(tmp_path, served)) == {"reuse-evicted", "reuse-in-parts"}


def test_new_text_is_no_fault(tmp_path: Path) -> None:
    served: list[Served] = [(text(n, 320), None, "w", 0) for n in range(40)]
    (finding,) = HIT_RATE.findings(recorded(tmp_path, served))
    assert (finding.code, finding.severity) == ("text-is-new", "note")


def test_every_check_is_shown_by_one_of_these_tests() -> None:
    named = Path(__file__).read_text()
    assert all(f'"{one.code}"' in named for one in HIT_RATE.checks)


def test_an_older_trace_tells_less(tmp_path: Path) -> None:
    path = tmp_path / "old.jsonl"
    line = {"timestamp": 1.0, "input_length": 40, "output_length": 1, "hash_ids": [1, 2, 3]}
    path.write_text(f"{json.dumps({**line, 'block_tokens': 16})}\n" * 30)
    rate = hit_rate(read_trace([path]))
    assert rate.reused is rate.evicted is None
    assert rate.repeated == 29 * 32
    assert any("not in this trace" in line for line in hit_rate_lines(rate))


def test_another_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"a": 1}\n')
    with pytest.raises(ConfigError, match="not a trace"):
        read_trace([path])


@st.composite
def traces(draw: Any) -> list[Recorded]:
    """Prompts that share beginnings, and caches that say anything that they could."""
    found = []
    for _ in range(draw(st.integers(0, 12))):
        blocks = tuple(draw(st.lists(st.integers(0, 3), max_size=5)))
        chained = tuple(hash(blocks[: n + 1]) for n in range(len(blocks)))
        tokens = len(blocks) * BLOCK + draw(st.integers(0, BLOCK - 1))
        found.append(
            Recorded(
                tokens=tokens,
                blocks=chained,
                block_tokens=BLOCK,
                cached_tokens=draw(st.integers(0, tokens)),
                worker=draw(st.sampled_from("ab")),
                salt=draw(st.sampled_from((None, 1))),
                sketch=frozenset(draw(st.lists(st.integers(0, 4), max_size=4))),
            )
        )
    return found


@given(traces())
def test_every_token_is_counted_once(trace: list[Recorded]) -> None:
    rate = hit_rate(trace)
    parts = (
        *(rate.reused, rate.evicted, rate.elsewhere, rate.salts),
        *(rate.changed_beginnings, rate.block_ends, rate.new_text),
    )
    assert all(part is not None and part >= 0 for part in parts)
    assert sum(part or 0 for part in parts) == rate.prompt_tokens
