"""The options of the `kv` policy, under the names that Dynamo's users know."""

from __future__ import annotations

from typing import Annotated, Literal

from attrs import frozen

from commutator import RouterConfig, setting
from commutator.schema import Bounds, NonNegativeInt

__all__ = ["KvRouterConfig"]

Weight = Annotated[float, Bounds(minimum=0)]


@frozen(kw_only=True)
class KvRouterConfig(RouterConfig):
    """Weights of the cost that the `kv` policy minimises."""

    formula: Literal["cost", "product"] = setting(
        "cost: weighted prefill plus decode blocks, as in Dynamo. product: new prefill tokens, "
        "at least one, times batch size plus one, which needs no weights.",
        "cost",
    )
    overlap_score_weight: Weight = setting(
        "Weight of the prefill still to be done against the decode load; 0 ignores the cache.", 1.0
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
        "Hot-prefix guard: a worker with this many requests more than the idlest, and more than "
        "imbalance_ratio times as many, is left out.",
        32,
    )
    imbalance_ratio: Annotated[float, Bounds(minimum=1)] = setting("See imbalance_requests.", 2.0)
