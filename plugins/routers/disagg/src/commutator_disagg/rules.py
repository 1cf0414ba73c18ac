"""Policies that need no measurements: always, never, and by length."""

from __future__ import annotations

from commutator import DisaggAnswer, DisaggPolicy, DisaggQuestion
from commutator_disagg.config import ConditionalConfig, FixedConfig

__all__ = ["Always", "Conditional", "Never"]


class Always(DisaggPolicy):
    """Every request that has anything to prefill."""

    def __init__(self, config: FixedConfig) -> None:
        del config

    def decide(self, question: DisaggQuestion) -> DisaggAnswer:
        if not question.uncached_tokens:
            return DisaggAnswer(False, "all cached")
        return DisaggAnswer(True, "always")


class Never(DisaggPolicy):
    """No request."""

    def __init__(self, config: FixedConfig) -> None:
        del config

    def decide(self, question: DisaggQuestion) -> DisaggAnswer:
        return DisaggAnswer(False, "never")


class Conditional(DisaggPolicy):
    """Long uncached prompts, as long as the prefill queue is short."""

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
            return DisaggAnswer(False, reason, terms)
        if question.queued_prefills >= config.max_prefill_queue_size:
            return DisaggAnswer(False, "queue full", terms)
        return DisaggAnswer(True, "long prompt", terms)
