"""The conformance suite for limiters: subclass it, define a fixture, run pytest."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from commutator.contract.limiter import Limiter, LimiterContext, RequestLimiter, Standing, Ticket
from commutator.contract.principal import Limits, Principal
from commutator.errors import CommutatorError, RateLimitError, RegistryError
from commutator.registry.hub import Hub
from commutator.registry.memory import MemoryRegistry
from commutator.registry.server import RegistryServer
from commutator.trust import RunSecret, adopt

_ALL = ("requests_per_minute", "tokens_per_minute", "tokens_per_day", "concurrent_requests")
_TOKENS = 10
"""Of one request: its prompt and the answer that its client stated."""
_REQUESTS = 5
"""That a limit is set to."""
_PATIENCE_S = 10.0


class LimiterContract:
    """What every limiter must do.

    A fixture ``limiter`` returns one, which has counted nothing.
    """

    documented_in = "RequestLimiter in docs/reference/contract/limiter.md"
    counted: Collection[str] = _ALL
    """The fields of ``Limits`` that it counts. Principals with others must be refused."""
    shares: bool = True
    """Whether front doors count together. If not, each admits as much as a limit says."""

    counts_everybody: bool = False
    """Whether principals without limits count, too, as there is a limit of the limiter's own."""

    @pytest.mark.asyncio
    async def test_a_principal_without_limits_counts_where_all_do(self, limiter: Limiter) -> None:
        async with self.doors(limiter) as (door,):
            for limits in (Limits(), Limits(answers=1, max_model_len=100)):
                ada = Principal(name="ada", limits=limits)
                assert door.begin(ada) == self.counts_everybody
                if self.counts_everybody:
                    ticket = await door.admit(ada, _TOKENS)
                    assert isinstance(ticket.standing, Standing)
                    door.end(ada, ticket, _TOKENS)

    @pytest.mark.asyncio
    @pytest.mark.parametrize("count", [1, 2])
    @pytest.mark.parametrize("name", _ALL)
    async def test_a_limit_admits_what_it_says_and_no_more(
        self, limiter: Limiter, name: str, count: int
    ) -> None:
        """Limits that nothing counts are no reason to serve without limit."""
        ada = _limited(name)
        async with self.doors(limiter, count) as doors:
            if name not in self.counted:
                with pytest.raises(CommutatorError):
                    doors[0].begin(ada)
                return
            admitted = 0
            for number in range(3 * _REQUESTS * count):
                ticket = await _asked(doors[number % count], ada)
                admitted += ticket is not None
            together = 1 if self.shares else count
            assert admitted == _REQUESTS * together
            other = Principal(name="bob", limits=ada.limits)
            assert await _asked(doors[0], other) is not None, "each principal has its own"

    @pytest.mark.asyncio
    @pytest.mark.parametrize("name", _ALL)
    async def test_what_reached_no_worker_costs_nothing(self, limiter: Limiter, name: str) -> None:
        if name not in self.counted:
            return
        ada = _limited(name)
        async with self.doors(limiter) as (door,):
            for _ in range(3 * _REQUESTS):
                ticket = await _asked(door, ada)
                assert ticket is not None
                door.end(ada, ticket, None)
            assert door.begin(ada)
            door.end(ada, None, None)  # it was never admitted

    @pytest.mark.asyncio
    @pytest.mark.parametrize("name", ["tokens_per_minute", "tokens_per_day"])
    async def test_tokens_that_were_not_taken_are_free_again(
        self, limiter: Limiter, name: str
    ) -> None:
        if name not in self.counted:
            return
        ada = _limited(name)
        async with self.doors(limiter) as (door,):
            # Each takes half of what it is charged, and the next is charged the whole.
            for _ in range(2 * _REQUESTS - 1):
                ticket = await _asked(door, ada)
                assert ticket is not None
                door.end(ada, ticket, _TOKENS // 2)
            assert await _asked(door, ada) is None

    @pytest.mark.asyncio
    async def test_requests_that_ended_run_no_more(self, limiter: Limiter) -> None:
        name = "concurrent_requests"
        if name not in self.counted:
            return
        ada = _limited(name)
        async with self.doors(limiter) as (door,):
            tickets = [await _asked(door, ada) for _ in range(_REQUESTS)]
            assert await _asked(door, ada) is None
            door.end(ada, tickets[0], _TOKENS)
            assert await _asked(door, ada) is not None

    @pytest.mark.asyncio
    async def test_a_refusal_names_the_limit_and_when_to_come_again(self, limiter: Limiter) -> None:
        async with self.doors(limiter) as (door,):
            for name in self.counted:
                ada = _limited(name, principal=f"ada-{name}")
                for _ in range(_REQUESTS):
                    ticket = await _asked(door, ada)
                    assert ticket is not None
                    assert isinstance(ticket.standing, Standing)
                with pytest.raises(RateLimitError) as refused:
                    await _ask(door, ada)
                assert refused.value.limit == name
                assert refused.value.retry_after_s is None or refused.value.retry_after_s > 0
                assert isinstance(refused.value.standing, Standing)

    @pytest.mark.asyncio
    async def test_its_service_has_a_name_and_refuses_strange_frames(
        self, limiter: Limiter
    ) -> None:
        service = limiter.service()
        if service is None:
            return
        receiver = service.connected(_Nowhere())
        for frame in ([service.name, "no such thing"], [service.name, 1, 2, 3]):
            with pytest.raises((ValueError, TypeError)):
                receiver.on_frame(frame)
        receiver.on_lost()
        await service.stop()

    @asynccontextmanager
    async def doors(self, limiter: Limiter, count: int = 1) -> AsyncIterator[list[RequestLimiter]]:
        """The halves of ``limiter`` at so many front doors of one deployment."""
        async with AsyncExitStack() as stack:
            stack.enter_context(adopt(RunSecret.new()))
            service = limiter.service()
            server = RegistryServer(MemoryRegistry(), [] if service is None else [service])
            hub = Hub(await server.start())
            stack.push_async_callback(server.stop)
            contexts = [
                LimiterContext(door=f"frontend-{number}", alone=count == 1, hub=hub)
                for number in range(count)
            ]
            doors = [limiter.at_door(context) for context in contexts]
            running = [asyncio.create_task(door.run()) for door in doors]
            if service is not None:
                running.append(asyncio.create_task(service.run()))
            stack.push_async_callback(_cancelled, running)
            async with asyncio.timeout(_PATIENCE_S):
                for door in doors:
                    await door.ready.wait()
            yield doors


async def _cancelled(tasks: Collection[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _limited(name: str, principal: str = "ada") -> Principal:
    most = _REQUESTS * _TOKENS if name.startswith("tokens") else _REQUESTS
    return Principal(name=principal, limits=Limits(**{name: most}))


async def _ask(door: RequestLimiter, principal: Principal) -> Ticket:
    """The ticket of one request, which stays open. Raises RateLimitError."""
    assert door.begin(principal), "a principal with limits counts"
    try:
        return await door.admit(principal, _TOKENS, max_tokens=0)
    except RateLimitError:
        door.end(principal, None, None)
        raise
    except RegistryError as error:
        raise AssertionError("the service could be reached") from error


async def _asked(door: RequestLimiter, principal: Principal) -> Ticket | None:
    """As ``_ask``; None if it is beyond a limit."""
    try:
        return await _ask(door, principal)
    except RateLimitError:
        return None


class _Nowhere:
    """A connection that nobody reads."""

    unsent_bytes = 0

    def send(self, frame: list[object]) -> None:
        pass

    def close(self) -> None:
        pass
