"""Roles and draining outlive the registry in a supervisor's memory, if it has a file for them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from commutator.contract.registry import RETIRED, WorkerUp
from commutator.contract.worker import Role, WorkerRecord
from commutator.errors import RegistryError
from commutator.registry.memory import MemoryRegistry
from commutator_testing.registries import make_worker


@asynccontextmanager
async def started(file: Path | None) -> AsyncIterator[MemoryRegistry]:
    """A registry, as after a start of its supervisor."""
    registry = MemoryRegistry(state_file=file)
    try:
        yield registry
    finally:
        await registry.close()


async def known(registry: MemoryRegistry, worker_id: str) -> WorkerRecord:
    (record,) = [
        change.record
        for change in await anext(registry.watch())
        if isinstance(change, WorkerUp) and change.record.worker_id == worker_id
    ]
    return record


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "desired.json"


async def test_it_is_kept_in_the_file(file: Path) -> None:
    async with started(file) as registry:
        for worker_id in ("a", "b", "c"):
            await registry.register(make_worker(worker_id), 60.0)
        await registry.set_draining("a", True)
        await registry.set_role("b", Role.PREFILL)
        await registry.set_draining("c", True)
        await registry.set_draining("c", False)
    async with started(file) as registry:
        for worker_id in ("a", "b", "c"):
            await registry.register(make_worker(worker_id), 60.0)
        assert (await known(registry, "a")).draining
        assert (await known(registry, "b")).role is Role.PREFILL
        assert not (await known(registry, "c")).draining


async def test_a_retired_worker_is_forgotten(file: Path) -> None:
    async with started(file) as registry:
        lease = await registry.register(make_worker("a"), 60.0)
        await registry.set_draining("a", True)
        await registry.deregister(lease, RETIRED)
    async with started(file) as registry:
        await registry.register(make_worker("a"), 60.0)
        assert not (await known(registry, "a")).draining


async def test_without_a_file_it_is_forgotten() -> None:
    for _ in range(2):
        async with started(None) as registry:
            await registry.register(make_worker("a"), 60.0)
            assert not (await known(registry, "a")).draining
            await registry.set_draining("a", True)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"roles": {"a": "cook"}}'])
def test_a_file_that_cannot_be_read_is_refused(file: Path, content: bytes) -> None:
    file.write_bytes(content)
    with pytest.raises(RegistryError, match=r"state_file: .*desired\.json: .*remove it"):
        MemoryRegistry(state_file=file)


async def test_what_cannot_be_kept_has_not_happened(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    async with started(folder / "desired.json") as registry:
        await registry.register(make_worker("a"), 60.0)
        folder.rmdir()
        with pytest.raises(RegistryError, match="No such file"):
            await registry.set_draining("a", True)
        assert not (await known(registry, "a")).draining
