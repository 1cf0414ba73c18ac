"""Routing policies and their stages: what they get and what they answer."""

from __future__ import annotations

import math
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Annotated, Any, ClassVar, NamedTuple, overload

from attrs import Attribute, field, frozen

from commutator.contract.fairness import FairnessConfig
from commutator.contract.settings import (
    Bounds,
    NonNegativeInt,
    PositiveInt,
    PositiveSeconds,
    setting,
)
from commutator.contract.worker import WorkerRecord

__all__ = [
    "BusyConfig",
    "Candidate",
    "CandidatePool",
    "Cost",
    "Decision",
    "Filter",
    "LeastCost",
    "Overlap",
    "Picker",
    "RouteRequest",
    "RouteStage",
    "RouterConfig",
    "RoutingPolicy",
    "Scorer",
    "WorkerLoad",
    "WorkerRank",
    "on_device",
]


@frozen(kw_only=True)
class RouteRequest:
    """One request as a policy sees it. Clients choose user, session and headers."""

    request_id: str
    """As in ``RequestSummary``."""
    model: str
    """The name that the client gave."""
    prompt_tokens: int
    """Length of the prompt."""
    max_tokens: int = 0
    """Longest answer in tokens."""
    priority: int = 0
    """Lower is served earlier."""
    user: str | None = None
    """The body's field `user`; None where the client gave none."""
    session_id: str | None = None
    """Names a conversation; None where the client gave none."""
    principal: str | None = None
    """The name of the principal that sent it; None where nobody is asked who they are."""
    headers: Mapping[str, str] = field(factory=dict)
    """The headers that `frontend.forward_headers` names, as far as they were sent; lower case."""
    block_size: int = 16
    """Tokens in one KV block; overlaps and loads are counted in such blocks."""

    @property
    def prompt_blocks(self) -> float:
        """The prompt's length in blocks, not rounded."""
        return self.prompt_tokens / self.block_size


@frozen(kw_only=True)
class WorkerLoad:
    """What a worker has in flight, as the front doors count it; not scraped from the engine."""

    active_requests: int = 0
    """Requests that were sent and have not ended."""
    active_prefill_tokens: int = 0
    """Prompt tokens of the requests whose first output token has not come."""
    active_decode_blocks: int = 0
    """KV blocks that the requests in flight hold, prompt and answer."""

    def __add__(self, other: WorkerLoad) -> WorkerLoad:
        return WorkerLoad(
            active_requests=self.active_requests + other.active_requests,
            active_prefill_tokens=self.active_prefill_tokens + other.active_prefill_tokens,
            active_decode_blocks=self.active_decode_blocks + other.active_decode_blocks,
        )


@frozen(kw_only=True)
class Overlap:
    """Length of the longest cached prefix without a gap, in blocks by cache level.

    A block with several copies counts at the fastest level only.
    """

    device: int = 0
    """Blocks in the engine's own memory, which need no load."""
    host: int = 0
    """Blocks in the worker's main memory."""
    disk: int = 0
    """Blocks on a local disk."""
    external: int = 0
    """Blocks in an object store, a shared cache or another machine."""

    @property
    def blocks(self) -> int:
        """The length of the prefix over all levels."""
        return self.device + self.host + self.disk + self.external


@frozen(kw_only=True)
class Candidate:
    """A live worker, or one data-parallel rank of it, that could serve the request."""

    worker: WorkerRecord
    """The worker's record."""
    load: WorkerLoad = WorkerLoad()
    """What it has in flight, this request not among it."""
    overlap: Overlap = Overlap()
    """How much of the prompt its KV cache holds."""
    rank: int = 0
    """The data-parallel rank, from 0."""

    @property
    def worker_id(self) -> str:
        """Names the candidate in decisions: the worker's id, with "@RANK" if it has several."""
        worker = self.worker
        several = worker.info.data_parallel_size > 1
        return f"{worker.worker_id}@{self.rank}" if several else worker.worker_id


@lru_cache(4096)
def ranks_of(worker_id: str, count: int) -> tuple[tuple[WorkerRank, str], ...]:
    """Each rank of a worker that has ``count`` of them, with its ``Candidate.worker_id``."""
    return tuple(
        (WorkerRank(worker_id, rank), f"{worker_id}@{rank}" if count > 1 else worker_id)
        for rank in range(count)
    )


Cost = Callable[[WorkerLoad, Overlap], float]
"""What a candidate with this load and overlap costs; pure, and never NaN.

It must not fall when a field of the load grows, nor rise when a field of the overlap grows, or one
is compared with a candidate that has more in every field. Then a pool need not ask about each
candidate.
"""


@frozen(kw_only=True)
class LeastCost:
    """The candidates of a pool that cost least."""

    cost: float
    """The least cost."""
    candidates: Sequence[Candidate]
    """Every candidate that costs this, in the order of the pool; never empty."""
    compared: Sequence[Candidate]
    """Candidates for the explanation of the decision: the whole pool, or a few of the cheapest."""
    others_cost: float = math.inf
    """No candidate that is not in ``compared`` costs less than this; infinite if there is none."""


