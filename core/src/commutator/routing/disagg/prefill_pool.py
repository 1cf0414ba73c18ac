"""The prefill workers of one model: whether one prefills a request, which, and how fast."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any

from attrs import define, evolve, field, frozen

from commutator.contract.disagg import (
    DisaggAnswer,
    DisaggPolicy,
    DisaggQuestion,
    DisaggregationConfig,
    HandoverStyle,
    MeasuredSpeeds,
)
from commutator.contract.engine import EngineConfig
from commutator.contract.request import GenerateRequest, RequestSummary
from commutator.contract.worker import KvTransferInfo, Role, WorkerRecord
from commutator.plugins import PluginHost
from commutator.routing.placement import Placement, Placer
from commutator.routing.router import Arms, PolicyRunner
from commutator.routing.workers import LiveWorker

POLICY_FAILED = "policy failed"
"""The reason of the answer that replaces a failed policy's."""


@frozen
class QueueState:
    """The prefill queue of one model."""

    requests: int
    oldest_s: float
    """Seconds that the longest-waiting request has waited; 0 when the queue is empty."""


@frozen
class IncompatiblePair:
    """Two workers of one model, of which the first cannot prefill for the second."""

    prefill_worker: str
    decode_worker: str
    problem: str

    def __str__(self) -> str:
        return f"{self.prefill_worker} cannot prefill for {self.decode_worker}: {self.problem}"


class WorkerCompatibility:
    """Knows which workers can hand KV over to which, from the hand-over styles of their engines."""

    def __init__(self, engines: Mapping[str, EngineConfig], host: PluginHost) -> None:
        self._engines = engines
        self._host = host
        self._styles: dict[str, HandoverStyle | None] = {}

    def style(self, worker: WorkerRecord) -> HandoverStyle | None:
        """The hand-over style of the worker's engine; None if it has none, or is not installed."""
        if worker.engine not in self._styles:
            config = self._engines.get(worker.engine)  # None: it leaves, with its entry
            kind = None if config is None else self._host.engines.kinds.get(config.kind)
            style = None if kind is None else kind.thing.handover_style(config)
            self._styles[worker.engine] = style
        return self._styles[worker.engine]

    def forget_styles(self) -> None:
        """The engines have changed."""
        self._styles.clear()

    def problem(self, prefill: WorkerRecord, decode: WorkerRecord) -> str | None:
        """Why ``prefill`` cannot prefill for ``decode``; None if it can."""
        try:
            return self._problem(prefill, decode)
        except Exception as error:  # noqa: BLE001 - third-party code may raise anything
            return f"its hand-over style raised {type(error).__name__}: {error}"

    def _problem(self, prefill: WorkerRecord, decode: WorkerRecord) -> str | None:
        styles = self.style(prefill), self.style(decode)
        infos = prefill.info.handover, decode.info.handover
        for worker, style, info in zip((prefill, decode), styles, infos, strict=True):
            if style is None or info is None:
                if worker.kind not in self._host.engines.kinds:
                    return f'the plugin of the engine "{worker.kind}" is not installed here'
                return f"{worker.worker_id} supports no hand-over"
        if type(styles[0]) is not type(styles[1]):
            return f"{prefill.kind} and {decode.kind} have different hand-over styles"
        assert styles[1] is not None
        assert infos[0] is not None
        assert infos[1] is not None
        return styles[1].mismatch(infos[0], infos[1])

    def incompatible(self, workers: Iterable[WorkerRecord]) -> Iterator[IncompatiblePair]:
        """Each pair of a prefill worker and another worker of its model that cannot hand over.

        Workers are compared by class: those of one engine that describe their KV alike. So a
        thousand workers cost as much as the pairs that are taken from the iterator.
        """
        prefill: dict[_Class, list[WorkerRecord]] = {}
        decode: dict[_Class, list[WorkerRecord]] = {}
        for record in workers:
            found = prefill if record.role is Role.PREFILL else decode
            found.setdefault(_class_of(record), []).append(record)
        for one, others in product(prefill, decode):
            if one[0] != others[0]:  # of other models
                continue
            if self.problem(prefill[one][0], decode[others][0]) is None:
                continue
            for first, second in product(prefill[one], decode[others]):
                if (problem := self.problem(first, second)) is not None:
                    yield IncompatiblePair(first.worker_id, second.worker_id, problem)


