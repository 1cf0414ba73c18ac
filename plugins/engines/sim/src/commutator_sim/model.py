"""One engine in virtual time: requests and the passing of time go in, events come out.

Pure: no clock, no thread, no randomness; times are integer nanoseconds, so results are exact and
repeatable. The engine works in steps, as real ones do. A step gives one token to every decoding
request and spends the rest of its token budget on prefill chunks; its work is decided when it
begins. Steps that decode the same batch are made together, at the cost of one.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable

from attrs import define, field

from commutator_sim.cache import BlockCache
from commutator_sim.config import SimConfig
from commutator_sim.events import (
    Event,
    Finished,
    FirstToken,
    Preempted,
    Pulled,
    Pulling,
    Ready,
    Steps,
    Stored,
)
from commutator_sim.request import Phase, Run, SimRequest
from commutator_sim.tiers import OffloadTiers

FOREVER = 1 << 62
"""Later than any time in ns, more than any number of steps."""


class Appointments:
    """A heap of runs by time, then by order. An entry is void once its run changes its phase."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, tuple[int, int], int, Run]] = []

    def add(self, run: Run, time_ns: int = 0) -> None:
        heapq.heappush(self._heap, (time_ns, run.order, run.epoch, run))

    def first(self) -> Run | None:
        """The run whose turn is next; it is not taken out."""
        heap = self._heap
        while heap and heap[0][2] != heap[0][3].epoch:
            heapq.heappop(heap)
        return heap[0][3] if heap else None

    def first_ns(self) -> int | None:
        """The time of the run that ``first`` returns."""
        return None if not self._heap or self.first() is None else self._heap[0][0]

    def pop(self) -> Run:
        """Take out the run that ``first`` returned."""
        return heapq.heappop(self._heap)[3]


class Exports:
    """Computed blocks that are held until another worker has them, even if their request ends."""

    def __init__(self, cache: BlockCache) -> None:
        self._cache = cache
        self._held: dict[int, list[int]] = {}

    def begin(self, key: int) -> None:
        """Request ``key`` was submitted, and its blocks are for another worker."""
        self._held[key] = []

    def extend(self, run: Run) -> bool:
        """Hold the blocks that ``run`` has computed or found. Returns whether any are new."""
        held = self._held.get(run.key)
        if held is None or run.named <= len(held):
            return False
        fresh = run.request.block_keys[len(held) : run.named]
        self._cache.pin(fresh)
        held += fresh
        return True

    def release(self, key: int) -> None:
        """Release the blocks of request ``key``. Harmless when none are held."""
        self._cache.release(self._held.pop(key, ()), 0)


class Pulls:
    """Requests that wait for another worker's blocks; one transfer follows the other."""

    def __init__(self, parameters: SimConfig, loading: Appointments) -> None:
        """``loading`` gets each request with the time at which its last block arrives."""
        self._parameters = parameters
        self._loading = loading
        self._link_free_ns = 0

    def begin(self, run: Run, found: int, limit: int, now_ns: int) -> Pulling | Pulled:
        """The first ``found`` blocks of ``run`` are filled; those up to ``limit`` may be pulled.

        Afterwards ``run.pulling`` says whether it has to wait for any.
        """
        run.pulled, end = found, min(limit, run.request.pulls or 0)
        if found >= end:
            return self.end(run, now_ns)
        run.computed = end * self._parameters.block_size
        return Pulling(now_ns, run.key, found, end)

    def more(self, run: Run, now_ns: int) -> None:
        """Begin to pull the blocks that the other worker has ready by now."""
        end = run.computed // self._parameters.block_size
        fresh = min(run.offered, end) - run.pulled
        if fresh > 0:
            run.pulled += fresh
            begin_ns = max(self._link_free_ns, now_ns)
            self._link_free_ns = begin_ns + fresh * self._parameters.handover_block_ns
            if run.pulled == end:
                ready_ns = self._link_free_ns + self._parameters.handover_latency_ns
                self._loading.add(run, ready_ns)

    def end(self, run: Run, now_ns: int) -> Pulled:
        """All the blocks that ``run`` waited for have arrived."""
        run.pulling = False
        return Pulled(now_ns, run.key, run.pulled - run.named)