class CandidatePool(Sequence[Candidate], ABC):
    """Candidates that can be asked which of them costs least without a look at each.

    Ordered by worker id. Valid during the call of ``pick`` that got it, and never changed by it.
    """

    @property
    @abstractmethod
    def fewest_requests(self) -> int:
        """The least ``active_requests`` of any candidate. Raises ValueError if there is none."""

    @property
    @abstractmethod
    def total_requests(self) -> int:
        """The sum of the ``active_requests`` of all candidates; 0 if there is none."""

    @abstractmethod
    def at_most_requests(self, limit: float) -> CandidatePool:
        """The candidates with at most ``limit`` requests in flight; there may be none."""

    @abstractmethod
    def least(self, cost: Cost) -> LeastCost:
        """The candidates that cost least. Raises ValueError if there is no candidate."""

    @abstractmethod
    def most(self, amount: Callable[[WorkerLoad], float]) -> float:
        """The greatest amount of any candidate. Raises ValueError if there is no candidate.

        ``amount`` must not fall when a field of the load grows.
        """


class ScannedPool(CandidatePool):
    """Candidates that are all looked at."""

    def __init__(self, candidates: Sequence[Candidate]) -> None:
        self._candidates = candidates

    def __len__(self) -> int:
        return len(self._candidates)

    @overload
    def __getitem__(self, index: int) -> Candidate: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Candidate]: ...
    def __getitem__(self, index: int | slice) -> Candidate | Sequence[Candidate]:
        return self._candidates[index]

    @property
    def fewest_requests(self) -> int:
        return min(candidate.load.active_requests for candidate in self._candidates)

    @property
    def total_requests(self) -> int:
        return sum(candidate.load.active_requests for candidate in self._candidates)

    def at_most_requests(self, limit: float) -> ScannedPool:
        return ScannedPool([one for one in self._candidates if one.load.active_requests <= limit])

    def least(self, cost: Cost) -> LeastCost:
        costs = [cost(one.load, one.overlap) for one in self._candidates]
        least = min(costs)
        tied = [one for one, its in zip(self._candidates, costs, strict=True) if its == least]
        return LeastCost(cost=least, candidates=tied, compared=self._candidates)

    def most(self, amount: Callable[[WorkerLoad], float]) -> float:
        return max(amount(candidate.load) for candidate in self._candidates)


@frozen(kw_only=True)
class Decision:
    """The worker that serves a request, and why."""

    worker_id: str
    """The ``Candidate.worker_id`` that was chosen."""
    policy: str
    """The `kind` of the policy that chose."""
    reason: str
    """One sentence, for people."""
    scores: Mapping[str, Mapping[str, float]] = field(factory=dict)
    """For each compared candidate, by its ``worker_id``, the terms of its score by name."""
    not_scored: int = 0
    """Candidates without a score, because none of them can be better; ``reason`` says why."""


class RoutingPolicy(ABC):
    """Chooses a worker. It does no I/O and reads no clock; random choices use ``rng``.

    One instance serves one model in one front-door process and is called from one thread, so it
    may have state. The same instance serves the live system, the simulator and the
    conformance suite.
    """

    uses_overlap: ClassVar[bool] = False
    """Whether ``pick`` reads ``Candidate.overlap``; if not, overlaps are not looked up."""

    @abstractmethod
    def pick(
        self, request: RouteRequest, candidates: Sequence[Candidate], rng: random.Random
    ) -> Decision:
        """The decision. ``candidates`` is never empty and is ordered by worker id.

        It may be a ``CandidatePool``, which makes a ``Candidate`` only when it is looked at. A
        policy that looks at each costs time in proportion to the workers; see ``pool``.
        """

    @staticmethod
    def pool(candidates: Sequence[Candidate]) -> CandidatePool:
        """The candidates of ``pick`` as a pool, which finds the one that costs least.

        It finds the same ones as a look at each, in the same order, so that equal chance gives
        equal decisions.
        """
        if type(candidates) is list:  # nearly always; to ask an abstract class takes far longer
            return ScannedPool(candidates)
        return candidates if isinstance(candidates, CandidatePool) else ScannedPool(candidates)

    def forget(self, worker_id: str) -> None:
        """A worker left routing: drop the state about it. Default: does nothing."""


class WorkerRank(NamedTuple):
    """One data-parallel rank of one worker; each rank has a prefix cache."""

    worker_id: str
    """The worker's id, without a rank."""
    rank: int = 0
    """The data-parallel rank, from 0."""


@lru_cache(65_536)
def on_device(blocks: int) -> Overlap:
    """An overlap of ``blocks`` on the device; cached, as most overlaps are such."""
    return Overlap(device=blocks)


