"""KV-cache-aware routing: a request goes where its prefix is cached, unless too busy.

It gets the worker that costs least, or by temperature one of those that cost little.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import Annotated, Literal

from attrs import Attribute, frozen

from commutator import (
    Bounds,
    Candidate,
    Decision,
    NonNegativeInt,
    Overlap,
    RouterConfig,
    RouteRequest,
    RouterRegister,
    RoutingPolicy,
    WorkerLoad,
    hookimpl,
    setting,
)

__all__ = ["KvRouter", "KvRouterConfig"]

Terms = dict[str, float]
Cost = Callable[[WorkerLoad, Overlap], float]
Weight = Annotated[float, Bounds(minimum=0)]

DECODE_SHARE = 1 / 16
"""What a block in flight costs, as a part of a block of prefill. In the published trace of Mooncake
and with the published speeds of simulated engines, a block's prefill takes 64 ms, and its request's
343 decode steps lengthen those of a neighbour by about 5 ms for each block."""


def _of_formula_cost(config: KvRouterConfig, field: Attribute[float], value: float) -> None:
    if value != field.default and config.formula != "cost":
        raise ValueError(
            f"{field.name}: only `formula: cost` uses it; set that, or remove the weight"
        )


@frozen(kw_only=True)
class KvRouterConfig(RouterConfig):
    """Options of the cost that the `kv` policy minimises; weights are named as in NVIDIA Dynamo."""

    formula: Literal["delay", "cost", "product"] = setting(
        "delay: how long this and other requests wait because of the choice, which needs no "
        "weights. cost: weighted prefill plus decode blocks, as in Dynamo. product: new prefill "
        "tokens, at least one, times batch size plus one.",
        "delay",
    )
    overlap_score_weight: Weight = setting(
        "With `formula: cost`: weight of the prefill still to be done against the decode load; 0 "
        "ignores the cache.",
        1.0,
        validator=_of_formula_cost,
        tunable=(0.25, 64),
    )
    router_temperature: Weight = setting(
        "0 takes the cheapest worker; more spreads requests over costlier ones.", 0.0
    )
    host_cache_hit_weight: Weight = setting(
        "What a block in a worker's host memory saves, as a part of one on the device.", 0.75
    )
    disk_cache_hit_weight: Weight = setting("The same for a block on its disk.", 0.25)
    shared_cache_multiplier: Weight = setting(
        "The same for a block in storage that all workers share.", 0.5
    )
    imbalance_requests: NonNegativeInt = setting(
        "Hot-prefix guard: a worker with this many requests more than the average, and more than "
        "imbalance_ratio times as many, is left out.",
        32,
    )
    imbalance_ratio: Annotated[float, Bounds(minimum=1)] = setting("See imbalance_requests.", 2.0)


class KvRouter(RoutingPolicy):
    """Weighs the prefill that a worker would save against the load it already has.

    All terms are in blocks; ``new`` is what the worker would have to compute of this prompt:

        credit = device + 0.75 host + 0.25 disk + 0.5 shared
        new    = max(0, prompt - credit)
        cost   = queue + new * (1 + mean_requests) + decode_blocks / 16

    This request waits for the worker's queue and for its own prefill. That prefill also delays
    those that share the worker: as many requests as a worker has on average.

    With ``formula: cost``, that of NVIDIA Dynamo's router:

        raw    = (active_prefill_tokens + prompt_tokens) / block_size
        cost   = overlap_score_weight * max(0, raw - credit) + decode_blocks

    With ``formula: product``, the weight-free LMetric: new_prefill_tokens * (batch_size + 1), with
    one new token at least, so that of two workers that hold all of a prompt the idler one wins.
    """

    uses_overlap = True

    def __init__(self, config: KvRouterConfig) -> None:
        self._config = config

    def pick(
        self, request: RouteRequest, candidates: Sequence[Candidate], rng: random.Random
    ) -> Decision:
        config, pool = self._config, self.pool(candidates)
        mean = pool.total_requests / len(pool)
        most = max(mean + config.imbalance_requests, mean * config.imbalance_ratio)
        allowed = pool.at_most_requests(most)
        not_scored, why = 0, ""
        cost_of = self._cost_of(request, mean)
        if config.router_temperature == 0:
            found = allowed.least(cost_of)
            winner = rng.choice(found.candidates)
            compared = {c.worker_id: c for c in (*found.compared, winner)}
            if not_scored := len(allowed) - len(compared):
                why = f"; {not_scored} others cost at least {found.others_cost:.1f}"
        else:
            compared = {c.worker_id: c for c in allowed}
            costs = {name: cost_of(c.load, c.overlap) for name, c in compared.items()}
            winner = compared[draw(costs, config.router_temperature, rng)]
        scores = {name: self._terms(request, mean, cost_of, c) for name, c in compared.items()}
        cost = scores[winner.worker_id]["cost"]
        return Decision(
            worker_id=winner.worker_id,
            policy="kv",
            reason=_reason(request, winner, cost, len(allowed), len(pool)) + why,
            scores=scores,
            not_scored=not_scored,
        )

    def _cost_of(self, request: RouteRequest, mean: float) -> Cost:
        """What a candidate costs; ``mean``: requests that a worker has on average.

        It is called for dozens of candidates, so what is the same for all is computed here.
        """
        config, size = self._config, request.block_size
        host, disk = config.host_cache_hit_weight, config.disk_cache_hit_weight
        shared, weight = config.shared_cache_multiplier, config.overlap_score_weight
        tokens, prompt, factor = request.prompt_tokens, request.prompt_blocks, 1.0 + mean

        def delay(load: WorkerLoad, held: Overlap) -> float:
            credit = held.device + host * held.host + disk * held.disk + shared * held.external
            new = prompt - credit if prompt > credit else 0.0
            queue = load.active_prefill_tokens / size
            return queue + new * factor + load.active_decode_blocks * DECODE_SHARE

        if config.formula == "delay":
            return delay

        def prefill(load: WorkerLoad, held: Overlap) -> float:
            credit = held.device + host * held.host + disk * held.disk + shared * held.external
            raw = (load.active_prefill_tokens + tokens) / size
            return raw - credit if raw > credit else 0.0

        def weighted(load: WorkerLoad, held: Overlap) -> float:
            return weight * prefill(load, held) + float(load.active_decode_blocks)

        def product(load: WorkerLoad, held: Overlap) -> float:
            return max(prefill(load, held) * size, 1.0) * (load.active_requests + 1)

        return weighted if config.formula == "cost" else product

    def _terms(
        self, request: RouteRequest, mean: float, cost_of: Cost, candidate: Candidate
    ) -> Terms:
        config, load, held = self._config, candidate.load, candidate.overlap
        credit = (
            held.device
            + config.host_cache_hit_weight * held.host
            + config.disk_cache_hit_weight * held.disk
            + config.shared_cache_multiplier * held.external
        )
        queue = load.active_prefill_tokens / request.block_size
        by_delay = config.formula == "delay"
        raw = request.prompt_blocks + (0.0 if by_delay else queue)
        terms = {
            "cost": cost_of(load, held),
            "prefill_blocks": max(0.0, raw - credit),
            "cache_credit_blocks": credit,
            "decode_blocks": float(load.active_decode_blocks),
        }
        if by_delay:
            terms["queue_blocks"], terms["mean_requests"] = queue, mean
        return terms


def draw(costs: dict[str, float], temperature: float, rng: random.Random) -> str:
    """A random draw with p ~ exp(-(cost - min) / range / temperature)."""
    cheapest = min(costs.values())
    spread = max(costs.values()) - cheapest or 1.0
    # The cheapest has exponent 0, so that the weights never vanish all together.
    weights = [math.exp(-(cost - cheapest) / spread / temperature) for cost in costs.values()]
    return rng.choices(list(costs), weights)[0]


def _reason(request: RouteRequest, winner: Candidate, cost: float, allowed: int, total: int) -> str:
    held, prompt = winner.overlap.blocks, math.ceil(request.prompt_blocks)
    cached = f"{held or 'none'} of {prompt} prompt blocks cached"
    if total == 1:
        return f"the only worker; {cached}"
    left_out = f"; {total - allowed} too busy" if allowed < total else ""
    if allowed == 1:
        return f"the only worker that is free{left_out}; {cached}"
    return f"cheapest of {allowed} workers (cost {cost:.1f}){left_out}; {cached}"


@hookimpl
def router_register(register: RouterRegister) -> None:
    register("kv", KvRouterConfig, KvRouter, stability="beta")
