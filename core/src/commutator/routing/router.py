"""Chooses a worker for each request of one model: candidates, policy and busy thresholds."""

from __future__ import annotations

import logging
import math
import random
import time
import traceback
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

from attrs import asdict, define, field

from commutator.contract.request import GenerateRequest, RequestSummary
from commutator.contract.routing import (
    BusyConfig,
    Candidate,
    Decision,
    Overlap,
    RouteRequest,
    RoutingPolicy,
    ranks_of,
)
from commutator.contract.tuning import Trial
from commutator.errors import RoutingError
from commutator.routing.load import InFlightLoad, threshold_hit
from commutator.routing.prefix_index.indexer import KvIndexer
from commutator.routing.prefix_index.prefix_map import NOTHING_HELD
from commutator.routing.shortlist import IndexedPool, RankTable
from commutator.routing.workers import LiveWorker

log = logging.getLogger(__name__)

PolicyT = TypeVar("PolicyT")

FALLBACK = "fallback"
"""The policy's name in a decision made because the policy failed."""

_EXPLAINED = 100
_LOG_EVERY = 1000
_MOST_ORIGINS = 100
"""Failures from further places are counted together."""
_NOTHING = Overlap()
_MOST_GONE = 64
_SCANNED = 32
"""Up to this number of workers, a look at each is as fast as an index."""


@define(eq=False)  # one is made for each request, and a frozen class takes twice as long to fill
class Route:
    """A routing decision and everything that it was based on."""

    decision: Decision
    candidate: Candidate
    worker: LiveWorker
    candidates: Sequence[Candidate]
    """Every candidate; of many, those that the policy looked at."""
    sequence_hashes: Sequence[int]
    block_size: int
    routing_s: float
    exact: Collection[str] | None = None
    """Ids of the workers whose overlap is known from KV events, not guessed. None: overlaps were
    not looked up, because the policy does not use them."""
    busy: Sequence[tuple[Candidate, str]] = ()
    """Busy candidates that were excluded, each with the threshold that it had reached; without
    those of ``too_busy``."""
    waited_s: float = 0.0
    """Seconds that the request waited because every worker was busy."""
    others: int = 0
    """Candidates that are not in ``candidates``."""
    too_busy: Mapping[str, int] = field(factory=dict)
    """The number of further busy candidates that were excluded, by threshold."""
    longest_overlap_blocks: int = 0
    """The longest cached prefix of any worker that is in neither list, in blocks."""

    @property
    def overlap_tokens(self) -> int:
        """Prompt tokens that the chosen worker is expected to hold."""
        return self.candidate.overlap.blocks * self.block_size

    @property
    def best_overlap_blocks(self) -> int:
        """The longest cached prefix of any worker, busy ones included, in blocks."""
        longest = self.longest_overlap_blocks
        for candidate in self.candidates:
            longest = max(longest, candidate.overlap.blocks)
        for candidate, _ in self.busy:
            longest = max(longest, candidate.overlap.blocks)
        return longest

    @property
    def given_up_blocks(self) -> int:
        """Blocks that the best worker holds beyond the chosen one: reuse given up for balance."""
        return self.best_overlap_blocks - self.candidate.overlap.blocks

    def explain(self) -> dict[str, Any]:
        """The candidates with their overlaps, loads and scores, and why one was chosen; for people.

        Overlaps that were not looked up are None. Of more than 100 candidates, the chosen one and
        the first others are shown, and ``left_out`` says how many are not. Of these the policy did
        not score ``not_scored``, because none could be better. ``too_busy`` counts excluded workers
        that are not shown, by threshold.
        """
        unknown = self.exact is None
        chosen = self.decision.worker_id
        shown: list[tuple[Candidate, str | None]] = [(one, None) for one in self.candidates]
        shown += self.busy
        hidden = max(0, len(shown) - _EXPLAINED)
        left_out, not_scored = hidden + self.others, self.decision.not_scored
        if hidden:
            shown.sort(key=lambda pair: pair[0].worker_id != chosen)
            del shown[_EXPLAINED:]
        return {
            "worker_id": chosen,
            "policy": self.decision.policy,
            "reason": self.decision.reason,
            "overlap_blocks": None if unknown else self.candidate.overlap.blocks,
            "best_overlap_blocks": None if unknown else self.best_overlap_blocks,
            "waited_s": round(self.waited_s, 6),
            "candidates": [self._explain(candidate, hit) for candidate, hit in shown],
            **({"left_out": left_out} if left_out else {}),
            **({"not_scored": not_scored} if not_scored else {}),
            **({"too_busy": dict(self.too_busy)} if self.too_busy else {}),
        }

    def _explain(self, candidate: Candidate, busy: str | None) -> dict[str, Any]:
        exact = self.exact
        return {
            "worker_id": candidate.worker_id,
            "overlap_blocks": None if exact is None else asdict(candidate.overlap),
            "guessed": None if exact is None else candidate.worker.worker_id not in exact,
            "load": asdict(candidate.load),
            "scores": dict(self.decision.scores.get(candidate.worker_id, {})),
            "busy": busy,
        }


