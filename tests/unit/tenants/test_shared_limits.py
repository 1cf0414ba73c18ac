"""Front doors that count against one ledger, through a registry's server that may fail them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
from attrs import define, field
from tests.support.limits import ask, settle

from commutator.contract.limiter import RequestLimiter, Standing, Ticket
from commutator.contract.principal import Limits
from commutator.contract.service import Connection, Receiver
from commutator.errors import RateLimitError, RegistryError
from commutator.frames import FrameProtocol
from commutator.registry.client import connect
from commutator.registry.hub import Hub
from commutator.registry.memory import MemoryRegistry
from commutator.registry.server import RegistryServer
from commutator_limits.ledger import WINDOW_S, Moment
from commutator_limits.limiter import LocalLimiter, SharedLimiter
from commutator_limits.service import SERVICE, LedgerService


@define
class Clock:
    """Stands still unless it is moved."""

    now_s: float = 1_000.0

    def __call__(self) -> Moment:
        return Moment(self.now_s, self.now_s)


@define
class Deployment:
    """A supervisor's side: the registry's server with the ledger."""

    clock: Clock = field(factory=Clock)
    address: str = ""
    service: LedgerService = field(init=False)
    server: RegistryServer = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.service = LedgerService(self.clock)
        self.server = RegistryServer(MemoryRegistry(), [self.service])

    async def listen(self) -> None:
        port = int(self.address.rpartition(":")[2] or 0)
        self.address = await self.server.start(port=port)

    @asynccontextmanager
    async def door(self, name: str) -> AsyncIterator[SharedLimiter]:
        """A front door; leaving is as being killed: nothing is said."""
        limiter = SharedLimiter(name, Hub(self.address))
        async with running(limiter):
            await until(lambda: connected(limiter))
            yield limiter


def connected(limiter: SharedLimiter) -> bool:
    return limiter._link.connection is not None


@asynccontextmanager
async def running(limiter: RequestLimiter) -> AsyncIterator[None]:
    task = asyncio.create_task(limiter.run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.002)


@pytest.fixture
async def deployment() -> AsyncIterator[Deployment]:
    one = Deployment()
    await one.listen()
    yield one
    await one.server.stop()


async def admitted(door: RequestLimiter, limits: Limits, tokens: int = 1) -> Ticket | None:
    answer = await ask(door, "ada", limits, tokens)
    return None if isinstance(answer, RateLimitError) else answer


async def test_many_doors_admit_exactly_the_limit(deployment: Deployment) -> None:
    limits = Limits(requests_per_minute=60, tokens_per_minute=1_000)
    async with AsyncExitStack() as stack:
        doors = [await stack.enter_async_context(deployment.door(f"door-{n}")) for n in range(4)]
        asked = [admitted(random.choice(doors), limits, 10) for _ in range(100)]
        tickets = await asyncio.gather(*asked)
        assert sum(ticket is not None for ticket in tickets) == 60
        deployment.clock.now_s += WINDOW_S + 1
        tickets = await asyncio.gather(*(admitted(door, limits, 100) for door in doors * 5))
        assert sum(ticket is not None for ticket in tickets) == 10


async def test_a_refusal_says_which_limit_and_when_to_come_back(deployment: Deployment) -> None:
    async with deployment.door("door-0") as first, deployment.door("door-1") as second:
        limits = Limits(requests_per_minute=1)
        assert await admitted(first, limits)
        deployment.clock.now_s += 10
        refusal = await ask(second, "ada", limits, 1)
        assert isinstance(refusal, RateLimitError)
        assert (refusal.limit, refusal.retry_after_s) == ("requests_per_minute", WINDOW_S + 1 - 10)
        assert isinstance(refusal.standing, Standing)
        assert refusal.standing.remaining_requests == 0
        assert not isinstance(await ask(second, "bob", limits, 1), RateLimitError)


@pytest.mark.security
@pytest.mark.parametrize(
    "wrong",
    [
        [SERVICE],
        [SERVICE, 1, 7, None, None, 0, 0],
        [SERVICE, 1, ["many"] * 6, None, None, 0, 0],
        [SERVICE, 1, [None] * 5, None, None, 0, 0],
        [SERVICE, 1, [None] * 6, "no limit of ours", None, 0, 0],
        [SERVICE, 1, [None] * 6, "tokens_per_day", "soon", 0, 0],
        [SERVICE, 1, [None] * 6, None, None, "many", 0],
        [SERVICE, {}, [None] * 6, None, None, 0, 0],
        [SERVICE, "allowed", [[1, [None] * 5, 1, 1]]],
        [SERVICE, "allowed", [[1, [None] * 6, -1, 1]]],
        [SERVICE, "allowed", 1],
        ["x" * 100_000, []],
    ],
    ids=lambda frame: str(frame)[:40],
)
async def test_a_wrong_answer_of_the_ledger_is_passed_over_and_logged_in_short(
    wrong: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    deployment = Deployment()

    @define
    class Wrong(Receiver):
        connection: Connection
        right: Receiver

        def on_frame(self, frame: list[Any]) -> None:
            self.connection.send(wrong)
            self.right.on_frame(frame)

    class AnswersWrongly(LedgerService):
        def connected(self, connection: Connection) -> Receiver:
            return Wrong(connection, super().connected(connection))

    deployment.server.serve([AnswersWrongly(deployment.clock)])
    await deployment.listen()
    async with deployment.door("door-0") as door:
        assert await admitted(door, Limits(requests_per_minute=1)) is not None
    await deployment.server.stop()
    said = [record.getMessage() for record in caplog.records]
    assert any("the ledger sent a wrong frame" in line for line in said)
    assert max(map(len, said)) < 300
    assert "Fatal error" not in caplog.text


async def test_what_a_request_did_not_take_is_free_at_every_door(deployment: Deployment) -> None:
    limits = Limits(tokens_per_minute=100, concurrent_requests=1)
    async with deployment.door("door-0") as first, deployment.door("door-1") as second:
        ticket = await admitted(first, limits, 100)
        assert ticket is not None
        assert await admitted(second, limits, 1) is None
        settle(first, ticket, 40)
        # Of another connection, so it may be read before the end of the first.
        await until(lambda: deployment.service.ledger.running("ada") == 0)
        assert await admitted(second, limits, 61) is None
        assert await admitted(second, limits, 60) is not None


async def test_a_cancelled_question_charges_nothing(deployment: Deployment) -> None:
    limits = Limits(requests_per_minute=1, concurrent_requests=1)
    async with deployment.door("door-0") as door:
        for _ in range(3):
            asking = asyncio.create_task(ask(door, "ada", limits, 1))
            await asyncio.sleep(0)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
        assert await admitted(door, limits) is not None


@pytest.mark.security
async def test_a_killed_door_gives_no_budget_back_but_its_places(deployment: Deployment) -> None:
    limits = Limits(requests_per_minute=5, concurrent_requests=2)
    async with deployment.door("door-1") as other:
        async with deployment.door("door-0") as killed:
            assert await admitted(killed, limits)
            assert await admitted(killed, limits)
        # It may only have lost its connection and still serve both.
        assert await admitted(other, limits) is None
        async with deployment.door("door-0") as restarted:
            await until(lambda: deployment.service.ledger.running("ada") == 0)
            tickets = [await admitted(restarted, limits) for _ in range(2)]
            for ticket in tickets:
                assert ticket is not None
                settle(restarted, ticket, 1)
            assert await admitted(restarted, limits) is not None
            assert await admitted(other, limits) is None  # the sixth in this minute


@pytest.mark.security
async def test_a_door_that_is_cut_off_admits_nothing_until_it_is_back(
    deployment: Deployment,
) -> None:
    limits = Limits(requests_per_minute=4, tokens_per_minute=100, concurrent_requests=2)
    async with deployment.door("door-0") as door, deployment.door("door-1") as other:
        running_one, ended = await admitted(door, limits, 20), await admitted(door, limits, 20)
        assert running_one is not None
        assert ended is not None
        await deployment.server.stop()
        await until(lambda: not connected(door) and not connected(other))
        with pytest.raises(RegistryError, match="cannot be reached"):
            await ask(door, "ada", limits, 1)
        settle(door, ended, 5)
        await deployment.listen()
        await until(lambda: connected(door) and connected(other))
        await until(lambda: deployment.service.ledger.running("ada") == 1)
        # Nothing was lost or given twice: 20 and 5 tokens, and two of four requests.
        assert await admitted(other, limits, 76) is None
        assert await admitted(other, limits, 75) is not None
        assert await admitted(door, limits, 0) is None
        settle(door, running_one, 0)
        assert await admitted(door, limits, 0) is not None
        deployment.clock.now_s += 1
        assert await admitted(door, limits, 0) is None


async def test_a_ledger_that_does_not_answer_is_waited_for_only_shortly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("commutator_limits.limiter._ANSWER_TIMEOUT_S", 0.05)

    class Mute(LedgerService):
        def connected(self, connection: Connection) -> Receiver:
            return Nothing()

    class Nothing(Receiver):
        def on_frame(self, frame: list[Any]) -> None:
            pass

    mute = RegistryServer(MemoryRegistry(), [Mute()])
    address = await mute.start()
    limiter = SharedLimiter("door-0", Hub(address))
    async with running(limiter):
        await until(lambda: connected(limiter))
        with pytest.raises(RegistryError, match="cannot be reached"):
            await ask(limiter, "ada", Limits(requests_per_minute=1), 1)
    await mute.stop()


async def test_a_door_that_is_alone_asks_nobody(deployment: Deployment) -> None:
    alone = LocalLimiter("door-0", clock=deployment.clock)
    limits = Limits(requests_per_minute=1)
    assert await admitted(alone, limits) is not None
    assert await admitted(alone, limits) is None
    assert not deployment.server.connections


@pytest.mark.security
async def test_a_door_without_a_copy_remembers_no_principal_for_it(deployment: Deployment) -> None:
    alone = LocalLimiter("door-0", clock=deployment.clock)
    ticket = await admitted(alone, Limits(requests_per_minute=1))
    assert ticket is not None
    settle(alone, ticket, 1)
    assert alone._changed == set()


@pytest.mark.security
async def test_the_restart_of_a_door_that_is_alone_resets_no_limit(deployment: Deployment) -> None:
    limits = Limits(requests_per_minute=3, tokens_per_day=100, concurrent_requests=2)
    ledger = deployment.service.ledger

    def noted() -> int:
        _, accounts = ledger.accounts(deployment.clock())
        return sum(one.day_tokens for one in accounts)

    alone = LocalLimiter("door-0", Hub(deployment.address), deployment.clock)
    async with running(alone):
        await alone.ready.wait()
        ticket = await admitted(alone, limits, 30)
        assert ticket is not None
        settle(alone, ticket, 10)
        assert await admitted(alone, limits, 50) is not None
        await until(lambda: noted() == 60)
    restarted = LocalLimiter("door-0", Hub(deployment.address), deployment.clock)
    async with running(restarted):
        await restarted.ready.wait()
        assert await admitted(restarted, limits, 41) is None
        ticket = await admitted(restarted, limits, 40)
        assert ticket is not None
        settle(restarted, ticket, 0)
        assert await admitted(restarted, limits, 0) is None  # the fourth in this minute


@pytest.mark.security
async def test_what_a_killed_door_used_of_its_allowance_counts_at_its_successor(
    deployment: Deployment,
) -> None:
    limits = Limits(requests_per_minute=1_000)
    service = deployment.service
    alone = LocalLimiter("door-0", Hub(deployment.address), deployment.clock)
    async with running(alone):
        await alone.ready.wait()
        for _ in range(5):  # all but the first are within its allowance, and not reported yet
            assert await admitted(alone, limits) is not None
        await until(lambda: len(service.ledger) > 0)
    assert not alone._batches.keys() - {1}
    restarted = LocalLimiter("door-0", Hub(deployment.address), deployment.clock)
    async with running(restarted):
        await restarted.ready.wait()
        ticket = await admitted(restarted, limits)
        assert ticket is not None
        assert ticket.standing.remaining_requests is not None
        # At most one part in 16 is allowed to the former, and to this one.
        assert 994 - 2 * 63 <= ticket.standing.remaining_requests <= 994


async def ask_raw(deployment: Deployment, *frames: list[object]) -> FrameProtocol:
    connection = await connect(deployment.address, lambda _: None, lambda: None)
    for frame in frames:
        connection.send(frame)
    return connection


@pytest.mark.parametrize(
    "frame",
    [
        [SERVICE],
        [SERVICE, "admit", 1, "ada", [1, 1, 1, 1], 1, 0, 0],
        [SERVICE, "report", [], [[1, 1, 0, 0, 0]], []],
        [SERVICE, "open", "door-0", "x", ["no number"]],
        [SERVICE, "open", "door-0", "x", [[1, -1, "ada"]]],
        [SERVICE, "open", "door-0", 7, []],
        [[SERVICE]],
    ],
)
async def test_a_frame_that_no_door_sends_ends_the_connection(
    deployment: Deployment, frame: list[object]
) -> None:
    connection = await ask_raw(deployment, frame)
    assert connection.transport is not None
    await until(lambda: not deployment.server.connections)
    assert not deployment.service.ledger.accounts(deployment.clock())[1]
    connection.close()


async def test_what_comes_late_on_an_earlier_connection_counts_no_more(
    deployment: Deployment,
) -> None:
    limits = [9, 9, 9, 9]
    first = await ask_raw(deployment, [SERVICE, "open", "door-0", "x", []])
    await until(lambda: "door-0" in deployment.service.latest)
    was = deployment.service.latest["door-0"]
    second = await ask_raw(deployment, [SERVICE, "open", "door-0", "x", []])
    await until(lambda: deployment.service.latest["door-0"] is not was)
    first.send([SERVICE, "admit", 1, "ada", limits, 1, 0, 0])
    first.send(["nonsense"])  # ends the connection, once it was read
    await until(lambda: len(deployment.server.connections) == 1)
    assert deployment.service.ledger.running("ada") == 0
    second.close()
