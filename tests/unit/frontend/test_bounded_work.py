"""Large bodies and long work have bounds, and leave nothing behind when they are cancelled."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable, Generator
from contextlib import suppress
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.front_door import FakeDispatcher, front_door

from commutator.errors import OverloadedError
from commutator.frontend import WORKING_FOR, WorkPool
from commutator.tokenizer.encoder import LONGEST_EXACT
from commutator_http.byte_budget import ByteBudget

pytestmark = pytest.mark.security


@given(
    sizes=st.lists(st.tuples(st.integers(1, 20), st.integers(0, 3), st.booleans()), max_size=12),
)
def test_never_more_bytes_than_the_budget_and_none_at_the_end(
    sizes: list[tuple[int, int, bool]],
) -> None:
    async def run() -> None:
        budget = ByteBudget(10, max_waiting=100)

        async def one(size: int, turns: int) -> None:
            async with budget.hold(size):
                assert budget.used_bytes <= 10
                for _ in range(turns):
                    await asyncio.sleep(0)

        tasks = [asyncio.create_task(one(size, turns)) for size, turns, _ in sizes]
        await asyncio.sleep(0)
        for task, (_, _, cancelled) in zip(tasks, sizes, strict=True):
            if cancelled:
                task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert not [one for one in results if isinstance(one, Exception)]
        assert budget.used_bytes == 0

    asyncio.run(run())


async def test_too_many_large_bodies_are_refused() -> None:
    budget = ByteBudget(1, max_waiting=1)
    async with budget.hold(1):
        waiting = asyncio.create_task(budget.hold(1).__aenter__())
        await asyncio.sleep(0)
        with pytest.raises(OverloadedError) as refused:
            await budget.hold(1).__aenter__()
        assert refused.value.reason == "too_many_bodies"
    await waiting


async def test_the_queue_of_the_threads_is_bounded_and_forgets_who_went_away() -> None:
    pool, go = WorkPool(threads=1, max_waiting=1), threading.Event()
    begun = threading.Event()

    def work() -> int:
        begun.set()
        return int(go.wait(10))

    running = asyncio.create_task(pool.run(work))
    await asyncio.to_thread(begun.wait, 10)
    never = asyncio.create_task(pool.run(lambda: pytest.fail("begun although cancelled")))
    await asyncio.sleep(0)
    with pytest.raises(OverloadedError) as refused:
        await pool.run(work)
    assert refused.value.reason == "too_much_work"
    never.cancel()
    with suppress(asyncio.CancelledError):
        await never
    assert pool.pending == 1
    go.set()
    assert await running == 1
    assert await pool.run(lambda: 2) == 2


async def test_principals_take_turns_at_the_threads() -> None:
    pool, go, begun = WorkPool(threads=1), threading.Event(), threading.Event()
    done: list[str] = []

    def hold() -> None:
        begun.set()
        assert go.wait(30)

    def of(who: str, work: Callable[[], None]) -> asyncio.Task[None]:
        context = contextvars.copy_context()
        context.run(WORKING_FOR.set, who)
        return asyncio.create_task(pool.run(work), context=context)

    tasks = [of("flood", hold)]
    await asyncio.to_thread(begun.wait, 30)
    waiting = ("flood", "flood", "flood", "other", "third", "other")
    tasks += [of(who, partial(done.append, who)) for who in waiting]
    tasks[1].cancel()
    await asyncio.sleep(0)
    go.set()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert done == ["flood", "other", "third", "flood", "other"]
    assert pool.pending == 0


async def test_between_steps_a_thread_does_what_others_wait_for() -> None:
    pool, done = WorkPool(threads=1), list[str]()
    begun, go = threading.Event(), threading.Event()

    def steps(name: str) -> Generator[None, None, str]:
        begun.set()
        assert go.wait(30)
        for number in range(3):
            done.append(f"{name} {number}")
            yield
        return name

    long = asyncio.create_task(pool.run_in_steps(steps("long")))
    await asyncio.to_thread(begun.wait, 30)
    short = asyncio.create_task(pool.run(lambda: done.append("short")))
    await asyncio.sleep(0)
    go.set()
    assert await long == "long"
    await short
    assert done == ["long 0", "short", "long 1", "long 2"]


async def test_what_a_step_raises_reaches_its_request_and_ends_the_steps() -> None:
    def steps() -> Generator[None, None, int]:
        yield
        raise ValueError("in a step")

    pool = WorkPool(threads=1)
    with pytest.raises(ValueError, match="in a step"):
        await pool.run_in_steps(steps())
    assert pool.pending == 0


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("user", "u" * 257),
        ("cache_salt", "s" * 257),
        ("session_id", "i" * 257),
        ("prompt_cache_key", "k" * 257),
        ("safety_identifier", "s" * 257),
        ("messages", [{"role": "user", "content": "a", "name": "n" * 257}]),
        ("messages", [{"role": "user", "content": ""}] * 8193),
        ("chat_template_kwargs", {str(n): 1 for n in range(65)}),
        ("chat_template_kwargs", {"a": "a" * 300_000}),
        ("logit_bias", {str(n): 1 for n in range(1025)}),
        ("stop", ["a"] * 17),
        ("stop", ["a" * 513]),
        ("stop_token_ids", [1] * 65),
    ],
)
async def test_what_a_request_may_hold_has_bounds(field: str, value: object) -> None:
    async with front_door(FakeDispatcher()) as door:
        status, body = await door.chat(**{field: value})
    assert status == 400
    assert body["error"]["param"].startswith(field)


async def test_a_prompt_that_cannot_fit_is_refused_before_it_is_tokenized() -> None:
    async with front_door(FakeDispatcher(longest=100)) as door:
        preprocessor = next(iter(door.services.preprocessors.values()))
        preprocessor._cache = None  # type: ignore[assignment]  # fails whatever tokenizes
        status, body = await door.complete(prompt="a" * 900_000)
        assert (status, body["error"]["code"]) == (400, "context_length_exceeded")
        status, body = await door.chat(messages=[{"role": "user", "content": "a" * 900_000}])
        assert (status, body["error"]["code"]) == (400, "context_length_exceeded")


async def test_a_text_that_cannot_be_divided_is_refused_when_it_would_hold_a_thread() -> None:
    async with front_door(FakeDispatcher(longest=10_000_000)) as door:
        status, body = await door.complete(prompt="\x04" + "!" * LONGEST_EXACT)
        assert (status, body["error"]["code"]) == (400, "prompt_not_divisible")
        assert body["error"]["param"] == "prompt"
        status, body = await door.chat(
            messages=[{"role": "user", "content": "\x04" + "!" * LONGEST_EXACT}]
        )
        assert (status, body["error"]["code"]) == (400, "prompt_not_divisible")