class Arms(Generic[PolicyT]):
    """A policy, and during a trial a second one with another value of one option."""

    def __init__(self, policy: PolicyT) -> None:
        self.policy = policy
        """The policy of requests in no trial."""
        self._other: PolicyT | None = None
        self._trial: Trial | None = None

    def of(self, request: RequestSummary) -> PolicyT:
        """The policy that decides about a request."""
        if self._trial is None or self._other is None or not self._trial.takes(request):
            return self.policy
        return self._other

    def __iter__(self) -> Iterator[PolicyT]:
        """Each policy."""
        yield self.policy
        if self._other is not None:
            yield self._other

    def use(self, policy: PolicyT, other: PolicyT | None, trial: Trial | None) -> None:
        """From now on ``other`` decides about the requests that ``trial`` takes."""
        self.policy, self._other, self._trial = policy, other, trial


class ModelRouter:
    """Asks one model's policy, with candidates made from workers, loads and overlaps."""

    def __init__(
        self,
        policy: RoutingPolicy,
        indexer: KvIndexer | None,
        load: InFlightLoad,
        rng: random.Random,
        block_size: int,
        *,
        strict: bool = False,
        scanned: int = _SCANNED,
    ) -> None:
        """``indexer`` is None when the policy does not use overlaps.

        ``strict``: a policy's failure is a RoutingError; see ``PolicyRunner``. Up to ``scanned``
        workers are given to the policy as a list, and more as a pool with an index; both lead to
        the same decisions.
        """
        self.arms = Arms(policy)
        self.indexer = indexer
        self._load = load
        self._rng = rng
        self.block_size = block_size
        self._runner = PolicyRunner("routing policy", policy, strict=strict)
        self._known: dict[str, Candidate] = {}
        """The last candidate of each rank: most are the same for the next request."""
        self._scanned = scanned
        self._tables: dict[bool, RankTable] = {}
        """The index of all workers, and the one that knows which of them are busy."""

    def forget(self, worker_id: str) -> None:
        """A worker left routing."""
        for policy in self.arms:
            policy.forget(worker_id)

    def problem(self) -> str | None:
        """How the policy failed in the last minutes; None if it did not."""
        return self._runner.failing()

    def hashes(self, request: GenerateRequest) -> Sequence[int]:
        """The prompt's sequence hashes; empty when the policy does not use overlaps."""
        return self.indexer.hashes(request) if self.indexer is not None else ()

    def route(
        self, summary: RequestSummary, hashes: Sequence[int], workers: Sequence[LiveWorker]
    ) -> Route:
        """Ask the policy about ``workers``, at least one. Raises RoutingError if ``strict``.

        The members of a tuple of ``workers`` must not change afterwards; see ``_table``.
        """
        started_s = time.perf_counter()
        if (table := self._table(workers, None)) is not None:
            return self._decide_in(table, table.everyone, summary, hashes, started_s)
        return self._decide(summary, hashes, self._pairs(hashes, workers), (), started_s)

    def route_to_free(
        self,
        summary: RequestSummary,
        hashes: Sequence[int],
        workers: Sequence[LiveWorker],
        busy: BusyConfig,
    ) -> Route | None:
        """``route`` among the ranks that are not busy; None if every rank is busy."""
        started_s = time.perf_counter()
        if (table := self._table(workers, busy)) is not None:
            if not (among := table.free()):
                return None
            return self._decide_in(table, among, summary, hashes, started_s)
        hits = list(self._hits(workers, busy))
        if all(hits):  # then the prompt need not be matched
            return None
        ranks = list(zip(self._pairs(hashes, workers), hits, strict=True))
        free = [pair for pair, hit in ranks if hit is None]
        left_out = [(candidate, hit) for (candidate, _), hit in ranks if hit is not None]
        return self._decide(summary, hashes, free, left_out, started_s)

    def candidates(self, hashes: Sequence[int], workers: Sequence[LiveWorker]) -> list[Candidate]:
        """Every rank of the workers, with its load and its overlap with the prompt."""
        return [candidate for candidate, _ in self._pairs(hashes, workers)]

    def hits(self, workers: Sequence[LiveWorker], busy: BusyConfig) -> Counter[str]:
        """The number of busy ranks of the workers, by the threshold that they have reached."""
        if (table := self._table(workers, busy)) is not None:
            return table.hits()
        return Counter(hit for hit in self._hits(workers, busy) if hit is not None)

    def _hits(self, workers: Sequence[LiveWorker], busy: BusyConfig) -> Iterator[str | None]:
        """The threshold that each rank of the workers has reached; None for a rank not busy."""
        for worker in workers:
            info = worker.record.info
            capacity = info.rank_capacity_blocks(self.block_size)
            for _, name in ranks_of(worker.record.worker_id, info.data_parallel_size):
                yield threshold_hit(busy, self._load.of(name), capacity)

    def _pairs(
        self, hashes: Sequence[int], workers: Sequence[LiveWorker]
    ) -> list[tuple[Candidate, LiveWorker]]:
        matches = self.indexer.match(hashes) if self.indexer is not None and hashes else {}
        known, pairs = self._known, []
        for worker in workers:
            record = worker.record
            for owner, name in ranks_of(record.worker_id, record.info.data_parallel_size):
                overlap, load = matches.get(owner, _NOTHING), self._load.of(name)
                candidate = known.get(name)
                if (
                    candidate is None
                    or candidate.load is not load
                    or candidate.overlap is not overlap
                    or candidate.worker is not record
                ):
                    candidate = known[name] = Candidate(
                        worker=record, load=load, overlap=overlap, rank=owner.rank
                    )
                pairs.append((candidate, worker))
        if len(known) > 2 * len(pairs) + _MOST_GONE:
            known.clear()  # most of them are of workers that are gone
        return pairs

    def _table(self, workers: Sequence[LiveWorker], busy: BusyConfig | None) -> RankTable | None:
        """The index of these workers; None: they are to be looked at one by one.

        ``LiveWorkers.routable`` returns the same tuple until a worker changes, so an index serves
        many requests. A list, such as a selection of workers for one request, gets none: it may
        change, and making the index takes longer than a look at each.
        """
        if len(workers) <= self._scanned or not isinstance(workers, tuple):
            return None
        table = self._tables.get(busy is not None)
        if table is not None and table.serves(workers, busy):
            return table
        index = None if self.indexer is None else self.indexer.index
        table = RankTable(workers, self._load, index, self.block_size, busy)
        current = {key: one for key, one in self._tables.items() if one.workers is workers}
        self._tables = current | {busy is not None: table}
        return table

    def _decide_in(
        self,
        table: RankTable,
        among: int,
        summary: RequestSummary,
        hashes: Sequence[int],
        started_s: float,
    ) -> Route:
        """Ask the policy about the ranks ``among`` the table's."""
        match = NOTHING_HELD
        if self.indexer is not None and hashes:
            match = self.indexer.find(hashes)
        pool = IndexedPool(table, match, among)
        decision, candidate = self._pick(
            summary,
            pool,
            lambda name: None if (at := table.find(name, among)) is None else pool.at(at),
        )
        position = table.find(decision.worker_id, among)
        assert position is not None
        made = pool.made
        return Route(
            decision=decision,
            candidate=candidate,
            worker=table.members[position][0],
            candidates=[made[position] for position in sorted(made)],
            sequence_hashes=hashes,
            block_size=self.block_size,
            routing_s=time.perf_counter() - started_s,
            exact=None if self.indexer is None else self.indexer.exact,
            others=len(pool) - len(made),
            too_busy=table.hits() if among != table.everyone else {},
            longest_overlap_blocks=match.longest(table.everyone),
        )

    def _request(self, summary: RequestSummary) -> RouteRequest:
        return RouteRequest(
            request_id=summary.request_id,
            model=summary.model,
            prompt_tokens=summary.prompt_tokens,
            max_tokens=summary.max_tokens,
            priority=summary.priority,
            user=summary.user,
            session_id=_conversation(summary),
            principal=summary.principal,
            headers=summary.headers,
            block_size=self.block_size,
        )

    def _decide(
        self,
        summary: RequestSummary,
        hashes: Sequence[int],
        pairs: Sequence[tuple[Candidate, LiveWorker]],
        left_out: Sequence[tuple[Candidate, str]],
        started_s: float,
    ) -> Route:
        candidates = [candidate for candidate, _ in pairs]
        named = {candidate.worker_id: number for number, candidate in enumerate(candidates)}
        decision, candidate = self._pick(
            summary,
            candidates,
            lambda name: None if (at := named.get(name)) is None else candidates[at],
        )
        return Route(
            decision=decision,
            candidate=candidate,
            worker=pairs[named[decision.worker_id]][1],
            candidates=candidates,
            sequence_hashes=hashes,
            block_size=self.block_size,
            routing_s=time.perf_counter() - started_s,
            exact=None if self.indexer is None else self.indexer.exact,
            busy=left_out,
        )

    def _pick(
        self,
        summary: RequestSummary,
        candidates: Sequence[Candidate],
        named: Callable[[str], Candidate | None],
    ) -> tuple[Decision, Candidate]:
        """The decision, and the chosen candidate. ``named`` finds a candidate by its id.

        When the policy fails, the candidate with the fewest requests in flight is chosen.
        """
        try:
            policy, request = self.arms.of(summary), self._request(summary)
            decision: object = policy.pick(request, candidates, self._rng)
            cause = None
            if not isinstance(decision, Decision):
                problem = f"returned {type(decision).__name__}, not a Decision"
            elif (chosen := named(decision.worker_id)) is not None:
                return decision, chosen
            else:
                problem = f"chose {decision.worker_id!r}, which is not a candidate"
        except Exception as error:  # noqa: BLE001 - third-party code may raise anything
            problem, cause = f"raised {type(error).__name__}: {error}", error
        problem = self._runner.failed(
            problem, cause, "the worker with the fewest requests is chosen"
        )
        return _fewest_requests(candidates, self._rng, problem)


