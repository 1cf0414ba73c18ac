"""A second model of the sim engine, written to be obvious: every step and token by itself.

Only the tiers behind the device are the same: they have tests of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from attrs import astuple, define, field

from commutator_sim.config import SimConfig
from commutator_sim.events import (
    Event,
    Finished,
    FirstToken,
    Offloaded,
    Preempted,
    Pulled,
    Pulling,
    Ready,
    Removed,
    Steps,
    Stored,
)
from commutator_sim.request import SimRequest
from commutator_sim.tiers import OffloadTiers

__all__ = ["StepByStep", "Told", "told"]

Told = tuple[Any, ...]
NEVER = 1 << 62


def told(events: Sequence[Event]) -> list[Told]:
    """Events with every step and every block by itself."""
    out: list[Told] = []
    for event in events:
        match event:
            case Steps(start_ns, count, step_ns, decoding, prefill_tokens):
                starts = range(start_ns, start_ns + count * step_ns, step_ns)
                out += [("step", start, step_ns, decoding, prefill_tokens) for start in starts]
            case FirstToken(time_ns, key, cached, loaded):
                out.append(("first", time_ns, key, cached, loaded))
            case Finished(time_ns, key):
                out.append(("finished", time_ns, key))
            case Preempted(time_ns, key):
                out.append(("preempted", time_ns, key))
            case Ready() | Pulled() | Pulling():
                out.append((type(event).__name__.lower(), *astuple(event)))
            case Stored(time_ns, key, first, blocks):
                out += [("stored", time_ns, key, first + i, b) for i, b in enumerate(blocks)]
            case Offloaded(time_ns, tier, blocks):
                out += [("offloaded", time_ns, tier, block) for block in blocks]
            case Removed(time_ns, tier, blocks):
                out += [("removed", time_ns, tier, block) for block in blocks]
    return out


@define(eq=False)
class Job:
    """One request of the reference."""

    key: int
    request: SimRequest
    order: tuple[int, int]
    state: str = "waiting"
    tokens: int = 0
    """Tokens of the answer so far."""
    kv: int = 0
    """Tokens with KV."""
    blocks: list[int | None] = field(factory=list)
    """The key of each block; None while no other request can find it."""
    ready_ns: int = 0
    cached: tuple[int, int] | None = None
    chunk: int = 0
    """Prefill tokens in the step under way."""
    pulling: bool = False
    offered: int = 0
    pulled: int = 0


class StepByStep:
    """Uses lists, makes one step at a time, and counts everything anew when it is needed."""

    def __init__(self, parameters: SimConfig) -> None:
        self.p = parameters
        self.jobs: list[Job] = []
        self.admitted: list[Job] = []
        self.idle: list[int] = []
        self.tiers = OffloadTiers(parameters)
        self.exported: dict[int, list[int]] = {}
        self.handover_link_free = 0
        self.now = self.clock = self.arrivals = 0
        self.step_ns: int | None = None
        """Set while a step is under way."""
        self.out: list[Told] = []

    def submit(self, key: int, request: SimRequest) -> None:
        order = (request.priority, self.arrivals)
        pulling = request.pulls is not None
        self.jobs.append(Job(key, request, order, pulling=pulling))
        self.arrivals += 1
        if request.exports:
            self.exported[key] = []

    def abort(self, key: int) -> None:
        for job in [job for job in self.jobs if job.key == key]:
            self.give_back(job)
            self.jobs.remove(job)
            job.state = "over"
            self.release(key)

    def release(self, key: int) -> None:
        keys = self.exported.pop(key, [])
        self.idle += [key for key in reversed(keys) if key not in self.held()]

    def offer(self, key: int, blocks: int) -> None:
        for job in [job for job in self.jobs if job.key == key and job.pulling]:
            job.offered = blocks
            if job.state == "loading":
                self.pull(job, self.now)

    def reset(self) -> None:
        self.out += told(self.tiers.clear(self.idle, self.now))
        self.idle.clear()

    def advance(self, until: int) -> None:
        while self.clock < until:
            if self.step_ns is None:
                self.begin()
            if self.step_ns is None:
                ready = [job.ready_ns for job in self.admitted if job.state == "loading"]
                self.clock = min([*ready, until])
            elif self.clock + self.step_ns <= until:
                self.end()
            else:
                break
        self.now = until

    def held(self) -> set[int]:
        by_jobs = {key for job in self.admitted for key in job.blocks if key is not None}
        return by_jobs.union(*self.exported.values())

    def used(self) -> int:
        return len(self.held()) + sum(job.blocks.count(None) for job in self.admitted)

    def begin(self) -> None:
        self.finish_loads()
        self.grow()
        decoding = sum(job.state == "decode" for job in self.admitted)
        chunks = self.hand_out(self.p.max_tokens_per_step - decoding)
        if decoding or chunks:
            self.step_ns = self.p.step_ns(decoding, chunks)
            self.out.append(("step", self.clock, self.step_ns, decoding, chunks))

    def finish_loads(self) -> None:
        loading = [job for job in self.admitted if job.state == "loading"]
        for job in sorted(loading, key=lambda job: (job.ready_ns, job.order)):
            if job.ready_ns <= self.clock:
                if job.pulling:
                    job.pulling = False
                    others = job.pulled - sum(key is not None for key in job.blocks)
                    self.out.append(("pulled", self.clock, job.key, others))
                job.state = "prefill"
                self.admitted.remove(job)
                self.admitted.append(job)
                self.publish(job)

    def grow(self) -> None:
        for job in sorted(self.admitted, key=lambda job: job.order):
            while job.state == "decode" and job.kv == len(job.blocks) * self.p.block_size:
                if self.used() < self.p.kv_capacity_blocks:
                    self.take(job, 1)
                else:
                    victim = max(self.admitted, key=lambda job: job.order)
                    self.give_back(victim)
                    victim.state = "waiting"
                    self.out.append(("preempted", self.clock, victim.key))

    def hand_out(self, budget: int) -> int:
        """Prefill chunks of this step: first of the batch, then of newly admitted requests."""
        for job in self.admitted:
            job.chunk = 0
            if job.state == "prefill":
                job.chunk = min(budget, job.request.prompt_tokens + job.tokens - job.kv)
                budget -= job.chunk
        while budget and (new := self.admit()) is not None:
            if new.state == "prefill":
                new.chunk = min(budget, new.request.prompt_tokens + new.tokens - new.kv)
                budget -= new.chunk
        return sum(job.chunk for job in self.admitted)

    def admit(self) -> Job | None:
        waiting = sorted((j for j in self.jobs if j.state == "waiting"), key=lambda j: j.order)
        if not waiting or len(self.admitted) == self.p.max_running_requests:
            return None
        job = waiting[0]
        length = job.request.prompt_tokens + job.tokens
        keys = list(job.request.block_keys)[: (length - 1) // self.p.block_size]
        here = self.held() | set(self.idle)
        found = next((i for i, key in enumerate(keys) if key not in here), len(keys))
        hits, total = keys[:found], self.p.blocks(length)
        if len(self.held() | set(hits)) + self.used() - len(self.held()) + total - found > (
            self.p.kv_capacity_blocks
        ):
            return None
        self.out += told(self.tiers.on_device(job.request, 0, found, self.clock))
        load = self.tiers.load([] if job.pulling else keys[found:], self.clock)
        job.ready_ns = load.ready_ns
        job.kv = (found + load.blocks) * self.p.block_size
        if job.cached is None:
            job.cached = (job.kv, load.blocks * self.p.block_size)
        job.state, job.chunk = ("loading" if load.blocks else "prefill"), 0
        job.blocks = list(hits)
        self.idle = [key for key in self.idle if key not in hits]
        self.admitted.append(job)
        self.export(job)
        self.begin_pull(job, found, len(keys))
        self.take(job, total - found)
        return job

    def begin_pull(self, job: Job, found: int, limit: int) -> None:
        limit = min(limit, job.request.pulls or 0)
        if job.pulling and found >= limit:
            job.pulling = False
            self.out.append(("pulled", self.clock, job.key, 0))
        elif job.pulling:
            job.state, job.ready_ns = "loading", NEVER
            job.pulled, job.kv = found, limit * self.p.block_size
            self.out.append(("pulling", self.clock, job.key, found, limit))
            self.pull(job, self.clock)

    def keep(self, key: int, blocks: int) -> None:
        for job in self.jobs:
            if job.key == key and job.pulling and job.state == "loading":
                job.kv = min(job.kv, blocks * self.p.block_size)
                self.publish(job)

    def pull(self, job: Job, now: int) -> None:
        limit = job.kv // self.p.block_size
        fresh = max(0, min(job.offered, limit) - job.pulled)
        for _ in range(fresh):
            self.handover_link_free = max(self.handover_link_free, now) + self.p.handover_block_ns
        job.pulled += fresh
        if fresh and job.pulled == limit:
            job.ready_ns = self.handover_link_free + self.p.handover_latency_ns

    def export(self, job: Job) -> None:
        named = [key for key in job.blocks if key is not None]
        if job.key in self.exported and len(named) > len(self.exported[job.key]):
            self.exported[job.key] = named
            self.out.append(("ready", self.clock, job.key, len(named)))

    def take(self, job: Job, count: int) -> None:
        job.blocks += [None] * count
        excess = max(0, self.used() + len(self.idle) - self.p.kv_capacity_blocks)
        evicted, self.idle = self.idle[:excess], self.idle[excess:]
        if evicted:
            self.out += told(self.tiers.evict(evicted, self.clock))

    def end(self) -> None:
        assert self.step_ns is not None
        self.clock += self.step_ns
        self.step_ns = None
        decoding = [job for job in self.admitted if job.state == "decode"]
        for job in [job for job in self.admitted if job.chunk]:
            job.kv += job.chunk
            self.publish(job)
            if job.kv == job.request.prompt_tokens + job.tokens:
                if not job.tokens:
                    self.out.append(("first", self.clock, job.key, *(job.cached or ())))
                job.state = "decode"
                self.token(job)
        for job in sorted(decoding, key=lambda job: job.order):
            job.kv += 1
            self.publish(job)
            self.token(job)

    def token(self, job: Job) -> None:
        job.tokens += 1
        if job.tokens == job.request.output_tokens:
            self.give_back(job)
            self.jobs.remove(job)
            self.out.append(("finished", self.clock, job.key))

    def publish(self, job: Job) -> None:
        full = min(job.kv // self.p.block_size, len(job.request.block_keys))
        fresh = [i for i in range(full) if job.blocks[i] is None]
        for i in fresh:
            key = job.request.block_keys[i]
            if key not in self.held() and key not in self.idle:
                self.out.append(("stored", self.clock, job.key, i, key))
            self.idle = [other for other in self.idle if other != key]
            job.blocks[i] = key
        if fresh:
            self.out += told(self.tiers.on_device(job.request, fresh[0], full, self.clock))
        self.export(job)

    def give_back(self, job: Job) -> None:
        mine = [key for key in job.blocks if key is not None]
        job.blocks, job.chunk = [], 0
        if job in self.admitted:
            self.admitted.remove(job)
        self.idle += [key for key in reversed(mine) if key not in self.held()]