_Class = tuple[str, str, str, KvTransferInfo | None, bool]
"""Model, engine, its kind, what the worker says of its KV without the address, which differs for
each, and whether it has one: equal for workers that can hand over to, and take from, the same."""


def _class_of(record: WorkerRecord) -> _Class:
    info = record.info.handover
    plain = None if info is None else evolve(info, address=None)
    has_address = info is not None and info.address is not None
    return record.model, record.engine, record.kind, plain, has_address


@frozen(eq=False)
class DisaggDecision:
    """A disaggregation policy's answer about one request at one decode worker."""

    answer: DisaggAnswer
    question: DisaggQuestion
    sequence_hashes: Sequence[int]
    """Of the prompt, in blocks of the prefill pool."""
    decided_s: float
    """When the policy answered, by ``time.perf_counter``."""

    def explain(self) -> dict[str, Any]:
        """The answer for people."""
        return {
            "separate": self.answer.separate,
            "reason": self.answer.reason,
            "terms": {name: round(value, 6) for name, value in self.answer.terms.items()},
        }


_DECAY = 0.95
"""The factor by which each new sample reduces the weight of older ones; about twenty count."""


@define
class Rate:
    """An amount per second, such as tokens. Long samples weigh more than short ones."""

    amount: float = 0.0
    seconds: float = 0.0

    def add(self, amount: float, seconds: float) -> None:
        self.amount = self.amount * _DECAY + amount
        self.seconds = self.seconds * _DECAY + seconds

    @property
    def per_s(self) -> float | None:
        """None without samples."""
        return self.amount / self.seconds if self.amount > 0 and self.seconds > 0 else None


@define
class Line:
    """Seconds as a linear function of bytes, by least squares: a latency and a bandwidth."""

    count: float = 0.0
    x: float = 0.0
    y: float = 0.0
    xx: float = 0.0
    xy: float = 0.0

    def add(self, x: float, y: float) -> None:
        self.count = self.count * _DECAY + 1
        self.x, self.y = self.x * _DECAY + x, self.y * _DECAY + y
        self.xx, self.xy = self.xx * _DECAY + x * x, self.xy * _DECAY + x * y

    def fit(self) -> tuple[float | None, float | None]:
        """(latency in seconds, bytes per second); None for what the samples do not show.

        If all samples have one size, all time counts for the bytes. If larger ones take no longer,
        all time counts as latency.
        """
        if not self.count:
            return None, None
        spread = self.count * self.xx - self.x * self.x
        all_bytes = self.x / self.y if self.x > 0 and self.y > 0 else None
        if spread <= 1e-6 * self.count * self.xx:
            return None, all_bytes
        slope = (self.count * self.xy - self.x * self.y) / spread
        if slope <= 0:
            return self.y / self.count, None
        latency_s = (self.y - slope * self.x) / self.count
        return (latency_s, 1 / slope) if latency_s > 0 else (0.0, all_bytes)


@define
class SpeedMeter:
    """The speeds of one model, as measured by one front door.

    A worker prefills prompts in order of arrival. So a prefill sample is the tokens of the prompt
    and of those before it at the worker, over the time until the prompt is done.
    """

    prefill: Rate = field(factory=Rate)
    local_prefill: Rate = field(factory=Rate)
    handover: Line = field(factory=Line)

    def speeds(self) -> MeasuredSpeeds:
        latency_s, bytes_per_s = self.handover.fit()
        return MeasuredSpeeds(
            prefill_tokens_per_s=self.prefill.per_s,
            local_prefill_tokens_per_s=self.local_prefill.per_s,
            handover_bytes_per_s=bytes_per_s,
            handover_latency_s=latency_s,
        )


