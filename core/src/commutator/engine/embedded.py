"""Our KV manager and its tiers inside the process of an engine that is not ours.

A guide for connectors. The engine's memory is described once, as it is: a ``BlockArena`` when a
block is one range of bytes, a ``ScatteredArena`` when it has a piece in every layer. Everything
that decides a block's bytes stands in a ``CacheIdentity``: model and weights, number type, the
layout in words that change when the layout does, tokens in a block, the rank among those that share
a model. Then:

    tiers = EmbeddedTiers("cluster.yaml", arena, identity, worker_id="engine-0-rank-0")
    tiers.start()
    keys = tiers.keys(token_ids, lora_name=None, cache_salt=None)   # one for each full block
    plan = tiers.plan(keys, first=2).result()      # how many of keys[2:] are worth loading
    good = tiers.load(plan, blocks).result()       # [True, True, False]: the third is not there
    tiers.store(tiers.offers(keys, token_ids), blocks).result()
    tiers.close()

Every answer is a future: an engine that must not wait asks ``done()`` in its next step (``on_news``
is called when one may be), one that has threads to spare waits for ``result()``. Four rules:

- A plan with blocks keeps them where they are, until ``load`` or ``drop``.
- From ``load`` until its future is done nobody else touches the blocks: also after ``drop``, and
  after a time-out, as NIXL may still write there. Only those with True hold what was asked for.
- From ``store`` until its future is done nobody writes to the blocks. That it is done says that the
  engine has its blocks back, not that any tier wanted them.
- An engine whose pages have names of its own, and not our keys, uses ``key_of``.
"""

from __future__ import annotations

import logging
import os
import threading
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from hashlib import sha256

from attrs import evolve

from commutator.engine.embedded_config import TierEntries, read_tiers
from commutator.engine.embedded_state import Question, TierPlan, Use, load_of, store_of
from commutator.errors import TierError
from commutator.kv.admission import count_uses
from commutator.kv.break_even import PrefillSpeed
from commutator.kv.counters import KvStatistics
from commutator.kv.events import KvEvent
from commutator.kv.keys import BlockKey, CacheIdentity, block_keys
from commutator.kv.offer import BlockFacts, Offer
from commutator.kv.scattered_arena import Arena
from commutator.kv.service import KvService

__all__ = ["EmbeddedTiers", "TierPlan"]

log = logging.getLogger(__name__)

_LOOK_S = 0.05
"""Loads that wait too long for their tier are noticed so late."""