_FAILING_S = 300.0


class PolicyRunner:
    """Handles failures of a policy plugin, so that no request fails with it.

    A failure is an exception of the policy, or an answer that cannot be used. Of the failures with
    the same cause (an exception's type and the line that raised it), the first of every 1,000 is
    logged, so a second bug shows beside the first. ``strict``: a failure raises RoutingError
    instead.
    """

    def __init__(self, what: str, policy: object, *, strict: bool = False) -> None:
        """``what`` names the kind of policy in messages, such as "routing policy"."""
        self._name = f"{what} {type(policy).__name__}"
        self._strict = strict
        self._failures: Counter[object] = Counter()
        self._last: tuple[str | None, float] = None, -math.inf

    def failing(self) -> str | None:
        """What went wrong last, if that was in the last five minutes."""
        problem, at_s = self._last
        return problem if time.monotonic() - at_s < _FAILING_S else None

    def failed(self, problem: str, cause: Exception | None, instead: str) -> str:
        """The problem, with the policy's name. ``instead``: what is done without its answer."""
        problem = f"{self._name} {problem}"
        self._last = problem, time.monotonic()
        if self._strict:
            raise RoutingError(problem) from cause
        origin = _origin(cause)
        if origin not in self._failures and len(self._failures) >= _MOST_ORIGINS:
            origin = None
        if self._failures[origin] % _LOG_EVERY == 0:
            log.error("%s; %s (failure %d of this kind, one in %d is logged)",
                      problem, instead, self._failures[origin] + 1, _LOG_EVERY,
                      exc_info=cause)  # fmt: skip
        self._failures[origin] += 1
        return problem