class PrefillPool:
    """The prefill workers of one model, their router and their queue. Used from one event loop."""

    def __init__(
        self,
        config: DisaggregationConfig,
        policy: DisaggPolicy,
        placer: Placer,
        compatibility: WorkerCompatibility,
        host: PluginHost,
    ) -> None:
        """``policy`` decides whether to disaggregate; ``placer`` chooses a prefill worker."""
        self.config = config
        self.placer = placer
        self.router = placer.router
        self.load = placer.load
        self.compatibility = compatibility
        self.host = host
        self.speeds = SpeedMeter()
        self.arms = Arms(policy)
        self._runner = PolicyRunner("disaggregation policy", policy)

    def queue(self) -> QueueState:
        return QueueState(self.placer.waiting, self.placer.oldest_wait_s)

    def decide(
        self, summary: RequestSummary, request: GenerateRequest, decode: Placement
    ) -> DisaggDecision | None:
        """Ask the policy about a request that has its decode worker.

        None, without a question to the policy, when no ready prefill worker can hand over to it.
        """
        decision = self.preview(summary, request, decode)
        if decision is not None:
            self.host.disagg_decided(summary, decision.answer)
        return decision

    def preview(
        self, summary: RequestSummary, request: GenerateRequest, decode: Placement
    ) -> DisaggDecision | None:
        """``decide``, of which no observer hears."""
        workers = self.placer.candidates(self.fitting(request, decode.route.worker))
        if not workers:
            return None
        hashes = self._sequence_hashes(request, decode)
        question = self._question(summary, decode, hashes, workers)
        answer = self._ask(self.arms.of(summary), question)
        return DisaggDecision(answer, question, hashes, time.perf_counter())

    def fitting(self, request: GenerateRequest, decode: LiveWorker) -> Callable[[LiveWorker], bool]:
        """A test whether a worker can prefill the request and hand it over to ``decode``."""
        length, record = len(request.token_ids), decode.record

        def fits(worker: LiveWorker) -> bool:
            info = worker.record.info
            if info.max_model_len <= length or info.unmet(request) is not None:
                return False
            return self.compatibility.problem(worker.record, record) is None

        return fits

    def prefilled_locally(self, decision: DisaggDecision, decode: Placement) -> None:
        """Measure a prefill at the decode worker, whose first token has just arrived."""
        ahead = decision.question.decode_load.active_prefill_tokens
        tokens = ahead + decode.ticket.prefill_tokens
        self.speeds.local_prefill.add(tokens, time.perf_counter() - decision.decided_s)

    def _ask(self, policy: DisaggPolicy, question: DisaggQuestion) -> DisaggAnswer:
        """The policy's answer; if the policy fails, prefill stays at the decode worker."""
        cause: Exception | None = None
        try:
            answer: object = policy.decide(question)
            if isinstance(answer, DisaggAnswer):
                return answer
            problem = f"answered {answer!r:.100}"
        except Exception as error:  # noqa: BLE001 - third-party code may raise anything
            problem, cause = f"raised {type(error).__name__}: {error}", error
        self._runner.failed(problem, cause, "prefill stays at the decode worker")
        return DisaggAnswer(separate=False, reason=POLICY_FAILED)

    def _sequence_hashes(self, request: GenerateRequest, decode: Placement) -> Sequence[int]:
        indexer, known = self.router.indexer, decode.route.sequence_hashes
        if known and indexer is not None and indexer.index.block_size == decode.route.block_size:
            return known
        return self.router.hashes(request)

    def _question(
        self,
        summary: RequestSummary,
        decode: Placement,
        hashes: Sequence[int],
        workers: Sequence[LiveWorker],
    ) -> DisaggQuestion:
        candidates = self.router.candidates(hashes, workers)
        overlaps = (candidate.overlap.blocks for candidate in candidates)
        queue = self.queue()
        info = decode.route.worker.record.info.handover
        return DisaggQuestion(
            prompt_tokens=summary.prompt_tokens,
            cached_tokens=decode.route.overlap_tokens,
            decode_load=decode.route.candidate.load,
            prefill_loads={candidate.worker_id: candidate.load for candidate in candidates},
            prefill_cached_tokens=max(overlaps) * self.router.block_size,
            queued_prefills=queue.requests,
            queue_age_s=queue.oldest_s,
            token_bytes=info.token_bytes if info is not None else 0,
            speeds=self.speeds.speeds(),
        )
