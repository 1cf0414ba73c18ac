"""Policies that look at load only: random, least loaded, power of two choices."""

from __future__ import annotations

import random
from collections.abc import Sequence

from attrs import frozen

from commutator import (
    Candidate,
    Decision,
    RouterConfig,
    RouteRequest,
    RouterRegister,
    RoutingPolicy,
    hookimpl,
)

__all__ = ["BalanceConfig", "LeastLoaded", "PowerOfTwo", "RandomChoice"]


@frozen(kw_only=True)
class BalanceConfig(RouterConfig):
    """These policies have no options."""


class RandomChoice(RoutingPolicy):
    """Any worker, each equally likely."""

    def __init__(self, config: BalanceConfig) -> None:
        del config

    def pick(
        self, request: RouteRequest, candidates: Sequence[Candidate], rng: random.Random
    ) -> Decision:
        chosen = rng.choice(candidates)
        return Decision(
            worker_id=chosen.worker_id,
            policy="random",
            reason=f"by lot among {len(candidates)} workers",
        )


class LeastLoaded(RoutingPolicy):
    """The worker with the least work in flight, ties by lot."""

    def __init__(self, config: BalanceConfig) -> None:
        del config

    def pick(
        self, request: RouteRequest, candidates: Sequence[Candidate], rng: random.Random
    ) -> Decision:
        return lightest("least_loaded", request, candidates, rng)


class PowerOfTwo(RoutingPolicy):
    """Two workers by lot, then the less loaded of them: nearly as even, and never a herd."""

    def __init__(self, config: BalanceConfig) -> None:
        del config

    def pick(
        self, request: RouteRequest, candidates: Sequence[Candidate], rng: random.Random
    ) -> Decision:
        two = rng.sample(candidates, min(2, len(candidates)))
        return lightest("power_of_two", request, two, rng)


def work_blocks(request: RouteRequest, candidate: Candidate) -> float:
    """Work in flight, in KV blocks: prompts still to be computed, and blocks being decoded."""
    load = candidate.load
    return load.active_prefill_tokens / request.block_size + load.active_decode_blocks


def lightest(
    policy: str, request: RouteRequest, candidates: Sequence[Candidate], rng: random.Random
) -> Decision:
    """The candidate with the least work in flight."""
    work = {c.worker_id: work_blocks(request, c) for c in candidates}
    least = min(work.values())
    return Decision(
        worker_id=rng.choice([worker_id for worker_id, blocks in work.items() if blocks == least]),
        policy=policy,
        reason=f"least work ({least:.1f} blocks) of {len(candidates)} workers compared",
        scores={worker_id: {"work_blocks": blocks} for worker_id, blocks in work.items()},
    )


@hookimpl
def router_register(register: RouterRegister) -> None:
    register("random", BalanceConfig, RandomChoice, stability="beta")
    register("least_loaded", BalanceConfig, LeastLoaded, stability="beta")
    register("power_of_two", BalanceConfig, PowerOfTwo, stability="beta")
