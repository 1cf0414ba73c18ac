"""Keeps responses in a file: they outlive the process, and front doors of one host share them."""

from __future__ import annotations

import asyncio
import logging
import os
import sqlite3
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import TypeVar

from commutator.contract.response_store import ResponseStore, StoredResponse

log = logging.getLogger(__name__)

T = TypeVar("T")

_TABLES = """
CREATE TABLE IF NOT EXISTS responses (
    number INTEGER PRIMARY KEY,
    owner TEXT NOT NULL,
    id TEXT NOT NULL,
    previous TEXT,
    session TEXT,
    size INTEGER NOT NULL,
    used REAL NOT NULL,
    maker TEXT,
    until REAL NOT NULL,
    UNIQUE (owner, id)
);
CREATE INDEX IF NOT EXISTS by_use ON responses (used);
CREATE INDEX IF NOT EXISTS by_owner_and_use ON responses (owner, used);
CREATE TABLE IF NOT EXISTS bodies (
    number INTEGER PRIMARY KEY, input BLOB NOT NULL, response BLOB NOT NULL
);
CREATE TABLE IF NOT EXISTS owners (owner TEXT PRIMARY KEY, size INTEGER NOT NULL) WITHOUT ROWID;
CREATE TRIGGER IF NOT EXISTS kept AFTER INSERT ON responses BEGIN
    INSERT INTO owners VALUES (NEW.owner, NEW.size)
    ON CONFLICT (owner) DO UPDATE SET size = size + NEW.size;
END;
CREATE TRIGGER IF NOT EXISTS forgotten AFTER DELETE ON responses BEGIN
    DELETE FROM bodies WHERE number = OLD.number;
    UPDATE owners SET size = size - OLD.size WHERE owner = OLD.owner;
    DELETE FROM owners WHERE owner = OLD.owner AND size = 0;
END;
"""
"""Bodies stand apart, as SQLite writes a whole row anew whenever it is used."""
_NAMES = ("id", "owner", "previous", "session", "input", "response", "maker", "until_unix_s")
_FIND = (
    "SELECT id, owner, previous, session, input, response, maker, until FROM responses JOIN bodies "
    "USING (number) WHERE owner = ? AND id = ?"
)
_EVICT = (
    "DELETE FROM responses WHERE number = (SELECT number FROM responses WHERE owner = "
    "(SELECT owner FROM owners ORDER BY size DESC LIMIT 1) ORDER BY used LIMIT 1)"
)
_BUSY_S = 5.0
"""How long one process waits for another to finish writing."""


class SqliteStore(ResponseStore):
    """All work is done in one thread, a transaction each."""

    def __init__(
        self, path: Path, max_bytes: int, ttl_s: float, clock: Callable[[], float] = time.time
    ) -> None:
        """``clock`` is one that all processes of the file agree on.

        Raises OSError and sqlite3.Error when there can be no such file.
        """
        self.max_bytes = max_bytes
        self._path = path
        self._ttl_s = ttl_s
        self._clock = clock
        path.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(path, os.O_CREAT, 0o600))  # what SQLite makes beside it is as private
        with closing(self._connect()) as connection:
            connection.executescript(_TABLES)
        self._connection: sqlite3.Connection | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="responses")

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self._path, timeout=_BUSY_S, isolation_level=None)
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        return connection

    async def put(self, stored: StoredResponse) -> None:
        await self._run(lambda connection: self._put(connection, stored))

    async def replace(self, stored: StoredResponse, maker: str) -> bool:
        return await self._run(lambda connection: self._replace(connection, stored, maker))

    async def history(
        self, owner: str, response_id: str, limit: int | None = None
    ) -> list[StoredResponse]:
        return await self._run(lambda found: self._history(found, owner, response_id, limit))

    async def delete(self, owner: str, response_id: str) -> bool:
        return await self._run(lambda found: self._delete(found, owner, response_id))

    async def _run(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """``work`` in a transaction of the store's thread, without what is too old."""

        def transaction() -> T:
            if self._connection is None:
                self._connection = self._connect()
            connection = self._connection
            connection.execute("BEGIN IMMEDIATE")
            try:
                oldest = self._clock() - self._ttl_s
                connection.execute("DELETE FROM responses WHERE used <= ?", (oldest,))
                result = work(connection)
                connection.execute("COMMIT")
            except BaseException:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                raise
            return result

        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, transaction)
        except sqlite3.Error as error:
            log.warning("%s: %s", self._path, error)
            raise self.unavailable() from error

    def _put(self, connection: sqlite3.Connection, stored: StoredResponse) -> None:
        self._delete(connection, stored.owner, stored.id)
        size = stored.size_bytes
        if size > self.max_bytes:
            return
        while self._size(connection) + size > self.max_bytes:
            connection.execute(_EVICT)
        row = (stored.owner, stored.id, stored.previous, stored.session, stored.maker)
        made = connection.execute(
            "INSERT INTO responses (owner, id, previous, session, maker, until, size, used) "
            "VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            (*row, stored.until_unix_s, size, self._used(connection)),
        )
        bodies = (made.lastrowid, stored.input, stored.response)
        connection.execute("INSERT INTO bodies VALUES (?, ?, ?)", bodies)

    def _replace(self, connection: sqlite3.Connection, stored: StoredResponse, maker: str) -> bool:
        found = connection.execute(_FIND, (stored.owner, stored.id)).fetchone()
        if found is None or found[_NAMES.index("maker")] != maker:
            return False
        self._put(connection, stored)
        return True

    def _history(
        self, connection: sqlite3.Connection, owner: str, response_id: str, limit: int | None
    ) -> list[StoredResponse]:
        found: list[StoredResponse] = []
        wanted: str | None = response_id
        while wanted is not None and (limit is None or len(found) < limit):
            row = connection.execute(_FIND, (owner, wanted)).fetchone()
            if row is None:
                break
            found.append(StoredResponse(**dict(zip(_NAMES, row, strict=True))))
            wanted = found[-1].previous
        found.reverse()
        for one in found:
            connection.execute(
                "UPDATE responses SET used = ? WHERE owner = ? AND id = ?",
                (self._used(connection), owner, one.id),
            )
        return found

    def _delete(self, connection: sqlite3.Connection, owner: str, response_id: str) -> bool:
        key = (owner, response_id)
        done = connection.execute("DELETE FROM responses WHERE owner = ? AND id = ?", key)
        return done.rowcount > 0

    async def close(self) -> None:
        def close() -> None:
            if self._connection is not None:
                self._connection.close()

        await asyncio.get_running_loop().run_in_executor(self._thread, close)
        self._thread.shutdown()

    def _size(self, connection: sqlite3.Connection) -> int:
        (size,) = connection.execute("SELECT coalesce(sum(size), 0) FROM owners").fetchone()
        return int(size)

    def _used(self, connection: sqlite3.Connection) -> float:
        """Now, and later than any other: what is used in one transaction has an order, too."""
        (last,) = connection.execute("SELECT coalesce(max(used), 0) FROM responses").fetchone()
        return max(self._clock(), float(last) + 1e-6)
