"""The trace that a front door records: what stands in it, what does not, and who may read it."""

from __future__ import annotations

import asyncio
import json
import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from commutator import AdapterIdentity
from commutator.contract.observer import Observer
from commutator.contract.request import (
    FinishReason,
    GenerateRequest,
    RequestOutcome,
    RequestSummary,
    SamplingParams,
)
from commutator.errors import RoutingError
from commutator_records.recording import RecordingConfig, TraceRecorder, block_ids
from commutator_replay.trace import read_trace
from commutator_testing.observers import ObserverContract

BEGAN_S = 1_800_000_000.0
KEY = b"k" * 32


class TestContract(ObserverContract):
    @pytest.fixture
    def observer(self, tmp_path: Path) -> Observer:
        path = str(tmp_path / "trace.jsonl")
        return TraceRecorder(RecordingConfig(kind="recording", prompts=True, path=path))


def request(*token_ids: int, **more: Any) -> GenerateRequest:
    return GenerateRequest(
        request_id="r", token_ids=token_ids, sampling=SamplingParams(max_tokens=9), **more
    )


def summary(one: GenerateRequest) -> RequestSummary:
    return RequestSummary(
        request_id="secret-id",
        model="m",
        prompt_tokens=len(one.token_ids),
        max_tokens=9,
        user="secret-user",
        principal="secret-principal",
    )


def outcome(tokens: int) -> RequestOutcome:
    return RequestOutcome(
        worker_id="w",
        finish_reason=FinishReason.STOP,
        generated_tokens=tokens,
        cached_tokens=0,
        duration_s=1.0,
    )


class Clock:
    now_s = BEGAN_S

    def __call__(self) -> float:
        return self.now_s


@asynccontextmanager
async def recording(path: Path, clock: Clock | None = None, **options: Any) -> AsyncIterator[Any]:
    config = RecordingConfig(
        kind="recording", prompts=True, path=str(path), **{"block_tokens": 4, **options}
    )
    recorder = TraceRecorder(config, clock or Clock())
    await recorder.start()
    try:
        yield recorder
    finally:
        await recorder.stop()


async def test_a_replay_reads_times_of_arrival_lengths_and_shared_prefixes(tmp_path: Path) -> None:
    clock = Clock()
    first, second = request(*range(11)), request(*range(8), 77, 78)
    async with recording(tmp_path / "trace.jsonl", clock) as recorder:
        one, two = summary(first), summary(second)
        recorder.prompt_received(one, first)
        clock.now_s += 1.25
        recorder.prompt_received(two, second)
        clock.now_s += 5
        recorder.request_finished(two, outcome(3))  # the later one ends first
        recorder.request_finished(one, outcome(7))
    trace = read_trace(tmp_path / "trace.0.jsonl")
    assert [(r.timestamp, r.input_length, r.output_length) for r in trace] == [
        (0, 11, 7),
        (1250, 10, 3),
    ]
    assert [len(r.full_blocks) for r in trace] == [2, 2]
    assert trace[0].full_blocks == trace[1].full_blocks
    assert trace[0].hash_ids[2] != trace[1].hash_ids[2]
    assert trace[0].blocks(8) == trace[1].blocks(8)


async def test_a_tilde_is_the_users_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    async with recording(Path("~/logs/trace.jsonl")):
        assert (tmp_path / "logs" / "trace.jsonl.key").is_file()
    assert not (tmp_path / "~").exists()


