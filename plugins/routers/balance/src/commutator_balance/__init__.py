"""Policies that look at load only: random, least loaded, power of two choices."""

from __future__ import annotations

import random
from collections.abc import Sequence

from commutator import (
    Candidate,
    Decision,
    RouterConfig,
    RouteRequest,
    RouterRegister,
    RoutingPolicy,
    WorkerLoad,
    hookimpl,
)

__all__ = ["LeastLoaded", "PowerOfTwo", "RandomChoice"]


class RandomChoice(RoutingPolicy):
    """Any worker, each equally likely."""

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

    def pick(
        self, request: RouteRequest, candidates: Sequence[Candidate], rng: random.Random
    ) -> Decision:
        return lightest("least_loaded", request, candidates, rng)


class PowerOfTwo(RoutingPolicy):
    """Two workers by lot, then the less loaded of them: nearly as even, and never a herd."""

    def pick(
        self, request: RouteRequest, candidates: Sequence[Candidate], rng: random.Random
    ) -> Decision:
        two = rng.sample(candidates, min(2, len(candidates)))
        return lightest("power_of_two", request, two, rng)


def work_blocks(request: RouteRequest, load: WorkerLoad) -> float:
    """Work in flight, in KV blocks: prompts still to be computed, and blocks being decoded."""
    return load.active_prefill_tokens / request.block_size + load.active_decode_blocks


def lightest(
    policy: str, request: RouteRequest, candidates: Sequence[Candidate], rng: random.Random
) -> Decision:
    """The candidate with the least work in flight."""
    found = RoutingPolicy.pool(candidates).least(lambda load, _: work_blocks(request, load))
    chosen = rng.choice(found.candidates)
    compared = {c.worker_id: c for c in (*found.compared, chosen)}
    not_scored, why = len(candidates) - len(compared), ""
    if not_scored:
        why = f"; {not_scored} others have at least {found.others_cost:.1f}"
    reason = f"least work ({found.cost:.1f} blocks) of {len(candidates)} workers compared{why}"
    if len(candidates) == 1:
        reason = "the only worker"
    return Decision(
        worker_id=chosen.worker_id,
        policy=policy,
        reason=reason,
        scores={
            name: {"work_blocks": work_blocks(request, c.load)} for name, c in compared.items()
        },
        not_scored=not_scored,
    )


@hookimpl
def router_register(register: RouterRegister) -> None:
    register("random", RouterConfig, lambda _: RandomChoice(), stability="beta")
    register("least_loaded", RouterConfig, lambda _: LeastLoaded(), stability="beta")
    register("power_of_two", RouterConfig, lambda _: PowerOfTwo(), stability="beta")
