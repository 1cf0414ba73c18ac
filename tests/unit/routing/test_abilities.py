"""Requests that ask more than every engine can do: refused by name, or routed to those that can."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from attrs import evolve
from tests.unit.routing.apart_world import World as Apart
from tests.unit.routing.test_dispatcher import FakeClient, Setup
from tests.unit.routing.test_dispatcher import request as plain_request
from tests.unit.routing.test_migrating import INFO, LOST, PROMPT, Worker, World, tokens

from commutator import (
    AdapterIdentity,
    Constraint,
    GenerateRequest,
    OptionType,
    RequestOption,
    SamplingParams,
)
from commutator.errors import EngineUnavailableError, RequestError, RoutingError

REGEX = Constraint(kind="regex", value="a+")
SQL = AdapterIdentity(name="sql", digest="a" * 64)


async def up(setup: Setup, name: str, **abilities: Any) -> None:
    client = setup.connector.clients[name] = FakeClient(name)
    client.info = evolve(client.info, **abilities)
    await setup.up(name)


async def served_by(setup: Setup, count: int = 4, **asks: Any) -> set[str]:
    """The workers that such requests get."""
    found = set()
    for number in range(count):
        one = evolve(plain_request(str(number)), **asks)
        async with contextlib.aclosing(await setup.dispatcher.dispatch("m", one)) as dispatch:
            found.add(dispatch.worker_id)
    return found


async def test_what_some_can_do_only_those_are_asked() -> None:
    setup = Setup()
    await up(setup, "w-0")
    await up(setup, "w-1", constraints=("regex",))
    await up(setup, "w-2", constraints=("regex",), adapters=True)
    words = RequestOption(type=OptionType.STRINGS)
    await up(setup, "w-3", request_options={"bad_words": words})
    assert await served_by(setup) == {"w-0", "w-1", "w-2", "w-3"}
    assert await served_by(setup, constraint=REGEX) == {"w-1", "w-2"}
    assert await served_by(setup, constraint=REGEX, adapter=SQL) == {"w-2"}
    assert await served_by(setup, options={"bad_words": ["a"]}) == {"w-3"}
    await setup.dispatcher.close()


@pytest.mark.parametrize(
    ("asks", "param", "text"),
    [
        ({"constraint": REGEX}, "response_format", "fake cannot make an answer follow .* regex"),
        ({"adapter": SQL}, "model", r'fake has no adapters, here "sql" \(aaaaaaaaaaaa\)'),
        ({"options": {"depth": 1}}, "depth", "fake has no option 'depth'; it has steps"),
        ({"options": {"steps": "1"}}, "steps", "steps: expected an integer, got '1'"),
    ],
)
async def test_what_none_can_do_is_refused_before_anything_is_routed(
    asks: dict[str, Any], param: str, text: str
) -> None:
    setup = Setup()
    for name in ("w-0", "w-1"):
        await up(setup, name, request_options={"steps": RequestOption(type=OptionType.INTEGER)})
    refusal = f'no worker of model "m" can serve this: {text}$'
    with pytest.raises(RequestError, match=refusal) as got:
        await served_by(setup, **asks)
    assert got.value.param == param
    assert setup.watcher.seen == ["up", "up"], "no hook has seen it"
    await setup.dispatcher.close()


async def test_who_does_not_generate_is_asked_for_nothing() -> None:
    setup = Setup()
    await up(setup, "w-0", operations=("embed",))
    with pytest.raises(RequestError, match="fake does not generate: it can embed"):
        await served_by(setup)
    await up(setup, "w-1")
    assert await served_by(setup) == {"w-1"}
    await setup.dispatcher.close()


async def test_without_a_worker_nothing_is_known_of_abilities() -> None:
    with pytest.raises(RoutingError, match="no worker is ready"):
        await served_by(Setup(), constraint=REGEX)


async def test_known_hashes_of_a_plain_prompt_are_not_those_of_an_adapter() -> None:
    setup = Setup(router="kv")
    await up(setup, "w-0", adapters=True)
    plain = plain_request("a")
    routes = []
    for one in (plain, evolve(plain, adapter=SQL)):
        dispatch = await setup.dispatcher.dispatch("m", one, sequence_hashes=[77])
        routes.append(list(dispatch.route.sequence_hashes))
        await dispatch.aclose()
    assert routes[0] == [77]
    assert 77 not in routes[1]
    await setup.dispatcher.close()


@pytest.mark.parametrize("at", [0, 4])
async def test_after_a_loss_only_who_can_goes_on(at: int) -> None:
    """No engine goes on in the middle of a constraint: it would begin it again."""
    able = evolve(INFO, constraints=("regex",))
    world = World()
    await world.up("w-0", Worker([(at, LOST)], info=able))
    await world.up("w-1")
    await world.up("w-2", Worker(info=able))
    request = GenerateRequest(
        request_id="r", token_ids=PROMPT, sampling=SamplingParams(max_tokens=10), constraint=REGEX
    )
    async with contextlib.aclosing(await world.dispatcher.dispatch("m", request)) as dispatch:
        if at:
            with pytest.raises(EngineUnavailableError):
                _ = [delta async for delta in dispatch]
        else:
            assert tokens([delta async for delta in dispatch]) == list(range(10))
            assert dispatch.worker_id == "w-2"
    assert not world.workers["w-1"].asked
    await world.dispatcher.close()


async def test_a_prefill_worker_must_be_able_as_well() -> None:
    world = Apart()
    prefill = await world.up("p-0")
    await world.up("d-0", info=evolve(prefill.info, constraints=("regex",)))
    request = GenerateRequest(
        request_id="r", token_ids=PROMPT, sampling=SamplingParams(max_tokens=2), constraint=REGEX
    )
    async with contextlib.aclosing(await world.dispatcher.dispatch("m", request)) as dispatch:
        assert not dispatch.separate
        _ = [delta async for delta in dispatch]
    assert not prefill.asked
    assert world.told == [], "the policy is not asked, as nobody could prefill"
    await world.dispatcher.close()