@frozen(kw_only=True)
class RouteStage:
    """Options of every stage. Stages have no state, do no I/O and read no clock."""

    kind: str = setting("The stage plugin.")


@frozen(kw_only=True)
class Filter(RouteStage, ABC):
    """A stage that removes candidates that must not get the request."""

    @abstractmethod
    def keep(self, request: RouteRequest, candidates: Sequence[Candidate]) -> Sequence[Candidate]:
        """The candidates that stay. A filter that returns none is skipped for this request."""

    def most_requests(self, request: RouteRequest) -> float | None:
        """With how many requests in flight a candidate stays, if ``keep`` asks nothing else.

        Then ``keep`` need not be called. None, the default: it has to be.
        """


@frozen(kw_only=True)
class Scorer(RouteStage, ABC):
    """A stage that rates each candidate from 0 to 1; higher is better."""

    weight: Annotated[float, Bounds(minimum=0)] = setting(
        "Factor of this scorer.", 1.0, tunable=(0.1, 10)
    )

    @abstractmethod
    def score(self, request: RouteRequest, candidates: Sequence[Candidate]) -> Mapping[str, float]:
        """A score for each worker id; values outside 0 to 1 are cut."""

    def rating(
        self, request: RouteRequest, candidates: Sequence[Candidate]
    ) -> Callable[[WorkerLoad, Overlap], float] | None:
        """``score`` as a function of a candidate's load and overlap, if it depends on nothing else.

        It must not rise when a field of the load grows, nor fall when one of the overlap does. Then
        candidates that cannot be the best are not scored. None, the default: ``score`` is called.
        """


@frozen(kw_only=True)
class Picker(RouteStage, ABC):
    """A stage that chooses a candidate by its weighted sum of scores."""

    takes_best: ClassVar[bool] = False
    """Whether ``choose`` is ``rng.choice`` of those with the highest total, in their order."""

    @abstractmethod
    def choose(self, totals: Mapping[str, float], rng: random.Random) -> str:
        """The chosen worker id; ``totals`` is never empty."""


def _needs_threshold(config: BusyConfig, field: Attribute[Any], value: float) -> None:
    if value != field.default and not config.enabled:
        raise ValueError(
            f"{field.name}: without effect, as no worker is ever busy; set max_active_requests, "
            "active_prefill_tokens_threshold or active_decode_blocks_threshold, or remove it"
        )


@frozen(kw_only=True)
class BusyConfig:
    """When a worker is too busy for one more request, and how requests wait for a worker.

    Without any threshold no worker is ever too busy.
    """

    max_active_requests: PositiveInt | None = setting(
        "A worker with this number of requests in flight is busy.", None
    )
    active_prefill_tokens_threshold: NonNegativeInt | None = setting(
        "A worker is busy with more prompt tokens than this sent to it and not yet computed.", None
    )
    active_decode_blocks_threshold: Annotated[float, Bounds(above=0, maximum=10)] | None = setting(
        "A worker is busy when its requests in flight need more than this part of its KV blocks. "
        "Blocks count once for each request, so with shared prefixes it may be above 1.",
        None,
    )
    max_queued_requests: NonNegativeInt = setting(
        "Requests of one model that may wait, in each front door, while every worker is busy; one "
        "more is answered 429, or the last of the principal that has the most waiting, or the "
        "last of its own if its `priority` is less urgent. Lower `priority` goes first.",
        1024,
        validator=_needs_threshold,
    )
    max_queue_s: PositiveSeconds = setting(
        "A request that has waited this long for a worker is answered 429.",
        60.0,
        validator=_needs_threshold,
    )
    fairness: FairnessConfig | None = setting(
        "Whose request is next when several principals' requests wait; {kind: weighted} by "
        "default. `priority` orders the requests of one principal, with {kind: fifo} all.",
        None,
        validator=_needs_threshold,
    )

    @property
    def enabled(self) -> bool:
        """Whether any threshold is set."""
        return (
            self.max_active_requests is not None
            or self.active_prefill_tokens_threshold is not None
            or self.active_decode_blocks_threshold is not None
        )


@frozen(kw_only=True)
class RouterConfig:
    """Options of every routing policy; each policy plugin adds its own."""

    kind: str = setting("The routing policy plugin.")
    block_size: PositiveInt = setting(
        "Tokens in one block of the prefix index; set it to the block size of the engines.", 16
    )
    use_kv_events: bool = setting(
        "Learn what engines hold from their KV events; otherwise guess it from routed prompts.",
        True,
    )
    router_ttl_s: PositiveSeconds = setting(
        "When guessing: how long a routed prompt is assumed to stay in a worker's cache.", 120.0
    )
    router_replica_sync: bool = setting(
        "Front doors exchange what they have in flight, so that each knows the whole load.", True
    )
    busy: BusyConfig = setting(
        "When a worker is busy, and how requests wait while every worker is.", factory=BusyConfig
    )