class EmbeddedTiers:
    """Any thread may call any method; none of them waits for bytes, but ``close``."""

    def __init__(
        self,
        tiers: TierEntries,
        arena: Arena,
        identity: CacheIdentity,
        *,
        worker_id: str,
        on_news: Callable[[], None] = lambda: None,
    ) -> None:
        """``identity`` is that of requests without adapter and salt.

        ``worker_id`` stands for ``{worker}`` in the tiers' options: no two processes that run at
        the same time may have the same. Raises what ``read_tiers`` raises.
        """
        self.identity = identity
        self._on_news = on_news
        self._news = threading.Event()
        self._service = KvService(
            read_tiers(tiers, worker_id),
            arena,
            block_size=identity.block_size,
            identity=identity.digest.hex(),
            agent_name=f"{worker_id}/{os.getpid()}/{uuid.uuid4().hex[:8]}",
            wake=self._news.set,
        )
        self._takers = [
            take
            for take, wanted in (
                (self._service.offer, self._service.takes_computed),
                (self._service.evicting, self._service.takes_evicted),
            )
            if wanted
        ]
        counts = count_uses(setup.admission for setup in self._service.tiers)
        self._tells_uses = counts and not self._service.takes_computed
        """Whether uses have to be told of; to ``offer`` blocks tells of them, too."""
        self._lock = threading.Lock()
        self._questions: list[Question] = []
        self._uses: dict[int, deque[Use]] = {}
        """Who has each device block, the longest first."""
        self._loads: dict[str, Use] = {}
        self._events: list[KvEvent] = []
        self._open = True
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="tiers", daemon=True)

    def start(self, timeout_s: float = 60.0) -> None:
        """Open the tiers. One that cannot be opened now is tried again in the background."""
        self._service.start(timeout_s)
        self._thread.start()

    def keys(
        self,
        token_ids: Sequence[int],
        *,
        lora_name: str | None = None,
        cache_salt: str | None = None,
        known: Sequence[BlockKey] = (),
    ) -> list[BlockKey]:
        """The key of every full block of a prompt; ``known`` are those of its first blocks."""
        identity = evolve(self.identity, lora_name=lora_name, cache_salt=cache_salt)
        return block_keys(identity, token_ids, known)

    def key_of(
        self, name: bytes, *, lora_name: str | None = None, cache_salt: str | None = None
    ) -> BlockKey:
        """A key for what the engine calls ``name``, unique by identity, adapter and salt.

        The name must depend on the block's tokens and on all tokens before them.
        """
        identity = evolve(self.identity, lora_name=lora_name, cache_salt=cache_salt)
        return sha256(b"named" + identity.digest + name).digest()

    def offers(
        self,
        keys: Sequence[BlockKey],
        token_ids: Sequence[int],
        *,
        first: int = 0,
        prompt_blocks: int | None = None,
        lora_name: str | None = None,
        cache_salt: str | None = None,
    ) -> list[Offer]:
        """The blocks of a chain from ``first`` on, as ``store`` wants them.

        Those from ``prompt_blocks`` on are an answer's. Without ``token_ids`` (when only names are
        known) routers are not told of them.
        """
        size = self.identity.block_size
        return [
            Offer(
                key=keys[index],
                parent=keys[index - 1] if index else None,
                token_ids=tuple(token_ids[index * size : (index + 1) * size]),
                lora_name=lora_name,
                facts=BlockFacts(
                    is_prompt=prompt_blocks is None or index < prompt_blocks,
                    tenant=cache_salt,
                    depth=index,
                ),
            )
            for index in range(first, len(keys))
        ]

    def plan(
        self, keys: Sequence[BlockKey], *, first: int = 0, tokens_per_s: float | None = None
    ) -> Future[TierPlan]:
        """How many of a chain's blocks from ``first`` on should be loaded rather than computed.

        ``tokens_per_s`` is how fast the engine computes prompts; when it is not known, everything
        that is there is worth loading. Shared tiers are asked: that may take a second.
        """
        prefill = PrefillSpeed(tokens_per_s=tokens_per_s, block_size=self.identity.block_size)
        question = Question(uuid.uuid4().hex, keys, first, prefill)
        with self._lock:
            self._questions.append(question)
        self._ask([question])
        return question.future

    def load(
        self, plan: TierPlan, device_blocks: Sequence[int], *, skip: int = 0
    ) -> Future[list[bool]]:
        """Fill device blocks with those planned, without the first ``skip``; True: verified.

        The other planned blocks are let go of. A False is never followed by a True. Raises
        TierError once the tiers are closed.
        """
        use, future = load_of(len(device_blocks))
        with self._lock:
            self._must_be_open()
            self._loads[plan.load_id] = use
            self._hand_over(use, device_blocks)
            try:
                self._service.start_load(plan.load_id, device_blocks, skip)
            except BaseException:
                del self._loads[plan.load_id]
                for block in device_blocks:
                    self._uses[block].remove(use)
                raise
        return future

    def drop(self, plan: TierPlan) -> None:
        """Nobody wants it any more. A load that runs ends soon, in its own future."""
        if plan.blocks:
            self._service.drop(plan.load_id)

    def store(self, offers: Sequence[Offer], device_blocks: Sequence[int]) -> Future[None]:
        """Keep computed blocks, in the order of their chain; what is there already counts as used.

        Tiers with `write: on_evict` get them at once, as nobody tells when the engine evicts.
        Raises TierError once the tiers are closed.
        """
        if len(offers) != len(device_blocks):
            raise ValueError(f"{len(offers)} offers, but {len(device_blocks)} device blocks")
        use, future = store_of(len(offers) * len(self._takers))
        with self._lock:
            self._must_be_open()
            if self._tells_uses:
                self._service.used([offer.key for offer in offers])
            for take in self._takers if offers else ():
                self._hand_over(use, device_blocks)
                take(offers, device_blocks)
        if not use.blocks:
            future.set_result(None)
        return future

    def take_events(self) -> list[KvEvent]:
        """What routers are to be told since the last call."""
        with self._lock:
            events, self._events = self._events, []
        return events

    def reset(self) -> None:
        """Forget every block in every tier."""
        self._service.evict(reason="reset")

    def statistics(self) -> KvStatistics:
        """Everything there is to count."""
        return self._service.statistics()

    @property
    def service(self) -> KvService:
        """For questions that only it answers. Do not ``poll`` it."""
        return self._service

    def close(self, timeout_s: float = 10.0) -> None:
        """Give up what runs and close the tiers.

        Futures that are then not done fail with TierError: NIXL may still touch their blocks.
        """
        with self._lock:
            self._open = False
        self._service.close(timeout_s)
        self._closing = True
        self._news.set()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        with self._lock:
            uses = {use for queue in self._uses.values() for use in queue}
            questions, self._questions = self._questions, []
        closed = TierError("the tiers were closed while they still had these blocks")
        for use in uses:
            use.fail(closed)
        for question in questions:
            question.future.cancel()

    def _must_be_open(self) -> None:
        if not self._open:
            raise TierError("the tiers are closed")

    def _hand_over(self, use: Use, device_blocks: Iterable[int]) -> None:
        for block in device_blocks:
            self._uses.setdefault(block, deque()).append(use)

    def _run(self) -> None:
        while not self._closing:
            self._news.wait(_LOOK_S)
            self._news.clear()
            try:
                self._look()
            except Exception:  # whoever waits for a future must not wait for ever
                log.exception("the thread of the tiers goes on after")
        self._look()

    def _look(self) -> None:
        with self._lock:
            ended = self._take()
            questions = list(self._questions)
        for use in ended:
            use.end()
        self._ask(questions)
        if ended:
            self._on_news()

    def _take(self) -> list[Use]:
        """The uses that have ended."""
        polled = self._service.poll()
        self._events += polled.events
        touched: dict[Use, None] = {}
        for load in polled.loads:
            use = self._loads.pop(load.load_id)
            use.good = load.blocks
            touched[use] = None
        for block in polled.released:
            queue = self._uses[block]
            use = queue.popleft()
            if not queue:
                del self._uses[block]
            use.out -= 1
            touched[use] = None
        return [use for use in touched if use.over]

    def _ask(self, questions: Iterable[Question]) -> None:
        answered = []
        for question in questions:
            with self._lock:
                if question not in self._questions:
                    continue
                count = self._service.plan(
                    question.load_id, question.keys, question.first, question.prefill
                )
                if count is None:
                    continue
                self._questions.remove(question)
                media = self._service.planned_media(question.load_id) if count else ()
            answered.append((question, TierPlan(question.load_id, question.first, media)))
        for question, plan in answered:
            if question.future.set_running_or_notify_cancel():
                question.future.set_result(plan)
            else:
                self.drop(plan)
        if answered:
            self._on_news()
