"""How fast a worker is, learned from what front doors observe of requests. Pure.

``StepMeter`` makes samples of requests, and ``LearnedSpeed`` a speed of samples. Samples are kept
in buckets, by how many requests decoded at once and how long prompts were. A bucket holds no more
than a number of the latest samples, so that steady load does not erase what was learned at its
edges.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping

from attrs import define, evolve, field, frozen

from commutator.contract.planner import EnginePerformance, SampleSums, SpeedMeter
from commutator_slo.performance import Fit, Sample, explained_part, fit_sums, sums_of

_FEWEST_STEPS = 7
"""Answers of fewer steps tell little but when their tokens were sent on."""
_FIRST_TOKENS = 1024
"""The first bucket of first tokens."""
_SHARES = 16
"""Buckets of prompt tokens for each number of requests that decode at once."""
_BUCKET_SAMPLES = 64.0
_MEMORY_S = 86_400.0
"""A sample counts a third (1/e) after this time, if its bucket gets no others."""
_FORGOTTEN = 1e-3
_PRIOR_SAMPLES = 0.03
"""What the engine tells, or a profile, counts as much as this number of samples: it decides what
they hardly tell."""
_FEWEST_SAMPLES = 30
_FIT_EVERY_S = 60.0
_SAME = 0.03
"""A new fit is used once it explains times this much differently: a plan should not move for
less."""


# ------------------------------------------------------------------------- samples


def bucket_of(sample: Sample) -> int:
    """The bucket of a sample, by what was computed in it."""
    if sample.first_tokens:
        return _FIRST_TOKENS + int(sample.prompt_tokens).bit_length()
    running = round(math.log2(max(1.0, sample.step_requests / sample.steps)))
    share = (int(sample.prompt_tokens / sample.steps).bit_length() + 1) // 2
    return running * _SHARES + min(share, _SHARES - 1)


@define
class _Worker:
    changed_s: float
    requests: int = 0
    decoding: int = 0
    others: int = 0
    own_s: float = 0.0
    """Seconds that requests decoded, added up."""
    all_s: float = 0.0
    """The same with requests of other front doors."""
    prompt_tokens: float = 0.0
    """Prompt tokens that were computed."""


@define
class _Request:
    worker_id: str
    began_s: float
    prompt_tokens: int
    computed: int
    alone: bool
    all_s: float
    own_s: float = 0.0
    computed_before: float = 0.0
    first_s: float | None = None


class StepMeter(SpeedMeter):
    """Samples of a worker's speed, from when its requests begin, answer first, and end."""

    def __init__(self, others: Callable[[str], int] = lambda _: 0) -> None:
        """``others``: requests in flight at a worker from other front doors."""
        self._others = others
        self._workers: dict[str, _Worker] = {}
        self._requests: dict[Hashable, _Request] = {}
        self._sums: dict[int, SampleSums] = {}
        """All samples that have not been taken, by bucket."""

    @property
    def sums(self) -> Mapping[int, SampleSums]:
        return self._sums

    def began(
        self, key: Hashable, worker_id: str, now_s: float, *, prompt_tokens: int, ahead_tokens: int
    ) -> None:
        self.lost(key, now_s)
        worker = self._at(worker_id, now_s)
        worker.requests += 1
        self._requests[key] = _Request(
            worker_id=worker_id,
            began_s=now_s,
            prompt_tokens=prompt_tokens,
            computed=prompt_tokens + ahead_tokens,
            alone=prompt_tokens > 0 and not worker.decoding,
            all_s=worker.all_s,
        )

    def answered(self, key: Hashable, worker_id: str, now_s: float) -> None:
        one = self._requests.get(key)
        if one is None or one.first_s is not None:
            return
        if one.worker_id != worker_id:
            self.lost(key, now_s)
            return
        worker = self._at(worker_id, now_s)
        took_s = now_s - one.began_s
        if one.alone and took_s > 0 and worker.all_s == one.all_s:
            self.add(Sample(seconds=took_s, prompt_tokens=one.computed, first_tokens=1))
        worker.prompt_tokens += one.prompt_tokens
        worker.decoding += 1
        one.first_s, one.all_s, one.own_s = now_s, worker.all_s, worker.own_s
        one.computed_before = worker.prompt_tokens

    def ended(self, key: Hashable, worker_id: str, tokens: int, now_s: float) -> None:
        one = self._requests.get(key)
        if one is not None and one.first_s is not None and one.worker_id == worker_id:
            worker = self._at(worker_id, now_s)
            seconds, steps = now_s - one.first_s, tokens - 1
            own_s, all_s = worker.own_s - one.own_s, worker.all_s - one.all_s
            if steps >= _FEWEST_STEPS and seconds > 0 and own_s > 0:
                # Prompts of other front doors are not seen: as many for each request as here.
                prompts = (worker.prompt_tokens - one.computed_before) * all_s / own_s
                self.add(
                    Sample(
                        seconds=seconds,
                        steps=steps,
                        step_requests=steps * max(1.0, all_s / seconds),
                        prompt_tokens=prompts,
                    )
                )
        self.lost(key, now_s)

    def lost(self, key: Hashable, now_s: float) -> None:
        one = self._requests.pop(key, None)
        if one is None:
            return
        worker = self._at(one.worker_id, now_s)
        worker.requests -= 1
        worker.decoding -= one.first_s is not None
        if not worker.requests:
            del self._workers[one.worker_id]

    def prefilled(self, seconds: float, prompt_tokens: int) -> None:
        self.add(Sample(seconds=seconds, prompt_tokens=prompt_tokens, first_tokens=1))

    def take(self) -> Mapping[int, SampleSums]:
        """The samples since the last call."""
        taken, self._sums = self._sums, {}
        return taken

    def add(self, sample: Sample) -> None:
        """Count a sample."""
        bucket = bucket_of(sample)
        self._sums[bucket] = self._sums.get(bucket, SampleSums()) + sums_of(sample)

    def _at(self, worker_id: str, now_s: float) -> _Worker:
        """The worker, with all that is known of it until now."""
        worker = self._workers.get(worker_id)
        if worker is None:
            worker = self._workers[worker_id] = _Worker(now_s)
        passed_s = max(0.0, now_s - worker.changed_s)
        worker.own_s += worker.decoding * passed_s
        worker.all_s += (worker.decoding + worker.others) * passed_s
        worker.changed_s, worker.others = now_s, self._others(worker_id)
        return worker


