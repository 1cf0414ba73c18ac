"""The response stores `memory` and `sqlite` pass the shipped suite."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import pytest

from commutator.contract.response_store import ResponseStore
from commutator_responses import sqlite
from commutator_responses.memory import MemoryStore
from commutator_responses.sqlite import SqliteStore
from commutator_testing.response_stores import MAX_BYTES, TTL_S, Clock, ResponseStoreContract


class TestMemory(ResponseStoreContract):
    @asynccontextmanager
    async def open_store(self, clock: Clock, name: str) -> AsyncIterator[ResponseStore]:
        store = MemoryStore(MAX_BYTES, TTL_S, clock)
        yield store
        await store.close()


class TestSqlite(ResponseStoreContract):
    is_shared = outlives = True

    @pytest.fixture(autouse=True)
    def _folder(
        self, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.folder = tmp_path_factory.mktemp("stores")
        monkeypatch.setattr(sqlite, "_BUSY_S", 0.1)
        self.file = self.folder / "none"

    @asynccontextmanager
    async def open_store(self, clock: Clock, name: str) -> AsyncIterator[ResponseStore]:
        self.file = self.folder / name / "responses.db"
        store = SqliteStore(self.file, MAX_BYTES, TTL_S, clock)
        yield store
        await store.close()

    def outages(self) -> Mapping[str, AbstractAsyncContextManager[None]]:
        return {"another process does not finish writing": self._locked()}

    @asynccontextmanager
    async def _locked(self) -> AsyncIterator[None]:
        other = sqlite3.connect(self.file, isolation_level=None)
        other.execute("BEGIN EXCLUSIVE")
        try:
            yield
        finally:
            other.close()


async def test_a_file_is_its_users_alone(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "responses.db", MAX_BYTES, TTL_S)
    await store.delete("a", "1")
    modes = {found.stat().st_mode & 0o777 for found in tmp_path.iterdir()}  # noqa: ASYNC240 - quick
    assert modes == {0o600}
    await store.close()
