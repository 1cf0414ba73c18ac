"""The conformance suite for response stores: subclass it, define how one is opened, run pytest."""

from __future__ import annotations

import asyncio
import time
from abc import abstractmethod
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import ClassVar

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from commutator.contract.answer import Failure
from commutator.contract.response_store import ResponseStore, StoredResponse

MAX_BYTES = 100
"""Of every store of the suite, ..."""
TTL_S = 10.0
"""... and how long it keeps what is not used."""
_LONGEST_S = 15.0
"""A client that waits for longer has given up."""
_UNAVAILABLE = 503


class Clock:
    """Seconds that tests choose."""

    now_s = 1_000.0

    def __call__(self) -> float:
        return self.now_s


def stored(
    name: str,
    owner: str = "a",
    previous: str | None = None,
    size: int = 10,
    maker: str | None = None,
) -> StoredResponse:
    """A response of ``size`` bytes, at least 2."""
    return StoredResponse(
        id=name,
        owner=owner,
        previous=previous,
        session=None,
        input=b"[]",
        response=b"x" * (size - 2),
        maker=maker,
    )


async def _names(
    store: ResponseStore, owner: str, name: str, limit: int | None = None
) -> list[str]:
    return [one.id for one in await store.history(owner, name, limit)]


_STEP = st.tuples(
    st.sampled_from(["put", "history", "delete", "wait"]),
    st.sampled_from("abc"),
    st.integers(0, 5),
    st.integers(2, 60),
)


