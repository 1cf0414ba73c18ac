"""A request whose worker fails: where it continues, how often, and how that is reported."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from attrs import define, evolve, field
from tests.support.virtual_time import in_virtual_time

from commutator.config.model import Config, MigrationConfig
from commutator.contract.engine import (
    EngineClient,
    EngineConfig,
    EngineConnector,
    LaunchContext,
    ModelConfig,
)
from commutator.contract.request import FinishReason, GenerateRequest, SamplingParams, TokenDelta
from commutator.contract.worker import EngineInfo, EngineLoad, WorkerRecord
from commutator.errors import (
    EngineError,
    EngineIncompleteError,
    EngineOverloadedError,
    EngineUnavailableError,
)
from commutator.hookspecs import hookimpl
from commutator.plugins import Installed, load_plugins
from commutator.routing.dispatch import Dispatch
from commutator.routing.dispatcher import Dispatcher

PROMPT = [7] * 20
INFO = EngineInfo(
    kind="fake",
    version="1",
    model="m",
    max_model_len=128,
    block_size=16,
    kv_capacity_blocks=64,
    continues_answers=True,
)


@define
class Worker(EngineClient):
    """Answers a request with 0, 1, 2, ...; its ``troubles`` come one a request, at their token."""

    troubles: list[tuple[int, Exception | TokenDelta | None]] = field(factory=list)
    info: EngineInfo = INFO
    asked: list[GenerateRequest] = field(factory=list)
    open: int = 0
    silent: bool = False
    """It leaves pings unanswered."""
    changed: Callable[[], None] = lambda: None

    @property
    def answers(self) -> bool:
        return not self.silent

    def watch_answers(self, changed: Callable[[], None]) -> None:
        self.changed = changed

    async def start(self) -> EngineInfo:
        return self.info

    def generate(self, request: GenerateRequest) -> Any:
        self.asked.append(request)
        trouble = self.troubles.pop(0) if self.troubles else (10_000, None)
        return self._answer(request, *trouble)

    async def _answer(
        self, request: GenerateRequest, at: int, what: Exception | TokenDelta | None
    ) -> AsyncIterator[TokenDelta]:
        self.open += 1
        try:
            for token in range(request.generated_prefix, request.sampling.max_tokens + 1):
                await asyncio.sleep(0)
                if token == at:
                    if isinstance(what, Exception):
                        raise type(what)(*what.args)
                    if what is not None:
                        yield what
                    return
                last = token == request.sampling.max_tokens - 1
                yield TokenDelta(
                    token_ids=(token,),
                    cached_tokens=16 if token == request.generated_prefix else None,
                    finish_reason=FinishReason.LENGTH if last and at > token + 1 else None,
                )
        finally:
            self.open -= 1

    async def load(self) -> EngineLoad:
        return EngineLoad()

    async def close(self) -> None:
        pass


LOST = EngineUnavailableError("connection reset")
FULL = EngineOverloadedError("full")


class World:
    """A dispatcher over scripted workers, and what its hooks saw."""

    def __init__(self, *, router: str = "round_robin", **migration: Any) -> None:
        self.workers: dict[str, Worker] = {}
        self.seen: list[str] = []
        self.outcome: Any = None
        self.reasons: list[str] = []
        world = self

        class Connector(EngineConnector[EngineConfig]):
            def launch_plan(self, config: EngineConfig, context: LaunchContext) -> None:
                return None

            def connect(self, config: EngineConfig, address: str) -> EngineClient:
                return world.workers[address]

        class Plugin:
            @hookimpl
            def engine_register(self, register: Any) -> None:
                register("fake", EngineConfig, Connector())

            @hookimpl
            def request_routed(self, decision: Any) -> None:
                world.seen.append(f"routed to {decision.worker_id}")

            @hookimpl
            def request_first_token(self) -> None:
                world.seen.append("first token")

            @hookimpl
            def request_migrated(
                self, from_worker: str, to_worker: str, reason: str, generated_tokens: int
            ) -> None:
                moved = f"{from_worker} to {to_worker}: {reason} after {generated_tokens}"
                world.seen.append(moved)
                world.reasons.append(reason)

            @hookimpl
            def request_finished(self, outcome: Any) -> None:
                world.seen.append("finished")
                world.outcome = outcome

            @hookimpl
            def request_failed(self, error: BaseException) -> None:
                world.seen.append(f"failed: {type(error).__name__}")

        host = load_plugins()
        host.add(Plugin(), Installed("fake", "dist-fake", "1"))
        config = Config(
            models=(ModelConfig(name="m", source="-"),),
            engines=(EngineConfig(kind="fake", name="e", model="m"),),
            router=host.routers.kinds[router].config_class(kind=router),
            migration=MigrationConfig(**{"wait_s": 0.0, **migration}),
        )
        self.dispatcher = Dispatcher(config, host, random.Random(1))

    async def up(
        self, name: str, worker: Worker | None = None, address: str = "", host: str = ""
    ) -> Worker:
        worker = self.workers[address or name] = worker or Worker()
        record = WorkerRecord(
            worker_id=name,
            engine="e",
            kind="fake",
            model="m",
            address=address or name,
            info=worker.info,
            host=host,
        )
        await self.dispatcher.membership.worker_up(record)
        return worker

    async def three(self, *troubles: tuple[int, Exception | TokenDelta | None]) -> None:
        """Workers w-0, w-1, w-2; each has its trouble."""
        for number in range(3):
            await self.up(f"w-{number}", Worker(list(troubles[number : number + 1])))

    async def begin(self, max_tokens: int = 10, **dispatch: Any) -> Dispatch:
        request = GenerateRequest(
            request_id="r", token_ids=PROMPT, sampling=SamplingParams(max_tokens=max_tokens)
        )
        return await self.dispatcher.dispatch("m", request, **dispatch)

    async def run(self, max_tokens: int = 10, **dispatch: Any) -> list[TokenDelta]:
        begun = await self.begin(max_tokens, **dispatch)
        try:
            return [delta async for delta in begun]
        finally:
            await begun.aclose()
            self.check_closed()

    def check_closed(self) -> None:
        assert sum(worker.active_requests for worker in self.dispatcher.status()) == 0
        assert sum(worker.requests for worker in self.dispatcher._workers.all()) == 0
        assert all(worker.open == 0 for worker in self.workers.values())
        ends = [what for what in self.seen if what.startswith(("finished", "failed"))]
        assert len(ends) == 1


def tokens(deltas: list[TokenDelta]) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]


async def test_a_lost_worker_is_replaced_without_a_trace_in_the_answer() -> None:
    world = World()
    await world.three((4, LOST))
    deltas = await world.run()
    assert tokens(deltas) == list(range(10))
    assert deltas[-1].finish_reason is FinishReason.LENGTH
    assert [d.cached_tokens for d in deltas if d.cached_tokens is not None] == [16]
    assert world.seen == [
        "routed to w-0",
        "first token",
        "w-0 to w-1: connection_lost after 4",
        "routed to w-1",
        "finished",
    ]
    assert world.outcome.generated_tokens == 10
    assert world.outcome.cached_tokens == 16
    assert world.reasons == ["connection_lost"]
    assert world.outcome.recomputed_tokens == 20 + 4 - 16
    rest = world.workers["w-1"].asked[0]
    assert (rest.token_ids, rest.generated_prefix) == ([*PROMPT, 0, 1, 2, 3], 4)
    assert rest.sampling == world.workers["w-0"].asked[0].sampling
    await world.dispatcher.close()


@pytest.mark.parametrize(("host", "to_worker"), [("h2", "w-2"), ("h1", "w-1")])
async def test_workers_of_other_hosts_than_the_lost_one_come_first(
    host: str, to_worker: str
) -> None:
    world = World()
    await world.up("w-0", Worker([(4, LOST)]), host="h1")
    await world.up("w-1", host="h1")
    await world.up("w-2", host=host)
    assert tokens(await world.run()) == list(range(10))
    assert f"w-0 to {to_worker}: connection_lost after 4" in world.seen
    await world.dispatcher.close()


@in_virtual_time
async def test_a_worker_that_leaves_pings_unanswered_may_be_lost_as_well() -> None:
    """As when the front door is cut off from all: the next would cost the only migration."""
    world = World(wait_s=5.0)
    await world.up("w-0", Worker([(4, LOST)]), host="h1")
    other = await world.up("w-1", Worker(silent=True), host="h2")
    running = asyncio.create_task(world.run())
    await asyncio.sleep(4.0)
    assert other.asked == []
    other.silent = False
    other.changed()
    assert tokens(await running) == list(range(10))
    assert world.reasons == ["connection_lost"]
    await world.dispatcher.close()


@pytest.mark.parametrize(
    ("config", "asked", "ends"),
    [(1, None, "failed"), (2, None, "finished"), (2, 1, "failed"), (0, 5, "failed"), (2, 0, "")],
)
async def test_only_as_often_as_config_and_request_allow(
    config: int, asked: int | None, ends: str
) -> None:
    world = World(limit=config)
    await world.three((3, LOST), (6, LOST))
    if ends == "finished":
        assert tokens(await world.run(migration_limit=asked)) == list(range(10))
    else:
        with pytest.raises(EngineUnavailableError, match="connection reset"):
            await world.run(migration_limit=asked)
    limit = min(config, config if asked is None else asked)
    assert world.reasons.count("connection_lost") == min(limit, 2)
    await world.dispatcher.close()


async def test_overload_moves_without_counting_or_blaming() -> None:
    world = World(limit=0)
    await world.three((0, FULL), (0, FULL))
    begun = await world.begin()
    assert tokens([delta async for delta in begun]) == list(range(10))
    assert begun.worker_ids == ("w-2",)
    assert [moved["reason"] for moved in begun.explain()["migrations"]] == ["overloaded"] * 2
    assert [worker.state for worker in world.dispatcher.status()] == ["ready"] * 3
    await begun.aclose()
    world.check_closed()


async def test_when_all_are_full_it_is_said_at_once() -> None:
    world = World(wait_s=60.0)
    await world.three((0, FULL), (0, FULL), (0, FULL))
    with pytest.raises(EngineOverloadedError):
        await world.run()
    assert [len(worker.asked) for worker in world.workers.values()] == [1, 1, 1]


async def test_a_lost_stream_waits_for_room() -> None:
    world = World(wait_s=60.0)
    await world.up("w-0", Worker([(5, LOST)]))
    await world.up("w-1", Worker([(5, FULL), (5, FULL)]))
    assert tokens(await world.run()) == list(range(10))
    await world.dispatcher.close()


async def test_an_engine_that_cannot_continue_is_asked_only_from_the_beginning() -> None:
    plain = evolve(INFO, continues_answers=False)
    for at in (0, 1):
        world = World()
        await world.up("w-0", Worker([(at, LOST)]))
        await world.up("w-1", Worker(info=plain))
        if at:
            with pytest.raises(EngineUnavailableError):
                await world.run()
            assert not world.workers["w-1"].asked
        else:
            assert tokens(await world.run()) == list(range(10))
        await world.dispatcher.close()


@pytest.mark.parametrize("what", [None, TokenDelta(finish_reason=FinishReason.ABORT)])
async def test_a_stream_that_just_ends_goes_on_too(what: TokenDelta | None) -> None:
    world = World()
    await world.three((4, what))
    assert tokens(await world.run()) == list(range(10))
    assert world.reasons[0] == "incomplete_stream"
    assert [worker.state for worker in world.dispatcher.status()] == ["ready"] * 3
    world = World(limit=0)
    await world.three((4, what))
    with pytest.raises(EngineIncompleteError):
        await world.run()


async def test_what_another_worker_would_answer_the_same_is_not_moved() -> None:
    world = World()
    await world.three((4, EngineError("logits are not finite")))
    with pytest.raises(EngineError, match="not finite"):
        await world.run()
    assert not world.workers["w-1"].asked


async def test_a_stream_that_breaks_after_the_lease_has_lapsed_is_moved() -> None:
    world = World()
    await world.three((4, EngineUnavailableError("closed by us")))
    begun = await world.begin()
    got = [await anext(begun) for _ in range(4)]
    await world.dispatcher.membership.worker_down("w-0", "lease expired")
    got += [delta async for delta in begun]
    assert tokens(got) == list(range(10))
    assert world.reasons[0] == "lease_expired"
    await begun.aclose()


async def test_a_worker_whose_lease_lapsed_finishes_what_it_has_and_gets_nothing_new() -> None:
    world = World()
    await world.three()
    begun = await world.begin()
    got = [await anext(begun) for _ in range(4)]
    await world.dispatcher.membership.worker_down("w-0", "lease expired")
    got += [delta async for delta in begun]
    assert tokens(got) == list(range(10))
    await begun.aclose()
    assert not world.reasons
    world.seen.clear()
    assert tokens(await world.run()) == list(range(10))
    assert len(world.workers["w-0"].asked) == 1


@in_virtual_time
async def test_the_only_worker_is_waited_for_and_another_process_of_it_is_good() -> None:
    world = World(wait_s=5.0)
    await world.up("w-0", Worker([(4, LOST)]))
    running = asyncio.create_task(world.run())
    await asyncio.sleep(0.05)
    await world.dispatcher.membership.worker_down("w-0", "failed")
    await world.up("w-0", address="w-0 started again")
    assert tokens(await running) == list(range(10))
    assert len(world.workers["w-0"].asked) == 1


@in_virtual_time
async def test_a_client_that_leaves_meanwhile_closes_everything() -> None:
    world = World(wait_s=60.0)
    await world.up("w-0", Worker([(4, LOST)]))
    running = asyncio.create_task(world.run())
    await asyncio.sleep(0.05)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    world.check_closed()
    assert world.seen[-1] == "failed: CancelledError"
    await world.dispatcher.close()


async def test_nothing_is_tried_after_the_deadline() -> None:
    world = World(wait_s=60.0)
    await world.three((4, LOST))
    with pytest.raises(EngineUnavailableError):
        await world.run(deadline_s=asyncio.get_running_loop().time())
    assert not world.workers["w-1"].asked
    await world.dispatcher.close()


async def test_a_worker_lost_after_its_last_token_is_not_missed() -> None:
    world = World()
    await world.three((10, LOST))
    deltas = await world.run()
    assert tokens(deltas) == list(range(10))
    assert deltas[-1].finish_reason is FinishReason.LENGTH
    assert world.seen[-1] == "finished"
    assert not world.workers["w-1"].asked
    await world.dispatcher.close()


async def test_it_is_routed_by_prompt_and_answer_together() -> None:
    world = World(router="kv")
    await world.three((14, LOST), (14, LOST), (14, LOST))
    begun = await world.begin(max_tokens=30)
    before = len(begun.route.sequence_hashes)
    first = begun.worker_id
    for name, worker in world.workers.items():
        if name != first:
            worker.troubles.clear()
    assert tokens([delta async for delta in begun][:1]) == [0]
    assert begun.worker_id != first
    assert (before, len(begun.route.sequence_hashes)) == (1, 2), "20 tokens, then 34"
    await begun.aclose()
    await world.dispatcher.close()


async def test_draining_leaves_routing_and_lets_run() -> None:
    world = World()
    await world.up("w-0")
    await world.up("w-1")
    begun = await world.begin()
    await anext(begun)
    record = WorkerRecord(
        worker_id="w-0", engine="e", kind="fake", model="m", address="w-0", info=INFO
    )
    await world.dispatcher.membership.worker_up(evolve(record, draining=True))
    assert len([delta async for delta in begun]) == 9
    assert begun.worker_ids == ("w-0",)
    other = await world.begin()
    assert other.worker_id == "w-1"
    await other.aclose()


@pytest.mark.parametrize("limit", [0, 1])
async def test_a_request_leaves_drained_workers_as_often_as_they_are_stopped(limit: int) -> None:
    """That is no failure: the limit of migrations is for those."""
    world = World(limit=limit)
    await world.three((2, LOST), (4, EngineIncompleteError("stopped")))
    begun = await world.begin()
    generated: list[int] = []
    async for delta in begun:
        generated += delta.token_ids
        if begun.worker_id in {"w-0", "w-1"}:
            record = world.dispatcher._workers.get(begun.worker_id).record  # type: ignore[union-attr]
            await world.dispatcher.membership.worker_up(evolve(record, draining=True))
    assert generated == list(range(10))
    assert world.reasons == ["drained", "drained"]
    await begun.aclose()
    world.check_closed()
