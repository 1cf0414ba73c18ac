"""One front door with a ledger, or several and one, over a simulated network: limits are exact.

The doors have allowances. Whatever comes when: no limit is exceeded, and nobody is refused for what
lies unused at another door. Doors that are killed or cut off may cost early refusals, but
never admit more.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from contextlib import suppress
from typing import Any, cast

import msgspec
import pytest
from attrs import define, field
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.connections import Sent
from tests.support.limits import ask, settle
from tests.support.virtual_time import in_virtual_time

from commutator.contract.limiter import RequestLimiter
from commutator.contract.principal import Limits
from commutator.errors import RateLimitError, RegistryError
from commutator.frames import FrameProtocol
from commutator.registry.hub import Hub
from commutator_limits.ledger import WINDOW_S, Moment
from commutator_limits.limiter import CountingLimiter, LocalLimiter, SharedLimiter
from commutator_limits.service import LedgerService

DAY_BEGAN_S = 7 * 86_400.0
SETTLED_S = 0.3
"""By then the ledger knows of the end of a request that has its answer."""
LONGER_S = 6.5
"""A request stays in the window for so much longer than a minute: a slot, and until reported on."""
RETURNED_S = 67.0
"""By then doors return what they do not use."""


def loop_time() -> float:
    return asyncio.get_running_loop().time()


def moment() -> Moment:
    return Moment(loop_time(), DAY_BEGAN_S + loop_time())


@define(eq=False)
class Wire:
    """One door's connection: frames arrive in order, each a little later."""

    chance: random.Random
    to_ledger: Callable[[list[Any]], None]
    to_door: Callable[[list[Any]], None]
    on_lost: Callable[[], None]
    is_open: bool = True
    arrives_s: dict[str, float] = field(factory=dict)

    def carry(self, way: str, frame: list[Any]) -> None:
        at_s = max(self.arrives_s.get(way, 0.0), loop_time() + self.chance.uniform(0.0, 0.01))
        self.arrives_s[way] = at_s
        asyncio.get_running_loop().call_at(at_s, self.arrive, way, frame)

    def arrive(self, way: str, frame: list[Any]) -> None:
        if self.is_open:
            (self.to_ledger if way == "up" else self.to_door)(frame)

    def send(self, frame: list[Any]) -> None:
        if self.is_open:
            self.carry("up", msgspec.msgpack.decode(msgspec.msgpack.encode(frame)))

    def close(self) -> None:
        self.is_open = False

    def cut(self) -> None:
        self.is_open = False
        self.on_lost()


@define(eq=False)
class SimulatedHub:
    """The way to the ledger."""

    service: LedgerService
    chance: random.Random
    wires: list[Wire] = field(factory=list)

    async def connect(
        self, on_frame: Callable[[list[Any]], None], on_lost: Callable[[], None]
    ) -> FrameProtocol:
        await asyncio.sleep(0.01)
        wire = Wire(self.chance, lambda _: None, on_frame, on_lost)
        receiver = self.service.connected(Sent(lambda frame: wire.carry("down", frame)))
        wire.to_ledger = receiver.on_frame
        self.wires.append(wire)
        return cast(FrameProtocol, wire)


@define(eq=False)
class Request:
    """One that was asked for."""

    principal: str
    asked_s: float
    charged: int
    admitted_s: float | None = None
    ended_s: float | None = None
    took: int | None = None

    def charge(self, now_s: float) -> int:
        """The most that the ledger may count for it."""
        known = self.ended_s is not None and now_s - self.ended_s > SETTLED_S
        return (self.took or 0) if known else max(self.charged, self.took or 0)

    def counts(self, now_s: float) -> bool:
        """Whether the ledger may count it as a request."""
        return self.took != 0 or self.charge(now_s) > 0

    @property
    def least(self) -> int:
        """What it counts as at least, in the window of its admission."""
        return min(self.charged, self.charged if self.took is None else self.took)