def _origin(cause: Exception | None) -> object:
    """Equal for exceptions of one type from one line; None without an exception."""
    if cause is None or cause.__traceback__ is None:
        return None if cause is None else type(cause)
    *_, (frame, line) = traceback.walk_tb(cause.__traceback__)
    return type(cause), frame.f_code.co_filename, line


def _fewest_requests(
    candidates: Sequence[Candidate], rng: random.Random, problem: str
) -> tuple[Decision, Candidate]:
    found = RoutingPolicy.pool(candidates).least(lambda load, _: load.active_requests)
    chosen = rng.choice(found.candidates)
    reason = f"fewest requests ({found.cost:g}), because {problem}"
    return Decision(worker_id=chosen.worker_id, policy=FALLBACK, reason=reason), chosen


def describe_busy(config: BusyConfig, hits: Mapping[str, int]) -> str:
    """A clause for error messages: how many workers are busy by which threshold; at least one."""
    parts = [f"{count} by {name}={getattr(config, name):g}" for name, count in hits.items()]
    count = sum(hits.values())
    workers = "1 worker is" if count == 1 else f"{count} workers are"
    return f"{workers} busy ({', '.join(parts)})"


def _conversation(summary: RequestSummary) -> str | None:
    """The name of the conversation; two principals that choose the same name have two."""
    if summary.session_id is None or summary.principal is None:
        return summary.session_id
    return f"{summary.principal}/{summary.session_id}"