class DecodeBatch:
    """Requests that decode together, and the steps at which one of them fills a block or ends."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._step = 0
        self._turns: list[tuple[int, int, int, Run]] = []
        """Heap of (step, serial number, epoch, run)."""
        self._serial = itertools.count()
        self.runs: dict[int, Run] = {}
        self.growing: list[Run] = []
        """Runs whose blocks are full: they need one more before the next step."""

    def join(self, run: Run) -> None:
        """``run.computed`` tokens are computed; from the next step on it decodes."""
        run.move(Phase.DECODE)
        run.decode_base = run.computed - self._step
        self.runs[run.key] = run
        self.expect_turn(run)

    def leave(self, run: Run) -> None:
        """Take a run out, with its counts as of now."""
        run.computed = run.decode_base + self._step
        run.generated = self.generated(run)
        del self.runs[run.key]

    def generated(self, run: Run) -> int:
        """Tokens of a decoding run's answer so far."""
        return run.decode_base + self._step - run.request.prompt_tokens + 1

    def steps_to_turn(self) -> int:
        """Steps until something happens to one of the runs. There is at least one run."""
        turns = self._turns
        while turns[0][2] != turns[0][3].epoch:
            heapq.heappop(turns)
        return turns[0][0] - self._step

    def advance(self, steps: int) -> list[Run]:
        """Make ``steps`` steps, none beyond a turn; returns the runs that turn, best order first.

        Their ``computed`` is set: at a block's end, at the answer's end, or both.
        """
        self._step += steps
        turns, now = self._turns, self._step
        due = []
        while turns and turns[0][0] == now:
            _, _, epoch, run = heapq.heappop(turns)
            if epoch == run.epoch:
                run.computed = run.decode_base + now
                due.append(run)
        if len(due) > 1:
            due.sort(key=lambda run: run.order)
        return due

    def expect_turn(self, run: Run) -> None:
        """``run`` decodes on: note when it fills its block or ends, or that it needs a block."""
        in_block = run.computed % self._block_size
        if in_block:
            self._push(run, self._block_size - in_block)
        else:
            self.growing.append(run)

    def has_grown(self, run: Run) -> None:
        """``run`` got the block that it needed."""
        self._push(run, self._block_size)

    def _push(self, run: Run, to_block_end: int) -> None:
        to_end = run.kv_tokens - run.decode_base - self._step
        turn = self._step + min(to_block_end, to_end)
        heapq.heappush(self._turns, (turn, next(self._serial), run.epoch, run))


@define
class Plan:
    """Equal steps whose work is decided: the first may be under way, the others follow it."""

    decoding: int
    left: int
    """Tokens of a step that are not planned yet."""
    step_ns: int = 0
    count: int = 1
    prefill_tokens: int = 0
    chunks: list[tuple[Run, int, int]] = field(factory=list)
    """Prefilling runs, each with its epoch and its number of tokens."""

    def add(self, run: Run) -> None:
        """Add as many tokens of ``run`` as are left."""
        tokens = min(self.left, run.target - run.computed)
        self.chunks.append((run, run.epoch, tokens))
        self.left -= tokens
        self.prefill_tokens += tokens