@define(eq=False)
class World:
    limits: Limits
    chance: random.Random
    exact: bool
    service: LedgerService = field(factory=lambda: LedgerService(moment))
    log: list[Request] = field(factory=list)

    def check_admitted(self, request: Request) -> None:
        """No limit is exceeded, whatever window is looked at."""
        now_s = loop_time()
        mine = [one for one in self.log if one.principal == request.principal and one.admitted_s]
        window = [one for one in mine if (one.admitted_s or 0.0) > now_s - WINDOW_S]
        limits = self.limits
        if limits.requests_per_minute is not None:
            assert sum(one.took != 0 for one in window) <= limits.requests_per_minute
        if limits.tokens_per_minute is not None:
            assert sum(one.least for one in window) <= limits.tokens_per_minute
        if limits.tokens_per_day is not None:
            assert sum(one.least for one in mine) <= limits.tokens_per_day
        if limits.concurrent_requests is not None:
            running = sum(one.ended_s is None for one in mine)
            assert running <= limits.concurrent_requests

    def check_refused(self, request: Request, refusal: RateLimitError) -> None:
        """There is no room by what all doors used: what one holds ahead refuses nobody."""
        if not self.exact:
            return
        now_s = loop_time()
        mine = [
            one for one in self.log if one.principal == request.principal and one is not request
        ]
        since_s = now_s - WINDOW_S - LONGER_S - SETTLED_S
        window = [one for one in mine if one.asked_s > since_s]
        used = {
            "requests_per_minute": sum(one.counts(now_s) for one in window) + 1,
            "tokens_per_minute": sum(one.charge(now_s) for one in window) + request.charged,
            "tokens_per_day": sum(one.charge(now_s) for one in mine) + request.charged,
            "concurrent_requests": 1
            + sum(one.ended_s is None or now_s - one.ended_s < SETTLED_S for one in mine),
        }[refusal.limit]
        assert used > getattr(self.limits, refusal.limit)

    async def client(self, door: RequestLimiter, principal: str, until_s: float) -> None:
        """Requests of one connection, one after another."""
        chance = self.chance
        while loop_time() < until_s:
            await asyncio.sleep(chance.expovariate(chance.choice([0.5, 5.0, 50.0])))
            request = Request(principal, loop_time(), chance.randint(1, 8))
            self.log.append(request)
            patience_s = chance.choice([0.005, 60.0, 60.0, 60.0])
            try:
                async with asyncio.timeout(patience_s):
                    answer = await ask(door, principal, self.limits, request.charged)
            except RegistryError:
                self.log.remove(request)
                continue
            except TimeoutError:
                request.ended_s, request.took = loop_time(), 0
                continue
            if isinstance(answer, RateLimitError):
                self.check_refused(request, answer)
                self.log.remove(request)
                continue
            request.admitted_s = loop_time()
            self.check_admitted(request)
            await asyncio.sleep(chance.choice([0.0, 0.02, 0.5]))
            request.took = chance.choice([request.charged, chance.randint(1, request.charged)])
            request.ended_s = loop_time()
            settle(door, answer, request.took)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 1 << 32),
    requests=st.none() | st.integers(20, 2_000),
    tokens=st.none() | st.integers(100, 8_000),
    day=st.none() | st.integers(200, 10_000),
    concurrent=st.none() | st.integers(3, 200),
    doors=st.integers(1, 4),
    faults=st.booleans(),
)
def test_no_limit_is_exceeded_and_none_refuses_early(
    seed: int,
    requests: int | None,
    tokens: int | None,
    day: int | None,
    concurrent: int | None,
    doors: int,
    faults: bool,
) -> None:
    limits = Limits(
        requests_per_minute=requests,
        tokens_per_minute=tokens,
        tokens_per_day=day,
        concurrent_requests=concurrent,
    )

    @in_virtual_time
    async def run() -> None:
        chance = random.Random(seed)
        world = World(limits, chance, exact=not faults)
        hubs = [SimulatedHub(world.service, chance) for _ in range(doors)]
        limiters: list[CountingLimiter] = [
            SharedLimiter(f"door-{n}", cast(Hub, hub)) for n, hub in enumerate(hubs)
        ]
        ledger = world.service.ledger
        if doors == 1:
            alone = LocalLimiter("door-0", clock=moment)
            limiters, ledger = [alone], alone._ledger
        links = [asyncio.create_task(limiter.run()) for limiter in limiters]
        await asyncio.sleep(0.1)
        until_s = 100.0
        clients = [
            asyncio.create_task(world.client(limiter, principal, until_s))
            for limiter in limiters
            for principal in ("ada", "ada", "bob")
        ]
        while faults and loop_time() < until_s:
            await asyncio.sleep(chance.uniform(0.0, 10.0))
            if wires := chance.choice(hubs).wires:
                wires[-1].cut()
        await asyncio.gather(*clients)
        await asyncio.sleep(RETURNED_S)
        for principal in ("ada", "bob"):
            assert ledger.running(principal) == 0, "everything was given back"
        if not faults:
            for limiter in limiters:
                assert not limiter._batches
                assert not limiter._senders
            assert not any(one.allowed for one in world.service.latest.values())
            for account in ledger._accounts.values():
                assert (account.held_requests, account.held_tokens) == (0, 0)
        for task in links:
            task.cancel()
        with suppress(asyncio.CancelledError):
            await asyncio.gather(*links)

    run()