@pytest.mark.security
async def test_the_trace_holds_no_text_token_or_name_and_is_its_users_alone(tmp_path: Path) -> None:
    one = request(48_001, 48_002, 48_003, 48_004, 48_005, cache_salt="secret-salt")
    path = tmp_path / "new" / "trace.jsonl"
    async with recording(path) as recorder:
        told = summary(one)
        recorder.prompt_received(told, one)
        recorder.request_finished(told, outcome(3))
    text = (path.parent / "trace.0.jsonl").read_text()
    assert set(json.loads(text)) == {
        *("timestamp", "input_length", "output_length", "block_tokens", "hash_ids", "model"),
        *("worker", "cached_length", "salt_id", "sketch"),
    }
    assert not any(str(token) in text for token in one.token_ids)
    assert "secret" not in text
    for name in ("trace.0.jsonl", "trace.jsonl.key"):
        assert stat.S_IMODE((path.parent / name).stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


@pytest.mark.security
async def test_without_the_key_no_prompt_can_be_tried_and_all_front_doors_have_the_same(
    tmp_path: Path,
) -> None:
    one = request(*range(8))
    path = tmp_path / "trace.jsonl"
    async with recording(path) as first, recording(path) as second:
        for recorder in (first, second):
            told = summary(one)
            recorder.prompt_received(told, one)
            recorder.request_finished(told, outcome(1))
    found = [read_trace(tmp_path / f"trace.{number}.jsonl")[0] for number in range(2)]
    assert found[0].hash_ids == found[1].hash_ids
    key = (tmp_path / "trace.jsonl.key").read_bytes()
    assert tuple(block_ids(key, "m", one, 4)) == found[0].hash_ids
    assert not {*block_ids(KEY, "m", one, 4)} & {*found[0].hash_ids}
    (tmp_path / "trace.jsonl.key").chmod(0o644)
    with pytest.raises(PermissionError, match="others may read it"):
        async with recording(path):
            pass


@pytest.mark.security
async def test_a_key_of_the_wrong_length_and_a_link_are_refused(tmp_path: Path) -> None:
    key = tmp_path / "trace.jsonl.key"
    key.touch(mode=0o600)
    with pytest.raises(OSError, match="expected 32 bytes, found 0"):
        async with recording(tmp_path / "trace.jsonl"):
            pass
    key.rename(tmp_path / "elsewhere")
    key.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic link"):
        async with recording(tmp_path / "trace.jsonl"):
            pass


async def test_requests_without_a_whole_answer_are_recorded_with_what_they_got(
    tmp_path: Path,
) -> None:
    one = request(1, 2, 3)
    async with recording(tmp_path / "trace.jsonl") as recorder:
        refused, cut = summary(one), summary(one)
        recorder.prompt_received(refused, one)
        recorder.request_failed(refused, RoutingError("no worker"), None)
        recorder.prompt_received(cut, one)
        recorder.answer_begun(cut, SimpleNamespace(generated_tokens=5))
        recorder.request_failed(cut, asyncio.CancelledError(), "w")
        recorder.request_finished(summary(one), outcome(3))  # forwarded: nobody knows its lengths
    lines = [json.loads(line) for line in (tmp_path / "trace.0.jsonl").read_text().splitlines()]
    assert [(line["output_length"], line["failed"]) for line in lines] == [(0, True), (5, True)]
    assert [one.output_length for one in read_trace(tmp_path / "trace.0.jsonl")] == [0, 5]


async def _record_again_and_again(path: Path) -> None:
    one = request(*range(400))
    for _ in range(8):
        async with recording(path, rotate_bytes=3000, keep=2) as recorder:
            told = summary(one)
            recorder.prompt_received(told, one)
            recorder.request_finished(told, outcome(1))


def test_files_are_bounded(tmp_path: Path) -> None:
    asyncio.run(_record_again_and_again(tmp_path / "trace.jsonl"))
    kept = sorted(one.name for one in tmp_path.glob("trace.0*") if "lock" not in one.name)
    assert kept == ["trace.0.jsonl", "trace.0.jsonl.1", "trace.0.jsonl.2"]


TOKENS = st.lists(st.integers(0, 3), min_size=1, max_size=24)


@given(TOKENS, TOKENS, st.sampled_from([1, 2, 4, 5]))
def test_ids_agree_exactly_as_far_as_the_prompts_do(
    one: list[int], other: list[int], block_tokens: int
) -> None:
    agreed = next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), None)
    agreed = min(len(one), len(other)) if agreed is None else agreed
    ids = [list(block_ids(KEY, "m", request(*tokens), block_tokens)) for tokens in (one, other)]
    assert [len(found) for found in ids] == [-(-len(t) // block_tokens) for t in (one, other)]
    full = agreed // block_tokens
    assert ids[0][:full] == ids[1][:full]
    later = zip(ids[0][full:], ids[1][full:], strict=False)
    assert one == other or all(a != b for a, b in later)


def test_models_adapters_and_salts_share_nothing() -> None:
    plain = request(*range(8))
    others = [
        ("other", plain),
        ("m", evolve(plain, adapter=AdapterIdentity(name="a", digest="a" * 64))),
        ("m", evolve(plain, cache_salt="a")),
        ("m", evolve(plain, cache_salt="\ud800")),
    ]
    found = [set(block_ids(KEY, model, one, 4)) for model, one in [("m", plain), *others]]
    assert sum(map(len, found)) == len(set.union(*found))
