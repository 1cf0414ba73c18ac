"""The response stores of kinds `memory`, `sqlite` and `none`."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import ClassVar

from attrs import frozen

from commutator import setting
from commutator.contract.response_store import ResponseStore, ResponseStoreConfig
from commutator.errors import ConfigError


@frozen(kw_only=True)
class MemoryConfig(ResponseStoreConfig):
    """In the front door's process, until it ends; it needs `replicas: 1`."""

    in_one_process: ClassVar[bool] = True


@frozen(kw_only=True)
class SqliteConfig(ResponseStoreConfig):
    """In a file, which all front doors of one host share."""

    path: str = setting(
        "The file, on a disk of this machine. It holds what clients said, unencrypted: only its "
        "own user can read it."
    )


def in_memory(config: MemoryConfig) -> ResponseStore:
    """Of this process."""
    from commutator_responses.memory import MemoryStore

    return MemoryStore(config.max_bytes, config.ttl_s)


def in_sqlite(config: SqliteConfig) -> ResponseStore:
    """Raises ConfigError when the file cannot be used."""
    from commutator_responses.sqlite import SqliteStore

    try:
        return SqliteStore(Path(config.path), config.max_bytes, config.ttl_s)
    except (OSError, sqlite3.Error) as error:
        problem = f"store.path: {config.path} cannot be used: {error}; name another file"
        raise ConfigError([problem], "frontend") from error
