"""Compares when the first token would come: prefilled here, or elsewhere and handed over."""

from __future__ import annotations

from commutator import DisaggAnswer, DisaggPolicy, DisaggQuestion
from commutator_disagg.config import CostConfig

__all__ = ["Cost"]


class Cost(DisaggPolicy):
    """A worker computes prompts one after another, so what was sent before counts, too.

    local    = (prefill tokens in flight there + uncached) / speed * (1 + delay_weight * answers)
    separate = (prefill tokens in flight at the idlest + uncached there) / speed,
               plus as much again for each queued request before this one at a worker,
               plus the hand-over
    """

    def __init__(self, config: CostConfig) -> None:
        self._config = config

    def decide(self, question: DisaggQuestion) -> DisaggAnswer:
        local_s, separate_s = self.local_s(question), self.separate_s(question)
        separate = local_s - separate_s > self._config.min_gain_s
        return DisaggAnswer(
            separate,
            "sooner elsewhere" if separate else "sooner here",
            {
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
