"""What the stores of the protocol `responses` need, and how they fail."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.front_door import FakeDispatcher, frontend_config, make_services

from commutator.config.kinds import config_converter
from commutator.contract.answer import Failure
from commutator.contract.protocol import MountedProtocol, ProtocolConfig
from commutator.contract.response_store import ResponseStoreConfig
from commutator.errors import ConfigError
from commutator.plugins import load_plugins
from commutator.schema import StructureError, structure
from commutator_responses.ledger import Ledger
from commutator_responses.protocol import Responses, ResponsesConfig
from commutator_responses.sqlite import SqliteStore
from commutator_responses.stores import MemoryConfig, SqliteConfig
from commutator_testing.protocols import mounted_on_a_door
from commutator_testing.response_stores import MAX_BYTES, TTL_S, stored

_USE = st.tuples(st.sampled_from("ab"), st.sampled_from("123"), st.integers(1, 60))


@given(st.lists(_USE))
def test_a_ledger_has_room_for_all_that_fits(uses: list[tuple[str, str, int]]) -> None:
    ledger = Ledger(MAX_BYTES, TTL_S)
    held: dict[tuple[str, str], int] = {}
    for now_s, (owner, name, size) in enumerate(uses):
        for key in ledger.expired(now_s):
            del held[key]
        if ledger.forget((owner, name)):
            del held[owner, name]
        for key in ledger.room_for(size):
            most = max(sum(each for (one, _), each in held.items() if one == who) for who in "ab")
            assert sum(each for (one, _), each in held.items() if one == key[0]) == most
            del held[key]
        ledger.put((owner, name), size, now_s)
        held[owner, name] = size
        assert ledger.size_bytes == sum(held.values()) <= MAX_BYTES
    assert {*ledger.expired(len(uses) + TTL_S)} == held.keys()


async def test_a_file_that_fails_is_said_to(tmp_path: Path) -> None:
    file = tmp_path / "responses.db"
    store = SqliteStore(file, MAX_BYTES, TTL_S)
    with closing(sqlite3.connect(file)) as other:
        other.execute("DROP TABLE bodies")
    with pytest.raises(Failure, match="cannot be read or written now") as caught:
        await store.put(stored("1"))
    assert caught.value.status == 503
    await store.close()


def test_what_options_need() -> None:
    converter = config_converter(load_plugins())

    def read(store: object) -> ResponseStoreConfig:
        entry = {"kind": "responses", "store": store}
        found = structure(converter, entry, ProtocolConfig)
        assert isinstance(found, ResponsesConfig)
        return found.store

    def problems(store: object) -> str:
        with pytest.raises(StructureError) as caught:
            read(store)
        return "\n".join(map(": ".join, caught.value.problems))

    assert isinstance(read({"max_bytes": "1MB"}), MemoryConfig)
    assert isinstance(read({"kind": "sqlite", "path": "x"}), SqliteConfig)
    assert read({"kind": "none"}).kind == "none"
    assert "store.path: required" in problems({"kind": "sqlite"})
    assert "store.path: unknown key" in problems({"path": "x"})
    assert "store.ttl_s" in problems({"ttl_s": 0})
    elsewhere = {"kind": "nats", "servers": ["nats://10.0.0.1:4222"]}
    assert "nats://10.0.0.1:4222 is on another host" in problems(elsewhere)
    assert read({**elsewhere, "insecure": True}).max_bytes == 256 << 20
    assert "store.copies: expected an integer from 1 to 5" in problems(
        {"kind": "nats", "copies": 7}
    )
    left = [one for one in entry_points(group="commutator") if one.name != "responses_nats"]
    converter = config_converter(load_plugins(found=left))
    assert "pip install commutator-responses-nats" in problems({"kind": "nats"})
    text = problems({"kind": "redis"})
    assert 'store.kind: no installed plugin offers the response store "redis"' in text


def test_one_process_keeps_for_itself_alone(tmp_path: Path) -> None:
    services = make_services(FakeDispatcher(), config=frontend_config(replicas=2))

    def mount(store: ResponseStoreConfig) -> MountedProtocol:
        config: Any = ResponsesConfig(kind="responses", store=store)
        return mounted_on_a_door(Responses(), config, services)

    with pytest.raises(ConfigError, match=r"replicas is 2.*kind: sqlite"):
        mount(MemoryConfig(kind="memory"))
    mount(ResponseStoreConfig(kind="none"))
    mount(SqliteConfig(kind="sqlite", path=str(tmp_path / "x")))
    with pytest.raises(ConfigError, match=r"store\.path: .* cannot be used"):
        mount(SqliteConfig(kind="sqlite", path=str(tmp_path)))
