"""The audit log: what stands in it, who may read it, and what happens when it cannot be written."""

from __future__ import annotations

import asyncio
import json
import os
import stat
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from attrs import asdict, evolve
from tests.support.front_door import MODEL, FakeDispatcher, front_door
from tests.support.principals import gate_of, key_of

from commutator.contract.observer import AnsweredRequest, Observer
from commutator.contract.principal import Limits, Principal
from commutator_limits.limiter import LocalLimiter
from commutator_records.audit import AuditConfig, AuditLog
from commutator_records.log_file import FileObserver, FileObserverConfig, OwnFile, open_own
from commutator_testing.observers import ObserverContract

ONE = AnsweredRequest(
    request_id="a",
    principal="ada",
    peer="127.0.0.1",
    method="POST",
    path="/v1/completions",
    model="m",
    status=200,
    reason=None,
    workers=("w-0",),
    prompt_tokens=3,
    cached_tokens=2,
    generated_tokens=1,
    duration_s=0.25,
    body=b'{"prompt": "secret"}',
)


class TestContract(ObserverContract):
    @pytest.fixture
    def observer(self, tmp_path: Path) -> Observer:
        return AuditLog(AuditConfig(kind="audit", path=str(tmp_path / "audit.jsonl")))


@asynccontextmanager
async def running(path: Path, **options: Any) -> AsyncIterator[AuditLog]:
    one = AuditLog(AuditConfig(kind="audit", path=str(path), **options))
    await one.start()
    try:
        yield one
    finally:
        await one.stop()


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.security
async def test_a_line_says_all_but_the_prompt_and_only_its_owner_may_read(tmp_path: Path) -> None:
    async with running(tmp_path / "new" / "audit.jsonl") as log:
        log.request_answered(ONE)
    path = tmp_path / "new" / "audit.0.jsonl"
    (line,) = lines(path)
    assert line.pop("time").endswith("Z")
    expected = asdict(ONE)
    del expected["body"]
    assert line == {**expected, "workers": ["w-0"]}
    assert "secret" not in path.read_text()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


async def test_a_tilde_is_the_users_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    async with running(Path("~/logs/audit.jsonl")):
        assert (tmp_path / "logs").is_dir()
    assert not (tmp_path / "~").exists()


async def test_prompts_are_written_where_somebody_asked_for_them(tmp_path: Path) -> None:
    async with running(tmp_path / "a", prompts=True) as log:
        log.request_answered(ONE)
        log.request_answered(evolve(ONE, body=b"x" * 10_000_000))
    first, second = lines(tmp_path / "a.0")
    assert first["body"] == '{"prompt": "secret"}'
    assert len(second["body"]) == 64 << 10


@pytest.mark.security
def test_a_link_or_somebody_elses_file_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / "audit.0.jsonl").symlink_to(victim)
    with pytest.raises(OSError, match="symbolic link"):
        OwnFile(tmp_path / "audit.jsonl", 100, 100.0, 1)
    (tmp_path / "audit.0.jsonl").unlink()
    (tmp_path / "audit.0.jsonl").touch()
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(PermissionError, match="not a file of this user"):
        OwnFile(tmp_path / "audit.jsonl", 100, 100.0, 1)
    assert victim.read_text() == "precious"