class ResponseStoreContract:
    """What every response store keeps, for whom, how long, how much, and what it says if it cannot.

    Stores of one test hold the same responses, if ``is_shared``; those of another test do not.
    """

    is_shared: ClassVar[bool] = False
    """Whether several stores, in several processes, hold the same responses."""
    outlives: ClassVar[bool] = False
    """Whether responses are still there when the store is opened again."""

    @abstractmethod
    def open_store(self, clock: Clock, name: str) -> AbstractAsyncContextManager[ResponseStore]:
        """A store of ``MAX_BYTES`` and ``TTL_S``; those of one ``name`` hold the same."""

    def outages(self) -> Mapping[str, AbstractAsyncContextManager[None]]:
        """By what happens: inside, the store cannot be reached, afterwards it can again."""
        return {}

    @pytest.fixture
    def clock(self) -> Clock:
        return Clock()

    @pytest.fixture
    def name(self, request: pytest.FixtureRequest) -> str:
        return f"{request.node.name}-{time.monotonic_ns()}"

    async def test_a_conversation_is_found_from_its_end(self, clock: Clock, name: str) -> None:
        async with self.open_store(clock, name) as store:
            await store.put(stored("1"))
            await store.put(stored("2", previous="1"))
            await store.put(stored("3", previous="2"))
            assert await _names(store, "a", "3") == ["1", "2", "3"]
            assert await _names(store, "a", "2") == ["1", "2"]
            assert await _names(store, "a", "3", 1) == ["3"]
            assert await store.history("a", "1") == [stored("1")]
            assert await _names(store, "a", "nothing") == []
            assert await _names(store, "a", "a strange.*>\u2028 name") == []

    async def test_what_is_deleted_is_gone_from_the_middle(self, clock: Clock, name: str) -> None:
        async with self.open_store(clock, name) as store:
            await store.put(stored("1"))
            await store.put(stored("2", previous="1"))
            assert await store.delete("a", "1")
            assert not await store.delete("a", "1")
            (left,) = await store.history("a", "2")
            assert left.previous == "1"

    async def test_others_do_not_see_it(self, clock: Clock, name: str) -> None:
        async with self.open_store(clock, name) as store:
            await store.put(stored("1", "a é"))
            assert await _names(store, "b", "1") == []
            assert not await store.delete("b", "1")
            assert not await store.replace(stored("1", "b"), "m")
            assert await _names(store, "a é", "1") == ["1"]

    async def test_what_is_used_lives_longer(self, clock: Clock, name: str) -> None:
        async with self.open_store(clock, name) as store:
            begin_s = clock.now_s
            await store.put(stored("1"))
            await store.put(stored("2", previous="1"))
            await store.put(stored("other"))
            clock.now_s = begin_s + 6
            assert await _names(store, "a", "2") == ["1", "2"]
            clock.now_s = begin_s + 12
            assert await _names(store, "a", "other") == []
            assert await _names(store, "a", "2") == ["1", "2"]
            clock.now_s = begin_s + 23
            assert await _names(store, "a", "2") == []

    async def test_who_holds_the_most_loses_what_is_least_used(
        self, clock: Clock, name: str
    ) -> None:
        async with self.open_store(clock, name) as store:
            await store.put(stored("mine", "b", size=30))
            for number in range(7):
                await store.put(stored(str(number)))
            assert await _names(store, "a", "0") == ["0"]  # used, which the next is not
            await store.put(stored("new", "b", size=20))
            assert await _names(store, "a", "1") == []
            assert await _names(store, "a", "0") == ["0"]
            assert await _names(store, "b", "mine") == ["mine"]
            assert await _names(store, "b", "new") == ["new"]

    async def test_what_is_too_large_is_not_kept_and_costs_nobody_anything(
        self, clock: Clock, name: str
    ) -> None:
        async with self.open_store(clock, name) as store:
            await store.put(stored("1"))
            await store.put(stored("large", size=MAX_BYTES + 1))
            assert await _names(store, "a", "large") == []
            assert await _names(store, "a", "1") == ["1"]

    async def test_what_is_being_made_is_completed_once(self, clock: Clock, name: str) -> None:
        async with self.open_store(clock, name) as store:
            await store.put(stored("1", maker="m"))
            assert await store.replace(stored("1", maker="m", size=20), "m")
            assert not await store.replace(stored("1", size=30), "other")
            done = await asyncio.gather(
                *(store.replace(stored("1", size=40 + number), "m") for number in range(5))
            )
            assert sum(done) == 1
            assert await store.history("a", "1") == [stored("1", size=40 + done.index(True))]
            assert not await store.replace(stored("2"), "m")
            assert await _names(store, "a", "2") == []

    @settings(
        max_examples=25, deadline=None, suppress_health_check=[HealthCheck.differing_executors]
    )
    @given(steps=st.lists(_STEP, max_size=40))
    def test_it_never_holds_more_than_it_may(self, steps: list[tuple[str, str, int, int]]) -> None:
        clock = Clock()
        known: dict[tuple[str, str], StoredResponse] = {}

        async def held(store: ResponseStore) -> int:
            found = [await store.history(owner, name, 1) for owner, name in known]
            return sum(one.size_bytes for some in found for one in some)

        async def run() -> None:
            async with self.open_store(clock, f"property-{time.monotonic_ns()}") as store:
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
                    assert await held(store) <= MAX_BYTES

        asyncio.run(run())

    async def test_several_stores_hold_the_same(self, clock: Clock, name: str) -> None:
        if not self.is_shared:
            pytest.skip("each holds its own")
        async with AsyncExitStack() as stack:
            one, other = [
                await stack.enter_async_context(self.open_store(clock, name)) for _ in range(2)
            ]
            await asyncio.gather(*(one.put(stored(str(number))) for number in range(3)))
            await other.put(stored("3", previous="2"))
            assert await _names(one, "a", "3") == ["2", "3"]
            assert await _names(other, "a", "0") == ["0"]
            await one.put(stored("4", maker="m"))
            done = await asyncio.gather(
                *(each.replace(stored("4", size=20), "m") for each in (one, other))
            )
            assert sum(done) == 1
            assert await other.history("a", "4") == [stored("4", size=20)]
            assert await other.delete("a", "4")
            assert await _names(one, "a", "4") == []

    async def test_responses_outlive_who_wrote_them(self, clock: Clock, name: str) -> None:
        if not self.outlives:
            pytest.skip("they end with the process")
        async with self.open_store(clock, name) as store:
            await store.put(stored("1", size=90))
        async with self.open_store(clock, name) as store:
            assert await store.history("a", "1") == [stored("1", size=90)]
            await store.put(stored("2", size=20))  # what was there before counts
            assert await _names(store, "a", "1") == []

    async def test_an_outage_is_said_soon_and_nothing_is_lost(
        self, clock: Clock, name: str
    ) -> None:
        outages = self.outages()
        if not outages:
            pytest.skip("nothing lies between a front door and what it keeps")
        async with self.open_store(clock, name) as store:
            await store.put(stored("1"))
            for what, outage in outages.items():
                async with outage:
                    begin_s = time.monotonic()
                    answers = await asyncio.gather(
                        store.put(stored("2")),
                        store.history("a", "1"),
                        store.delete("a", "1"),
                        store.replace(stored("1"), "m"),
                        return_exceptions=True,
                    )
                    assert time.monotonic() - begin_s < _LONGEST_S, what
                    for answer in answers:
                        assert isinstance(answer, Failure), (what, answer)
                        assert answer.status == _UNAVAILABLE
                        assert "store: false" in answer.message
                assert await _names(store, "a", "1") == ["1"], what
                await store.put(stored("3", previous="1"))
                assert await _names(store, "a", "3") == ["1", "3"], what