# -------------------------------------------------------------------------- speeds


@frozen(kw_only=True)
class LearnedSpeed:
    """How fast a worker of one role is; never changed in place."""

    told: EnginePerformance
    """What its engine tells, or a profile."""
    buckets: Mapping[int, SampleSums] = field(factory=dict)
    """The latest samples."""
    fit: Fit | None = None
    """What is used; None: what was told."""
    fitted_s: float | None = None
    """When a fit was last made."""
    first_token_s: float = 0.0
    """What a first token costs beside its prompt, as that fit says."""

    @property
    def performance(self) -> EnginePerformance:
        """The speed to plan with."""
        return self.told if self.fit is None else self.fit.performance

    @property
    def samples(self) -> int:
        """Samples that are remembered."""
        return round(sum(one.count for one in self.buckets.values()))

    @property
    def residual(self) -> float | None:
        """How far times are from what ``performance`` explains; None: too few are known.

        Root of the mean square over buckets, each by the mean of its samples.
        """
        if self.samples < _FEWEST_SAMPLES:
            return None
        return _rms(
            {
                bucket: explained_part(sums, self.performance, self.first_token_s) - 1
                for bucket, sums in self.buckets.items()
            },
            self.buckets,
        )

    def learn(
        self, measured: Mapping[int, SampleSums], time_s: float, passed_s: float
    ) -> LearnedSpeed:
        """With the samples of the last ``passed_s`` seconds, until ``time_s``."""
        kept = math.exp(-passed_s / _MEMORY_S)
        buckets = {
            bucket: sums.times(kept)
            for bucket, sums in self.buckets.items()
            if sums.count > _FORGOTTEN
        }
        for bucket, sums in measured.items():
            buckets[bucket] = _latest(buckets.get(bucket, SampleSums()) + sums)
        one = evolve(self, buckets=buckets)
        if one.fitted_s is not None and time_s - one.fitted_s < _FIT_EVERY_S:
            return one
        return one.fitted(time_s)

    def fitted(self, time_s: float | None) -> LearnedSpeed:
        """With a new fit, if it is much different from the one in use."""
        if self.samples < _FEWEST_SAMPLES:
            return self
        together = SampleSums()
        for sums in self.buckets.values():
            together += sums
        made = fit_sums(together, self.told, _PRIOR_SAMPLES)
        first_s = made.first_token_s
        differences = {
            bucket: explained_part(sums, made.performance, first_s)
            - explained_part(sums, self.performance, first_s)
            for bucket, sums in self.buckets.items()
        }
        used = made if _rms(differences, self.buckets) > _SAME else self.fit
        return evolve(self, fit=used, fitted_s=time_s, first_token_s=first_s)


def _latest(sums: SampleSums) -> SampleSums:
    """As many samples as a bucket holds, the latest counting most."""
    return sums if sums.count <= _BUCKET_SAMPLES else sums.times(_BUCKET_SAMPLES / sums.count)


def _rms(values: Mapping[int, float], buckets: Mapping[int, SampleSums]) -> float:
    total = sum(one.count for one in buckets.values())
    squares = sum(values[bucket] ** 2 * sums.count for bucket, sums in buckets.items())
    return math.sqrt(squares / total) if total else 0.0
