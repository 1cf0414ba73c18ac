"""What is kept of responses: whose it is, how long, how much."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commutator_responses.store import MemoryStore, ResponseStore, Stored

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


@pytest.fixture(params=["memory"])
def store(clock: Clock) -> ResponseStore:
    return MemoryStore(MAX_BYTES, TTL_S, clock)


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


@given(st.lists(_STEP, max_size=40))
def test_it_never_holds_more_than_it_may(steps: list[tuple[str, str, int, int]]) -> None:
    clock = Clock()
    store = MemoryStore(MAX_BYTES, TTL_S, clock)
    known: dict[tuple[str, str], Stored] = {}

    async def run() -> None:
        for what, owner, number, size in steps:
            name = str(number)
            if what == "put":
                one = stored(name, owner, str(number - 1) if number else None, size)
                known[owner, name] = one
                await store.put(one)
            elif what == "history":
                found = await store.history(owner, name)
                assert all(one == known[owner, one.id] for one in found)
            elif what == "delete":
                await store.delete(owner, name)
                assert await store.history(owner, name) == []
            else:
                clock.now_s += size / 10
            assert 0 <= store.size_bytes <= MAX_BYTES

    asyncio.run(run())