class SimModel:
    """A continuous-batching engine with a paged KV cache and prefix reuse.

    The driver alternates ``advance`` to a time with ``submit`` and ``abort`` at that time. A step
    that begins at exactly that time includes them; a step under way does not change, except that
    the tokens of an aborted request are lost.
    """

    def __init__(self, parameters: SimConfig) -> None:
        self.parameters = parameters
        self.cache = BlockCache(parameters.kv_capacity_blocks)
        self.tiers = OffloadTiers(parameters)
        self.now_ns = 0
        """The time last advanced to."""
        self._clock_ns = 0
        """When the current or next step begins: not after ``now_ns`` while a step is under way."""
        self._decode = DecodeBatch(parameters.block_size)
        self._arrivals = itertools.count()
        self._live: dict[int, Run] = {}
        self._admitted: dict[int, Run] = {}
        self._prefilling: dict[int, Run] = {}
        """In order of admission."""
        self._waiting = Appointments()
        self._loading = Appointments()
        self._exports = Exports(self.cache)
        self._pulls = Pulls(parameters, self._loading)
        self._stuck = False
        """Whether the first waiting request lacks blocks, and none were freed since."""
        self._plan: Plan | None = None
        self._events: list[Event] = []

    @property
    def running(self) -> int:
        """Requests in the batch."""
        return len(self._admitted)

    @property
    def waiting(self) -> int:
        """Requests that wait for a place in the batch or for blocks."""
        return len(self._live) - len(self._admitted)

    def decoding(self) -> Iterable[int]:
        """Keys of the requests that have their first token but not their last, unless preempted."""
        return self._decode.runs.keys()

    def generated(self, key: int) -> int:
        """Tokens of a live request's answer so far."""
        run = self._live[key]
        return self._decode.generated(run) if run.phase is Phase.DECODE else run.generated

    def submit(self, key: int, request: SimRequest) -> None:
        """``request`` arrives now. Raises ValueError if it can never fit or the key is in use."""
        needed = self.parameters.blocks(request.kv_tokens)
        if needed > self.parameters.kv_capacity_blocks:
            raise ValueError(
                f"a request of {request.kv_tokens} tokens needs {needed} KV blocks; "
                f"there are {self.parameters.kv_capacity_blocks}"
            )
        if key in self._live:
            raise ValueError(f"request {key} is in the model already")
        order = (request.priority, next(self._arrivals))
        run = Run(key, request, order, request.kv_tokens)
        run.pulling = request.pulls is not None
        self._live[key] = run
        if request.exports:
            self._exports.begin(key)
        self._enqueue(run)
        self._disturb()

    def abort(self, key: int) -> None:
        """End a request now and free its blocks. No effect if unknown."""
        run = self._live.pop(key, None)
        if run is None:
            return
        self._leave_batch(run)
        run.move(Phase.OVER)
        self.release(key)

    def release(self, key: int) -> None:
        """Another worker needs this request's blocks no longer. No effect if none are held."""
        self._exports.release(key)
        self._stuck = False
        self._disturb()

    def offer(self, key: int, blocks: int) -> None:
        """Another worker has the first ``blocks`` blocks of a pulling request's prompt ready.

        No effect if the request is unknown or has all the blocks that it needs.
        """
        run = self._live.get(key)
        if run is None or not run.pulling:
            return
        run.offered = blocks
        if run.phase is Phase.LOADING:
            self._pulls.more(run, self.now_ns)
            self._disturb()

    def keep(self, key: int, blocks: int) -> None:
        """The first ``blocks`` blocks of a pulling request arrived; others can reuse them."""
        run = self._live.get(key)
        if run is not None and run.pulling and run.phase is Phase.LOADING:
            run.computed = min(run.computed, blocks * self.parameters.block_size)
            self._name(run)

    def reset_prefix_cache(self) -> None:
        """Forget every block that no request holds, in every tier."""
        self._events += self.tiers.clear(self.cache.clear(), self.now_ns)
        self._stuck = False

    def advance(self, until_ns: int = FOREVER, max_steps: int = FOREVER) -> list[Event]:
        """Let time pass until ``until_ns``; returns the events since the last call.

        Without ``until_ns``, time passes until nothing is left to do. At most ``max_steps`` steps
        are made.
        """
        if until_ns < self.now_ns:
            raise ValueError(f"time cannot go back from {self.now_ns} to {until_ns}")
        left = max_steps
        while left and self._clock_ns < until_ns:
            plan = self._plan or self._begin()
            if plan is None:
                if self._skip_idle(until_ns):
                    continue
                break
            count = min(plan.count, left, (until_ns - self._clock_ns) // plan.step_ns)
            if not count:
                break
            self._make(plan, count)
            left -= count
            if not left or self._clock_ns == until_ns:
                self._plan = None  # the next step includes what is submitted between two calls
        if until_ns == FOREVER or not left:
            until_ns = max(self.now_ns, self._clock_ns)
        self.now_ns = until_ns
        events, self._events = self._events, []
        return events

    def next_event_ns(self) -> int | None:
        """Until this time only ``Steps`` happen, unless the driver acts; None: nothing happens.

        Begins the step that is due now, so submit first what arrives now.
        """
        plan = self._plan or self._begin()
        if plan is None:
            return self._loading.first_ns()
        return self._clock_ns + plan.count * plan.step_ns

    def step_end_ns(self) -> int | None:
        """End of the current step or, between steps, of the next one, which it begins."""
        plan = self._plan or self._begin()
        if plan is None:
            return self._loading.first_ns()
        return self._clock_ns + plan.step_ns

    def _disturb(self) -> None:
        """Something changed: only the step under way, if any, stays as planned."""
        if self._plan is not None:
            self._plan.count = 1

    def _skip_idle(self, until_ns: int) -> bool:
        """Pass time without steps. Returns whether there is more to do before ``until_ns``."""
        ready_ns = self._loading.first_ns()
        if ready_ns is not None and ready_ns <= until_ns:
            self._clock_ns = max(self._clock_ns, ready_ns)
            return True
        if until_ns < FOREVER:
            self._clock_ns = until_ns
        return False

    # ------------------------------------------------------------ beginning a step

    def _begin(self) -> Plan | None:
        """Plan the step at ``_clock_ns``; None when there is nothing to do."""
        self._finish_loads()
        self._grow()
        decoding = len(self._decode.runs)
        plan = Plan(decoding, self.parameters.max_tokens_per_step - decoding)
        for run in self._prefilling.values():
            if not plan.left:
                break
            plan.add(run)
        while plan.left and (admitted := self._admit()) is not None:
            if admitted.phase is Phase.PREFILL:
                plan.add(admitted)
        if not decoding and not plan.chunks:
            return None
        plan.step_ns = self.parameters.step_ns(decoding, plan.prefill_tokens)
        if not plan.chunks:
            plan.count = self._equal_steps(plan.step_ns)
        self._plan = plan
        return plan

    def _equal_steps(self, step_ns: int) -> int:
        """Number of steps from now on that only decode the present batch."""
        count = self._decode.steps_to_turn()
        if (ready_ns := self._loading.first_ns()) is not None:
            count = min(count, -((self._clock_ns - ready_ns) // step_ns))
        return count

    def _finish_loads(self) -> None:
        while (ready_ns := self._loading.first_ns()) is not None and ready_ns <= self._clock_ns:
            run = self._loading.pop()
            if run.pulling:
                self._events.append(self._pulls.end(run, self._clock_ns))
            run.move(Phase.PREFILL)
            self._prefilling[run.key] = run
            self._name(run)

    def _grow(self) -> None:
        """Give each run at a block's end its next block; preempt the last in order if needed."""
        growing, self._decode.growing = self._decode.growing, []
        growing.sort(key=lambda run: run.order)
        for run in growing:
            while run.phase is Phase.DECODE:
                if self.cache.used_blocks < self.cache.capacity_blocks:
                    self._take(run, 1)
                    self._decode.has_grown(run)
                    break
                self._preempt(max(self._admitted.values(), key=lambda other: other.order))

    def _preempt(self, run: Run) -> None:
        self._leave_batch(run)
        self._enqueue(run)
        self._events.append(Preempted(self._clock_ns, run.key))

    def _admit(self) -> Run | None:
        """Admit the first waiting request to the batch, if there is room and enough blocks."""
        if self._stuck or len(self._admitted) == self.parameters.max_running_requests:
            return None
        if (run := self._waiting.first()) is None:
            return None
        keys = run.request.block_keys
        run.target = run.request.prompt_tokens + run.generated
        # At least one token is computed: the next one is sampled from its logits.
        limit = min((run.target - 1) // self.parameters.block_size, len(keys))
        found, idle = self.cache.match(keys, limit)
        needed = self.parameters.blocks(run.target) - found
        if self.cache.used_blocks + idle + needed > self.cache.capacity_blocks:
            self._stuck = True
            return None
        self._waiting.pop()
        self._admitted[run.key] = run
        self.cache.pin(keys[:found])
        run.named = found
        self._events += self.tiers.on_device(run.request, 0, found, self._clock_ns)
        self._export(run)
        self._fetch(run, found, limit)
        self._take(run, needed)
        return run

    def _fetch(self, run: Run, found: int, limit: int) -> None:
        """Begin the prefill after ``found`` blocks, or load or pull more of them first."""
        size = self.parameters.block_size
        wanted = () if run.pulling else run.request.block_keys[found:limit]
        load = self.tiers.load(wanted, self._clock_ns)
        run.computed = (found + load.blocks) * size
        if run.cached_tokens < 0:
            run.cached_tokens, run.loaded_tokens = run.computed, load.blocks * size
        if run.pulling:
            self._events.append(self._pulls.begin(run, found, limit, self._clock_ns))
        if run.pulling:  # some of its blocks are to come
            run.move(Phase.LOADING)
            self._pulls.more(run, self._clock_ns)
        elif load.blocks:
            run.move(Phase.LOADING)
            self._loading.add(run, load.ready_ns)
        else:
            run.move(Phase.PREFILL)
            self._prefilling[run.key] = run

    def _export(self, run: Run) -> None:
        if run.request.exports and self._exports.extend(run):
            self._events.append(Ready(self._clock_ns, run.key, run.named))

    def _take(self, run: Run, count: int) -> None:
        run.unnamed += count
        if evicted := self.cache.take(count):
            self._events += self.tiers.evict(evicted, self._clock_ns)

    # -------------------------------------------------------------- ending a step

    def _make(self, plan: Plan, count: int) -> None:
        """``count`` steps of ``plan`` pass."""
        self._events.append(
            Steps(self._clock_ns, count, plan.step_ns, plan.decoding, plan.prefill_tokens)
        )
        self._clock_ns += count * plan.step_ns
        plan.count -= count
        if not plan.count:
            self._plan = None
        turned = self._decode.advance(count)
        for run, epoch, tokens in plan.chunks:
            if epoch == run.epoch:
                self._computed(run, tokens)
        for run in turned:
            self._name(run)
            if run.computed == run.kv_tokens:
                self._finish(run)
            else:
                self._decode.expect_turn(run)

    def _computed(self, run: Run, tokens: int) -> None:
        run.computed += tokens
        self._name(run)
        if run.computed < run.target:
            return
        del self._prefilling[run.key]
        if not run.generated:
            self._events.append(
                FirstToken(self._clock_ns, run.key, run.cached_tokens, run.loaded_tokens)
            )
        run.generated += 1
        if run.generated == run.request.output_tokens:
            self._finish(run)
        else:
            self._decode.join(run)

    def _name(self, run: Run) -> None:
        """Give keys to the blocks of ``run`` that are full by now: others can reuse them."""
        keys = run.request.block_keys
        full = min(run.computed // self.parameters.block_size, len(keys))
        if full <= run.named:
            return
        fresh = keys[run.named : full]
        known = self.cache.name(fresh)
        if known < len(fresh):
            stored = tuple(fresh[known:])
            self._events.append(Stored(self._clock_ns, run.key, run.named + known, stored))
        self._events += self.tiers.on_device(run.request, run.named, full, self._clock_ns)
        run.unnamed -= full - run.named
        run.named = full
        self._export(run)
        self._stuck = False

    def _finish(self, run: Run) -> None:
        self._leave_batch(run)
        run.move(Phase.OVER)
        del self._live[run.key]
        self._events.append(Finished(self._clock_ns, run.key))

    # ------------------------------------------------------------ in and out of the batch

    def _enqueue(self, run: Run) -> None:
        run.move(Phase.WAITING)
        self._waiting.add(run)
        self._stuck = False

    def _leave_batch(self, run: Run) -> None:
        """Take ``run`` out of the batch and free its blocks."""
        if run.phase is Phase.DECODE:
            self._decode.leave(run)
        self._prefilling.pop(run.key, None)
        self._admitted.pop(run.key, None)
        self.cache.release(run.request.block_keys[: run.named], run.unnamed)
        run.named = run.unnamed = 0
        self._stuck = False
