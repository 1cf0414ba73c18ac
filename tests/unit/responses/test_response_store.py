"""What is kept of responses: whose it is, how long, how much."""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.front_door import FakeDispatcher, frontend_config, make_services

from commutator.contract.answer import Failure
from commutator.contract.protocol import MountedProtocol
from commutator.errors import ConfigError
from commutator_responses.protocol import Responses, ResponsesConfig, StoreConfig
from commutator_responses.sqlite import SqliteStore
from commutator_responses.store import MemoryStore, ResponseStore, Stored
from commutator_testing.protocols import mounted_on_a_door

MAX_BYTES = 100
TTL_S = 10.0


def stored(name: str, owner: str = "a", previous: str | None = None, size: int = 10) -> Stored:
    return Stored(
        id=name,
        owner=owner,
        previous=previous,
        session=None,
        input=b"[]",
        response=b"x" * (size - 2),
    )


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


def make(kind: str, folder: Path, clock: Clock) -> ResponseStore:
    if kind == "memory":
        return MemoryStore(MAX_BYTES, TTL_S, clock)
    return SqliteStore(folder / "deep" / "responses.db", MAX_BYTES, TTL_S, clock)


@pytest.fixture(params=["memory", "sqlite"])
def store(request: pytest.FixtureRequest, tmp_path: Path, clock: Clock) -> ResponseStore:
    return make(request.param, tmp_path, clock)


async def names(store: ResponseStore, owner: str, name: str, limit: int | None = None) -> list[str]:
    return [one.id for one in await store.history(owner, name, limit)]


async def test_a_conversation_is_found_from_its_end(store: ResponseStore) -> None:
    await store.put(stored("1"))
    await store.put(stored("2", previous="1"))
    await store.put(stored("3", previous="2"))
    assert await names(store, "a", "3") == ["1", "2", "3"]
    assert await names(store, "a", "2") == ["1", "2"]
    assert await names(store, "a", "3", 1) == ["3"]
    (found,) = await store.history("a", "1")
    assert found == stored("1")
    assert await names(store, "a", "nothing") == []


async def test_what_is_deleted_is_gone_from_the_middle(store: ResponseStore) -> None:
    await store.put(stored("1"))
    await store.put(stored("2", previous="1"))
    assert await store.delete("a", "1")
    assert not await store.delete("a", "1")
    (left,) = await store.history("a", "2")
    assert left.previous == "1"


async def test_others_do_not_see_it(store: ResponseStore) -> None:
    await store.put(stored("1"))
    assert await names(store, "b", "1") == []
    assert not await store.delete("b", "1")
    assert await names(store, "a", "1") == ["1"]


async def test_what_is_used_lives_longer(store: ResponseStore, clock: Clock) -> None:
    await store.put(stored("1"))
    await store.put(stored("2", previous="1"))
    await store.put(stored("other"))
    clock.now_s = 6
    assert await names(store, "a", "2") == ["1", "2"]
    clock.now_s = 12
    assert await names(store, "a", "other") == []
    assert await names(store, "a", "2") == ["1", "2"]
    clock.now_s = 23
    assert await names(store, "a", "2") == []


async def test_who_holds_the_most_loses_what_is_least_used(store: ResponseStore) -> None:
    await store.put(stored("mine", "b", size=30))
    for number in range(7):
        await store.put(stored(str(number)))
    assert await names(store, "a", "0") == ["0"]  # used, which the next is not
    await store.put(stored("new", "b", size=20))
    assert await names(store, "a", "1") == []
    assert await names(store, "a", "0") == ["0"]
    assert await names(store, "b", "mine") == ["mine"]
    assert await names(store, "b", "new") == ["new"]


async def test_what_is_too_large_is_not_kept_and_costs_nobody_anything(
    store: ResponseStore,
) -> None:
    await store.put(stored("1"))
    await store.put(stored("large", size=MAX_BYTES + 1))
    assert await names(store, "a", "large") == []
    assert await names(store, "a", "1") == ["1"]


_STEP = st.tuples(
    st.sampled_from(["put", "history", "delete", "wait"]),
    st.sampled_from("abc"),
    st.integers(0, 5),
    st.integers(2, 60),
)


@pytest.mark.parametrize("kind", ["memory", "sqlite"])
@settings(max_examples=40)
@given(steps=st.lists(_STEP, max_size=40))
def test_it_never_holds_more_than_it_may(
    kind: str, steps: list[tuple[str, str, int, int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    clock = Clock()
    store = make(kind, tmp_path_factory.mktemp("store"), clock)
    known: dict[tuple[str, str], Stored] = {}

    async def held() -> int:
        found = [await store.history(owner, name, 1) for owner, name in known]
        return sum(one.size_bytes for some in found for one in some)

    async def run() -> None:
        for what, owner, number, size in steps:
            name = str(number)
            if what == "put":
                one = stored(name, owner, str(number - 1) if number else None, size)
                known[owner, name] = one
                await store.put(one)
                assert await store.history(owner, name, 1) == [one]
            elif what == "history":
                found = await store.history(owner, name)
                assert all(one == known[owner, one.id] for one in found)
            elif what == "delete":
                await store.delete(owner, name)
                assert await store.history(owner, name) == []
            else:
                clock.now_s += size / 10
            assert await held() <= MAX_BYTES

    asyncio.run(run())


async def test_a_file_is_shared_and_outlives_who_wrote_it(tmp_path: Path, clock: Clock) -> None:
    file = tmp_path / "responses.db"
    one, other = (SqliteStore(file, MAX_BYTES, TTL_S, clock) for _ in range(2))
    await asyncio.gather(*(one.put(stored(str(number))) for number in range(3)))
    await other.put(stored("3", previous="2"))
    assert await names(one, "a", "3") == ["2", "3"]
    assert await names(SqliteStore(file, MAX_BYTES, TTL_S, clock), "a", "0") == ["0"]
    modes = {found.stat().st_mode & 0o777 for found in tmp_path.iterdir()}  # noqa: ASYNC240 - quick
    assert modes == {0o600}


async def test_a_file_that_fails_is_said_to(tmp_path: Path, clock: Clock) -> None:
    file = tmp_path / "responses.db"
    store = SqliteStore(file, MAX_BYTES, TTL_S, clock)
    with closing(sqlite3.connect(file)) as other:
        other.execute("DROP TABLE bodies")
    with pytest.raises(Failure, match="cannot be read or written now") as caught:
        await store.put(stored("1"))
    assert caught.value.status == 503


def test_what_options_need() -> None:
    def problems(**options: Any) -> list[str]:
        store = StoreConfig(**options)
        return [*Responses().problems(ResponsesConfig(kind="responses", store=store))]

    assert problems() == problems(kind="none") == problems(kind="sqlite", path="x") == []
    assert problems(kind="sqlite") == ["store.path: required with kind sqlite; name a file"]
    assert problems(path="x") == ["store.path: kind memory has no file; leave it out"]


def test_one_process_keeps_for_itself_alone(tmp_path: Path) -> None:
    services = make_services(FakeDispatcher(), config=frontend_config(replicas=2))

    def mount(**options: Any) -> MountedProtocol:
        config = ResponsesConfig(kind="responses", store=StoreConfig(**options))
        return mounted_on_a_door(Responses(), config, services)

    with pytest.raises(ConfigError, match=r"replicas is 2.*kind: sqlite"):
        mount()
    mount(kind="none")
    mount(kind="sqlite", path=str(tmp_path / "x"))
    with pytest.raises(ConfigError, match=r"store\.path: .* cannot be used"):
        mount(kind="sqlite", path=str(tmp_path))
