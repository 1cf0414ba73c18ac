"""Whether a request's prefill is worth a worker of its own: always, never, conditional, cost."""

from __future__ import annotations

from typing import Annotated

from attrs import frozen

from commutator import (
    Bounds,
    DisaggAnswer,
    DisaggPolicy,
    DisaggQuestion,
    DisaggregationConfig,
    DisaggRegister,
    Fraction,
    NonNegativeInt,
    Seconds,
    hookimpl,
    setting,
)

__all__ = [
    "Always",
    "Conditional",
    "ConditionalConfig",
    "Cost",
    "CostConfig",
    "Never",
]

Rate = Annotated[float, Bounds(above=0)]
Weight = Annotated[float, Bounds(minimum=0)]


class Always(DisaggPolicy):
    """Disaggregates every request that has anything to prefill."""

    def decide(self, question: DisaggQuestion) -> DisaggAnswer:
        if not question.uncached_tokens:
            return DisaggAnswer(separate=False, reason="all cached")
        return DisaggAnswer(separate=True, reason="always")


class Never(DisaggPolicy):
    """Disaggregates no request."""

    def decide(self, question: DisaggQuestion) -> DisaggAnswer:
        return DisaggAnswer(separate=False, reason="never")


@frozen(kw_only=True)
class ConditionalConfig(DisaggregationConfig):
    """Limits of a short prompt and of a short queue, named as in NVIDIA Dynamo."""

    max_local_prefill_length: NonNegativeInt = setting(
        "A prompt is prefilled where it is decoded if at most this many of its tokens are not "
        "cached there.",
        1000,
        tunable=(16, 32_768),
    )
    max_prefill_queue_size: NonNegativeInt = setting(
        "While this many requests wait for a prefill worker, further ones are prefilled locally.",
        2,
        tunable=(1, 64),
    )
    max_local_uncached_ratio: Fraction | None = setting(
        "A short uncached part is prefilled locally only if it is also less than this part of its "
        "prompt. 0.7, with a length of 2047, is Dynamo's present rule; any part by default.",
        None,
    )


class Conditional(DisaggPolicy):
    """Disaggregates long uncached prompts while the prefill queue is short."""

    def __init__(self, config: ConditionalConfig) -> None:
        self._config = config

    def decide(self, question: DisaggQuestion) -> DisaggAnswer:
        config, uncached = self._config, question.uncached_tokens
        part = uncached / question.prompt_tokens if question.prompt_tokens else 0.0
        limit = config.max_local_uncached_ratio
        terms = {
            "uncached_tokens": float(uncached),
            "uncached_ratio": part,
            "queued_prefills": float(question.queued_prefills),
        }
        if uncached <= config.max_local_prefill_length and (limit is None or part < limit):
            reason = "mostly cached" if part < 1.0 and question.cached_tokens else "short prompt"
            return DisaggAnswer(separate=False, reason=reason, terms=terms)
        if question.queued_prefills >= config.max_prefill_queue_size:
            return DisaggAnswer(separate=False, reason="queue full", terms=terms)
        return DisaggAnswer(separate=True, reason="long prompt", terms=terms)


@frozen(kw_only=True)
class CostConfig(DisaggregationConfig):
    """Speeds assumed until they have been measured, and the weight of delayed answers."""

    prefill_tokens_per_s: Rate = setting(
        "Speed assumed of a prefill worker until it is measured.", 8000.0
    )
    local_prefill_tokens_per_s: Rate = setting(
        "Speed assumed of a decode worker until it is measured.", 8000.0
    )
    handover_bytes_per_s: Rate = setting("Speed assumed of a hand-over until it is measured.", 1e9)
    handover_latency_s: Seconds = setting(
        "Fixed time assumed of a hand-over until it is measured.", 0.005
    )
    delay_weight: Weight = setting(
        "A local prefill delays the answers that run beside it: each of them counts as this part "
        "of the prefill's own time. 0 compares the times to the first token alone.",
        0.1,
        tunable=(0.01, 10),
    )
    min_gain_s: Seconds = setting(
        "Prefill elsewhere only if that is expected to save more than this.", 0.0
    )


class Cost(DisaggPolicy):
    """Compares the times to the first token: prefilled at the decode worker, or elsewhere.

    A worker computes prompts one after another, so prompts that it got before count, too.

    local    = (prefill tokens in flight there + uncached) / speed * (1 + delay_weight * answers)
    separate = (prefill tokens in flight at the idlest + uncached there) / speed,
               plus as much again for each request in the queue, per prefill worker,
               plus the hand-over
    """

    def __init__(self, config: CostConfig) -> None:
        self._config = config

    def decide(self, question: DisaggQuestion) -> DisaggAnswer:
        local_s, separate_s = self.local_s(question), self.separate_s(question)
        separate = local_s - separate_s > self._config.min_gain_s
        return DisaggAnswer(
            separate=separate,
            reason="sooner elsewhere" if separate else "sooner here",
            terms={
                "local_s": local_s,
                "separate_s": separate_s,
                "uncached_tokens": float(question.uncached_tokens),
                "queued_prefills": float(question.queued_prefills),
            },
        )

    def local_s(self, question: DisaggQuestion) -> float:
        """The cost of a prefill at the decode worker, in seconds."""
        load, config = question.decode_load, self._config
        speed = question.speeds.local_prefill_tokens_per_s or config.local_prefill_tokens_per_s
        own_s = question.uncached_tokens / speed
        wait_s = load.active_prefill_tokens / speed
        return wait_s + own_s * (1 + config.delay_weight * load.active_requests)

    def separate_s(self, question: DisaggQuestion) -> float:
        """Seconds until the KV is at the decode worker."""
        config, speeds = self._config, question.speeds
        speed = speeds.prefill_tokens_per_s or config.prefill_tokens_per_s
        own_s = max(0, question.prompt_tokens - question.prefill_cached_tokens) / speed
        loads = question.prefill_loads.values()
        wait_s = min(load.active_prefill_tokens for load in loads) / speed
        queue_s = question.queued_prefills / len(loads) * own_s
        return wait_s + queue_s + own_s + self._handover_s(question)

    def _handover_s(self, question: DisaggQuestion) -> float:
        config, speeds = self._config, question.speeds
        bytes_per_s = speeds.handover_bytes_per_s or config.handover_bytes_per_s
        latency_s = speeds.handover_latency_s
        if latency_s is None:
            latency_s = config.handover_latency_s
        return latency_s + question.uncached_tokens * question.token_bytes / bytes_per_s


@hookimpl
def disagg_register(register: DisaggRegister) -> None:
    register("always", DisaggregationConfig, lambda _: Always(), stability="beta")
    register("never", DisaggregationConfig, lambda _: Never(), stability="beta")
    register("conditional", ConditionalConfig, Conditional, stability="beta")
    register("cost", CostConfig, Cost)
