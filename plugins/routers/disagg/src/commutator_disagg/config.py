"""The options of the policies, under the names that Dynamo's users know where it has them."""

from __future__ import annotations

from typing import Annotated

from attrs import frozen

from commutator import DisaggregationConfig, setting
from commutator.schema import Bounds, Fraction, NonNegativeInt, Seconds

__all__ = ["ConditionalConfig", "CostConfig", "FixedConfig"]

Rate = Annotated[float, Bounds(above=0)]
Weight = Annotated[float, Bounds(minimum=0)]


@frozen(kw_only=True)
class FixedConfig(DisaggregationConfig):
    """`always` and `never` have no options."""


@frozen(kw_only=True)
class ConditionalConfig(DisaggregationConfig):
    """What makes a prompt long, and a queue."""

    max_local_prefill_length: NonNegativeInt = setting(
        "Prompts whose uncached part has at most so many tokens are prefilled where they are "
        "decoded.",
        1000,
    )
    max_prefill_queue_size: NonNegativeInt = setting(
        "When so many requests wait for a prefill worker, further ones do not.", 2
    )
    max_local_uncached_ratio: Fraction | None = setting(
        "A short uncached part is prefilled locally only if it is also less than this part of its "
        "prompt. 0.7, with a length of 2047, is Dynamo's present rule; any part by default.",
        None,
    )


@frozen(kw_only=True)
class CostConfig(DisaggregationConfig):
    """What is assumed until it has been measured, and what a second of delay is worth."""

    prefill_tokens_per_s: Rate = setting("Assumed of a prefill worker.", 8000.0)
    local_prefill_tokens_per_s: Rate = setting("Assumed of a decode worker.", 8000.0)
    handover_bytes_per_s: Rate = setting("Assumed of a hand-over.", 1e9)
    handover_latency_s: Seconds = setting("Assumed of a hand-over, beside its bytes.", 0.005)
    delay_weight: Weight = setting(
        "A local prefill delays the answers that run beside it: each of them counts as this part "
        "of the prefill's own time. 0 compares the times to the first token alone.",
        0.1,
    )
    min_gain_s: Seconds = setting("Prefill elsewhere only if it promises to save so much.", 0.0)
