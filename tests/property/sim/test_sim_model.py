"""The model's closed form against an implementation that makes every step and every token."""

from __future__ import annotations

import random
from math import inf
from typing import Any

from attrs import evolve, frozen
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.kv_integrity import check_integrity
from tests.support.sim_config import bandwidth, sim_config, sim_tier
from tests.support.step_by_step import StepByStep, told

from commutator.contract.eviction import EvictionConfig
from commutator.contract.request import KvRetention
from commutator.contract.tier import AdmissionConfig
from commutator_sim.config import SimConfig
from commutator_sim.events import (
    DEVICE,
    Event,
    Finished,
    FirstToken,
    Offloaded,
    Preempted,
    Removed,
    Steps,
    Stored,
)
from commutator_sim.model import SimModel
from commutator_sim.request import SimRequest

A_LONG_TIME_NS = 10**7


@frozen
class Script:
    """The actions of a driver: parameters, and actions by name."""

    parameters: SimConfig
    actions: list[tuple[Any, ...]]


ADMISSIONS = [
    AdmissionConfig(),
    AdmissionConfig(),
    AdmissionConfig(min_hits=2),
    AdmissionConfig(prompt_only=True),
]


def request_of(
    block_size: int, story: list[int], output: int, known_answer: bool, priority: int
) -> SimRequest:
    """Keys are chained over prompt and, if known, answer, as an engine chains token blocks."""
    tokens = story + ([9, *story] * output)[: output if known_answer else 0]
    ends = range(block_size, len(tokens) + 1, block_size)
    keys = [hash((7, *tokens[:end])) for end in ends]
    return SimRequest(len(story), output, keys, priority)


def random_parameters(rng: random.Random) -> SimConfig:
    running = rng.randint(1, 5)
    names = rng.choice([[], ["host"], ["host", "disk"]])
    size = rng.randint(1, 4)
    return sim_config(
        prefill_tokens_per_s=1e9 / 3,
        decode_base_s=5e-9,
        decode_per_request_s=2e-9,
        max_running_requests=running,
        max_tokens_per_step=running + rng.randint(0, 12),
        block_size=size,
        kv_capacity_blocks=rng.randint(4, 14),
        tiers=tuple(
            sim_tier(
                name,
                rng.randint(1, 8),
                rng.randint(1, 40),
                block_size=size,
                latency_ns=rng.choice([0, 5]),
                write=rng.choice(["through", "on_evict"]),
                eviction=EvictionConfig(kind=rng.choice(["lru", "arc", "leaf_first"])),
                admission=rng.choice(ADMISSIONS),
                tenant_share=rng.choice([None, None, 0.5]),
            )
            for name in names
        ),
        handover_latency_s=rng.randint(0, 20) / 1e9,
        handover_bandwidth_bytes_per_s=bandwidth(rng.randint(1, 20), size),
    )