@pytest.mark.parametrize(
    ("interval_s", "questions", "reports"), [(0.005, 10, 20), (20.0, 2, 2_100)]
)
@in_virtual_time
async def test_a_principal_far_from_its_limits_costs_few_questions(
    interval_s: float, questions: int, reports: int
) -> None:
    chance = random.Random(5)
    world = World(Limits(requests_per_minute=1_000_000), chance, exact=True)
    hub = SimulatedHub(world.service, chance)
    limiter = SharedLimiter("door-0", cast(Hub, hub))
    link = asyncio.create_task(limiter.run())
    await asyncio.sleep(0.1)
    asked: list[list[Any]] = []
    (wire,) = hub.wires
    to_ledger = wire.to_ledger

    def counted(frame: list[Any]) -> None:
        asked.append(frame)
        to_ledger(frame)

    wire.to_ledger = counted
    for _ in range(1_000):
        answer = await ask(limiter, "ada", world.limits, 100)
        assert not isinstance(answer, RateLimitError)
        await asyncio.sleep(interval_s)
        settle(limiter, answer, 50)
    assert sum(frame[1] == "admit" for frame in asked) < questions
    assert sum(frame[1] == "report" for frame in asked) < reports
    link.cancel()


@in_virtual_time
async def test_a_hung_door_delays_a_refusal_only_once() -> None:
    """What it was allowed stays charged, as it may use it yet."""
    chance = random.Random(5)
    limits = Limits(requests_per_minute=100)
    world = World(limits, chance, exact=False)
    hubs = [SimulatedHub(world.service, chance) for _ in range(2)]
    hung, other = (SharedLimiter(f"door-{n}", cast(Hub, hub)) for n, hub in enumerate(hubs))
    links = [asyncio.create_task(one.run()) for one in (hung, other)]
    await asyncio.sleep(0.1)
    admitted = held = 0
    while not held:
        assert not isinstance(await ask(hung, "ada", limits, 1), RateLimitError)
        admitted += 1
        held = hung._senders["ada"].requests
    hubs[0].wires[0].is_open = False
    admitted, waits_s = admitted + held, []
    while True:
        began_s = loop_time()
        answer = await ask(other, "ada", limits, 1)
        if isinstance(answer, RateLimitError):
            waits_s.append(loop_time() - began_s)
            if len(waits_s) == 2:
                break
        else:
            admitted += 1
    assert admitted == 100
    assert waits_s[0] > 0.25
    assert waits_s[1] < 0.03
    for link in links:
        link.cancel()