def test_each_process_has_a_file_of_its_own_and_gets_it_again(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    first, second = (OwnFile(path, 100, 100.0, 1) for _ in range(2))
    assert [one.path.name for one in (first, second)] == ["audit.0.jsonl", "audit.1.jsonl"]
    first.close()
    first.close()
    again = OwnFile(path, 100, 100.0, 1)
    assert again.path.name == "audit.0.jsonl"
    again.close()
    second.close()


@pytest.mark.parametrize("keep", [0, 2])
def test_files_are_rotated_by_size(tmp_path: Path, keep: int) -> None:
    one = OwnFile(tmp_path / "a", 100, 1_000.0, keep)
    for number in range(8):
        one.write([f"{number}{'x' * 60}\n".encode()])
    one.close()
    kept = sorted(path.name for path in tmp_path.glob("a.0*") if "lock" not in path.name)
    assert kept == ["a.0", "a.0.1", "a.0.2"][: keep + 1]
    assert (tmp_path / "a.0").read_text()[0] == "7"
    for path in tmp_path.glob("a.0*"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_files_are_rotated_by_age(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 1_000.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    one = OwnFile(tmp_path / "a", 1_000, 60.0, 2)
    one.write([b"old\n"])
    now_s += 59
    one.write([b"old too\n"])
    now_s += 1
    one.write([b"new\n"])
    one.close()
    assert (tmp_path / "a.0").read_text() == "new\n"
    assert (tmp_path / "a.0.1").read_text() == "old\nold too\n"


@pytest.mark.security
async def test_a_disk_that_hangs_stops_no_request_and_the_queue_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stuck, go_on = threading.Event(), threading.Event()
    write = OwnFile.write

    def slow(file: OwnFile, written: list[bytes]) -> None:
        stuck.set()
        go_on.wait()
        write(file, written)

    monkeypatch.setattr(OwnFile, "write", slow)
    async with running(tmp_path / "a", max_waiting_lines=10) as log:
        log.request_answered(ONE)
        await asyncio.to_thread(stuck.wait)
        for _ in range(100):
            log.request_answered(ONE)  # a call that waited would hang here
        go_on.set()
    found = lines(tmp_path / "a.0")
    assert len([line for line in found if "status" in line]) == 1 + 10
    assert [line["dropped"] for line in found if "dropped" in line] == [90]


async def test_a_disk_that_is_full_costs_lines_that_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    failed, write = threading.Event(), OwnFile.write

    def full(file: OwnFile, written: list[bytes]) -> None:
        failed.set()
        raise OSError(28, "No space left on device")

    async with running(tmp_path / "a") as log:
        monkeypatch.setattr(OwnFile, "write", full)
        log.request_answered(ONE)
        await asyncio.to_thread(failed.wait)
        monkeypatch.setattr(OwnFile, "write", write)
    log.request_answered(ONE)
    assert [line.get("dropped") for line in lines(tmp_path / "a.0")] == [1]
    assert "No space left on device; 1 lines were lost" in caplog.text


@pytest.mark.security
async def test_refused_requests_and_strangers_stand_in_the_log(tmp_path: Path) -> None:
    limits = Limits(requests_per_minute=1)
    gate = gate_of(Principal(name="ada", limits=limits, permissions=frozenset({"metrics"})))
    async with (
        running(tmp_path / "a") as log,
        front_door(FakeDispatcher(), gate=gate) as door,
    ):
        door.services.observer = log
        door.services.request_limiter = LocalLimiter("frontend-0")
        await door.get("/live")
        await door.session.get(f"{door.url}/metrics")
        await door.complete()
        door.session.headers.update(key_of("ada"))
        assert (await door.complete())[0] == 200
        await door.complete()
        await door.complete(nonsense=1)
        await door.get("/v1/models")
        page = await (await door.session.get(f"{door.url}/metrics")).text()
    found = lines(tmp_path / "a.0")
    facts = [(one["principal"], one["path"], one["status"], one["reason"]) for one in found]
    assert facts[:4] == [
        (None, "/metrics", 401, "invalid_api_key"),
        (None, "/v1/completions", 401, "invalid_api_key"),
        ("ada", "/v1/completions", 200, None),
        ("ada", "/v1/completions", 429, "requests_per_minute"),
    ]
    assert facts[-1] == ("ada", "/v1/models", 200, None)
    served = found[2]
    assert served["model"] == MODEL
    assert served["peer"] == "127.0.0.1"
    assert served["workers"] == ["fake-0"]
    assert served["prompt_tokens"] > 0
    assert served["generated_tokens"] > 0
    assert 'commutator_principal_requests_total{principal="ada"} 4.0' in page
    tokens = served["generated_tokens"]
    assert f'commutator_principal_output_tokens_total{{principal="ada"}} {tokens}.0' in page
    reason = 'principal="ada",reason="requests_per_minute"'
    assert f"commutator_principal_refusals_total{{{reason}}} 2.0" in page


def test_what_the_system_wrote_in_part_is_completed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.write
    one = OwnFile(tmp_path / "a", 1_000, 1_000.0, 1)
    monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:3]))
    one.write([b"first line\n", b"second\n"])
    one.close()
    assert (tmp_path / "a.0").read_bytes() == b"first line\nsecond\n"


def test_a_rotation_that_failed_half_way_is_no_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = OwnFile(tmp_path / "a", 10, 1_000.0, 1)
    one.write([b"0123456789\n"])

    def full(*_: object) -> None:
        raise OSError("full")

    with monkeypatch.context() as patched:
        patched.setattr(OwnFile, "rotate", full)
        with pytest.raises(OSError, match="full"):
            one.write([b"lost\n"])
    one.write([b"then\n"])
    one.close()
    assert (tmp_path / "a.0").read_bytes() == b"then\n"


def test_a_pipe_is_no_log(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    with pytest.raises(PermissionError, match="not a file of this user"):
        open_own(tmp_path / "pipe")
    os.close(reader)


async def test_bytes_that_wait_are_bounded_and_freed_once_they_are_written(tmp_path: Path) -> None:
    config = FileObserverConfig(kind="a", path=str(tmp_path / "a"), max_waiting_lines=100)
    writer = FileObserver("a", config)
    writer.add(b"x\n", 60 << 20)
    writer.add(b"dropped\n", 5 << 20)
    await writer.start()
    await writer.stop()
    writer.add(b"y\n", 60 << 20)
    writer._file = OwnFile(tmp_path / "b", 1 << 30, 1_000.0, 1)
    writer._write_waiting()
    writer._file.close()
    assert (tmp_path / "a.0").read_bytes() == b"x\n"
    assert (tmp_path / "b.0").read_bytes() == b"y\n"