def random_request(rng: random.Random, parameters: SimConfig) -> SimRequest:
    """Small against the KV capacity, or as large as it; prefixes are often shared."""
    room = parameters.kv_capacity_blocks * parameters.block_size
    longest = max(1, room // rng.choice([2, 2, 4]))
    story = [0] * longest
    story[rng.randrange(longest)] = rng.randint(0, 1)
    prompt, output = story[: rng.randint(1, longest)], rng.randint(1, longest)
    request = request_of(
        parameters.block_size, prompt, output, rng.random() < 0.5, rng.choice([0, 0, 0, -1, 1])
    )
    return evolve(
        request,
        exports=rng.random() < 0.2,
        pulls=rng.choice([None] * 4 + [99, rng.randint(0, 3)]),
        tenant=rng.choice([None, None, "a"]),
        retention=rng.choice([(), (), (KvRetention(priority=1, pinned=True),)]),
    )


def alone(request: SimRequest) -> SimRequest:
    """The same requests without hand-overs."""
    return evolve(request, exports=False, pulls=None)


def random_script(seed: int) -> Script:
    """Drawn from a seed: hypothesis prefers scripts too short to fill a cache."""
    rng = random.Random(seed)
    parameters = random_parameters(rng)
    actions: list[tuple[Any, ...]] = []
    for name in rng.choices(
        ["submit", "advance", "offer", "release", "lose", "abort", "reset"],
        [6, 6, 2, 1, 0.5, 1, 0.2],
        k=rng.randint(1, 60),
    ):
        match name:
            case "submit":
                actions.append((name, random_request(rng, parameters)))
            case "advance":
                actions.append((name, rng.choice([0, 1, 7, 14, 30, 60, 300])))
            case "abort" | "release":
                actions.append((name, rng.randint(1, 8)))
            case "offer" | "lose":
                actions.append((name, rng.randint(1, 8), rng.randint(0, 4)))
            case _:
                actions.append((name,))
    return Script(parameters, [*actions, *hand_over_everything(actions)])


def hand_over_everything(actions: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """The other workers offer all pulled blocks, and later release those of this one."""
    submitted = [number for number, action in enumerate(actions) if action[0] == "submit"]
    last: list[tuple[Any, ...]] = []
    for number in submitted:
        last.append(("offer", len(actions) + len(last) - number, 99))
    last.append(("advance", A_LONG_TIME_NS))
    for number in submitted:
        last.append(("release", len(actions) + len(last) - number))
    return last


scripts = st.integers(0, 2**32).map(random_script)


def act(model: SimModel, number: int, action: tuple[Any, ...]) -> list[Event]:
    """Carry out one action of a script; returns the events until then."""
    match action:
        case ("submit", request):
            model.submit(number, request)
        case ("advance", ns):
            return model.advance(model.now_ns + ns)
        case ("abort", ago):
            model.abort(number - ago)
        case ("offer", ago, blocks):
            model.offer(number - ago, blocks)
        case ("lose", ago, blocks):
            model.keep(number - ago, blocks)
            model.abort(number - ago)
        case ("release", ago):
            model.release(number - ago)
        case ("reset",):
            model.reset_prefix_cache()
    return []


def play(script: Script) -> tuple[SimModel, list[Event]]:
    """Run the script on the model until nothing is left, and check its counts meanwhile."""
    model, events = SimModel(script.parameters), list[Event]()
    for number, action in enumerate(script.actions):
        events += act(model, number, action)
        assert model.cache.used_blocks + model.cache.idle_blocks <= model.cache.capacity_blocks
        assert model.running <= script.parameters.max_running_requests
    events += model.advance(model.now_ns + A_LONG_TIME_NS)
    return model, events


@settings(deadline=None, max_examples=300)
@given(scripts)
def test_equals_the_engine_that_makes_every_step(script: Script) -> None:
    _, events = play(script)
    reference = StepByStep(script.parameters)
    for number, action in enumerate(script.actions):
        match action:
            case ("submit", request):
                reference.submit(number, request)
            case ("advance", ns):
                reference.advance(reference.now + ns)
            case ("abort", ago):
                reference.abort(number - ago)
            case ("offer", ago, blocks):
                reference.offer(number - ago, blocks)
            case ("lose", ago, blocks):
                reference.keep(number - ago, blocks)
                reference.abort(number - ago)
            case ("release", ago):
                reference.release(number - ago)
            case ("reset",):
                reference.reset()
    reference.advance(reference.now + A_LONG_TIME_NS)
    # The reference tells of a step when it begins, the model when it ends.
    assert sorted(told(events)) == sorted(reference.out)
    without_steps = [entry for entry in told(events) if entry[0] != "step"]
    assert without_steps == [entry for entry in reference.out if entry[0] != "step"]


@settings(deadline=None)
@given(scripts)
def test_every_request_ends_once_and_leaves_nothing_behind(script: Script) -> None:
    model, events = play(script)
    assert (model.running, model.waiting, model.cache.used_blocks) == (0, 0, 0)
    assert model.tiers.manager.statistics().held_on_device == 0
    check_integrity(model.tiers.manager)
    submitted = {n for n, action in enumerate(script.actions) if action[0] == "submit"}
    finished = [event.key for event in events if isinstance(event, Finished)]
    first = [event.key for event in events if isinstance(event, FirstToken)]
    aborted = {
        n - action[1] for n, action in enumerate(script.actions) if action[0] in {"abort", "lose"}
    }
    assert len(set(finished)) == len(finished)
    assert len(set(first)) == len(first)
    assert submitted - aborted <= set(finished) <= set(first) <= submitted
    model.reset_prefix_cache()
    assert model.cache.idle_blocks == 0


@settings(deadline=None)
@given(scripts, st.integers(0, 2**32))
def test_it_does_not_matter_in_which_pieces_time_passes(script: Script, seed: int) -> None:
    rng = random.Random(seed)
    model, events = SimModel(script.parameters), list[Event]()
    for number, action in enumerate(script.actions):
        if action[0] == "advance":
            end_ns = model.now_ns + action[1]
            for _ in range(3):
                events += model.advance(rng.randint(model.now_ns, end_ns))
            events += model.advance(end_ns)
        else:
            events += act(model, number, action)
    events += model.advance(model.now_ns + A_LONG_TIME_NS)
    assert told(events) == told(play(script)[1])


@settings(deadline=None)
@given(scripts, st.integers(1, 5))
def test_at_no_speed_it_runs_until_all_is_done(script: Script, burst: int) -> None:
    """Driven by steps instead of by time: the same requests end, and time never stands still."""
    model, events = SimModel(script.parameters), list[Event]()
    for number, action in enumerate(script.actions):
        if action[0] == "advance":
            before_ns, busy = model.now_ns, model.running + model.waiting
            events += model.advance(max_steps=burst)
            assert model.now_ns > before_ns or not busy
        elif action[0] == "submit":
            model.submit(number, alone(action[1]))
        else:
            events += act(model, number, action)
    events += model.advance()
    assert (model.running, model.waiting, model.cache.used_blocks) == (0, 0, 0)
    ended = {event.key for event in events if isinstance(event, Finished)}
    submitted = {n for n, action in enumerate(script.actions) if action[0] == "submit"}
    aborted = {
        n - action[1] for n, action in enumerate(script.actions) if action[0] in {"abort", "lose"}
    }
    assert submitted - aborted <= ended


@settings(deadline=None)
@given(scripts)
def test_nothing_happens_before_the_announced_time(script: Script) -> None:
    model = SimModel(script.parameters)
    for number, action in enumerate(script.actions):
        if action[0] != "advance":
            act(model, number, action)
            continue
        end_ns = model.now_ns + action[1]
        while (next_ns := model.next_event_ns()) is not None and next_ns <= end_ns:
            model.advance(model.now_ns)  # what the step's beginning brought
            early = model.advance(max(model.now_ns, next_ns - 1))
            assert all(isinstance(event, Steps) for event in early)
            assert (model.step_end_ns() or 0) <= next_ns
            model.advance(next_ns)
        model.advance(end_ns)
    while (next_ns := model.next_event_ns()) is not None:
        model.advance(next_ns)
    assert (model.running, model.waiting) == (0, 0)


def follow(script: Script, events: list[Event]) -> dict[str, set[int]]:
    """The contents of each tier by the events alone; asserts that they are consistent and fit."""
    capacity: dict[str, int] = {tier.kind: tier.capacity_blocks for tier in script.parameters.tiers}
    capacity[DEVICE] = script.parameters.kv_capacity_blocks
    content: dict[str, set[int]] = {tier: set() for tier in capacity}
    for event in events:
        match event:
            case Stored(_, _, _, blocks):
                tier, new = DEVICE, set(blocks)
            case Offloaded(_, tier, blocks):
                new = set(blocks)
            case Removed(_, tier, blocks):
                assert content[tier] >= set(blocks), "removed what was not there"
                content[tier] -= set(blocks)
                continue
            case _:
                continue
        assert not content[tier] & new, "stored twice"
        assert event.blocks
        content[tier] |= new
    assert all(len(blocks) <= capacity[tier] for tier, blocks in content.items())
    return content


@settings(deadline=None)
@given(scripts)
def test_the_events_tell_exactly_what_is_cached(script: Script) -> None:
    model, events = play(script)
    content = follow(script, events)
    assert len(content[DEVICE]) == model.cache.idle_blocks
    assert all(key in model.cache for key in content[DEVICE])
    for cut in range(0, len(events), 5):
        follow(script, events[:cut])


@settings(deadline=None)
@given(scripts)
def test_prefix_hits_equal_a_recount(script: Script) -> None:
    """One request after the other: each finds the longest prefix that the events left behind.

    Where loading is faster than computing, all of it is loaded.
    """
    fast = tuple(
        evolve(tier, bandwidth_bytes_per_s=inf, latency_s=0.0) for tier in script.parameters.tiers
    )
    model = SimModel(evolve(script.parameters, tiers=fast))
    events = list[Event]()
    size = script.parameters.block_size
    for number, action in enumerate(script.actions):
        if action[0] != "submit":
            continue
        request = alone(action[1])
        content = follow(script, events)
        anywhere = set().union(*content.values())
        keys = list(request.block_keys)[: (request.prompt_tokens - 1) // size]
        cached = next((i for i, key in enumerate(keys) if key not in anywhere), len(keys))
        device = next((i for i, key in enumerate(keys) if key not in content[DEVICE]), len(keys))
        model.submit(number, request)
        happened = model.advance()
        (first,) = [event for event in happened if isinstance(event, FirstToken)]
        assert first.cached_tokens == cached * size
        assert first.loaded_tokens == max(0, cached - device) * size
        assert not any(isinstance(event, Preempted) for event in happened)
        events += happened


@given(scripts)
@settings(deadline=None, max_examples=30)
def test_the_same_script_gives_the_same_events(script: Script) -> None:
    assert play(script)[1] == play(script)[1]
