"""The engine: takes requests, runs steps, gives out tokens. One thread drives it."""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Many
from concurrent.futures import Future
from itertools import takewhile

import torch
from attrs import evolve

from commutator.engine.handover import DecodeWords, PrefillWords
from commutator.errors import EngineOverloadedError, RequestError
from commutator.kv import CacheIdentity, KvEvent, KvService, LocatedPrompt, PromptQuestion
from commutator.types import (
    EngineLoad,
    GenerateRequest,
    SamplingParams,
    TokenDelta,
)
from commutator_reference.arena import KVArena
from commutator_reference.batch import build_batch
from commutator_reference.books import Books
from commutator_reference.deltas import ended, failed, handed_over, not_handed_over
from commutator_reference.handover import Handover
from commutator_reference.model import Abandoned, LlamaModel
from commutator_reference.options import EngineOptions
from commutator_reference.sampler import Sampled, sample
from commutator_reference.scheduler import Scheduler
from commutator_reference.sequence import Sequence
from commutator_reference.step import Step
from commutator_reference.stopping import Decode, find_stop
from commutator_reference.validation import validate_request

__all__ = ["Deltas", "ReferenceEngine"]

log = logging.getLogger(__name__)

Deltas = list[tuple[int, TokenDelta]]
"""What one step added, by request key."""

_WAKE_S = 0.2
"""How often an idle ``run`` looks at its stop event."""


class ReferenceEngine:
    """Continuous batching over one model and one KV arena.

    ``submit``, ``abort``, ``load`` and ``reset_prefix_cache`` may be called from any thread;
    ``step`` and ``run`` from one. ``decode`` gives the text that stop strings are looked for in.
    ``on_kv_events`` is called by that thread, once a step, with what the prefix cache stored and
    removed.
    """

    def __init__(
        self,
        model: LlamaModel,
        options: EngineOptions,
        *,
        decode: Decode | None = None,
        on_kv_events: Callable[[Many[KvEvent]], None] | None = None,
    ) -> None:
        capacity = options.num_blocks * options.block_size
        longest = options.max_model_len or model.config.context_length
        self.max_model_len = min(longest, model.config.context_length, capacity)
        """Most tokens of prompt and answer together."""
        self._model = model
        self._options = options
        self._decode = decode
        self._on_kv_events = on_kv_events
        self.arena = KVArena(
            model.config,
            options.num_blocks,
            options.block_size,
            device=model.device,
            dtype=model.dtype,
        )
        self._books = Books(options, self.max_model_len)
        self._handover: Handover | None = None
        self._arrivals = 0
        self.computes = False
        """Whether the last step had anything to compute; if not, requests may wait for a tier."""
        self._tier_events: list[KvEvent] = []
        self._unserved: list[tuple[int, str]] = []
        """Requests for which there was nothing to be done, and why."""

        self._changed = threading.Condition()
        # What follows is guarded by the condition's lock.
        self._inbox: deque[Callable[[], object]] = deque()
        self._live: set[int] = set()
        self._pending: dict[int, GenerateRequest] = {}
        self._load = EngineLoad(kv_capacity_blocks=options.num_blocks)
        self._woken = False

    def use_tiers(self, service: KvService, identity: CacheIdentity) -> None:
        """Keep blocks in storage tiers, too; before the first request.

        ``identity`` is everything that decides a block's bytes, but for adapter and salt.
        """
        self._books.use_tiers(service, identity)

    def use_handover(self, handover: Handover) -> None:
        """Take part in requests whose prefill and decode are apart; before the first request."""
        self._handover = handover
        self._books.use_handover(handover)

    @property
    def storing(self) -> bool:
        """Whether blocks are on their way to a tier; from the driving thread."""
        tiering = self._books.tiering
        return tiering is not None and tiering.storing

    def wake(self) -> None:
        """Something happened in the tiers, or in a hand-over; from any thread."""
        with self._changed:
            self._woken = True
            self._changed.notify()

    def submit(self, key: int, request: GenerateRequest) -> None:
        """Take a request, to begin with the next step; ``key`` names it until its last delta.

        Raises RequestError when it can never be served, EngineOverloadedError when not now.
        """
        validate_request(
            request,
            vocab_size=self._model.config.vocab_size,
            max_model_len=self.max_model_len,
            can_decode=self._decode is not None,
        )
        words = self._words(request)
        limit = self._options.limits.max_running_requests + self._options.max_queued_requests
        with self._changed:
            if key in self._live:
                raise ValueError(f"key {key} is in use")
            if len(self._live) >= limit:
                raise EngineOverloadedError(
                    f"{limit} requests run or wait here already; try again later"
                )
            self._live.add(key)
            self._pending[key] = request
            self._inbox.append(lambda: self._admit(key, request, words))
            self._changed.notify()

    def _words(self, request: GenerateRequest) -> PrefillWords | DecodeWords | None:
        if self._handover is not None:
            return self._handover.read(request)
        if request.handover is not None:
            raise RequestError("this worker hands no KV over", "handover")
        return None

    def abort(self, key: int) -> None:
        """Stop a request and free what it holds before the next step. Nothing if unknown."""
        with self._changed:
            self._live.discard(key)
            self._pending.pop(key, None)
            self._inbox.append(lambda: self._scheduler.remove(key))
            self._changed.notify()

    def reset_prefix_cache(self) -> None:
        """Forget every cached block that no request needs, before the next step."""
        with self._changed:
            self._inbox.append(self._forget_prefixes)
            self._changed.notify()

    def load(self) -> EngineLoad:
        """The state after the last step; requests submitted since then count as waiting."""
        with self._changed:
            return evolve(self._load, waiting=self._load.waiting + len(self._pending))

    def locate(self, question: PromptQuestion, timeout_s: float = 10.0) -> LocatedPrompt:
        """A prompt's blocks, from any thread but the driving one. Raises TimeoutError."""
        size = self._options.block_size
        request = GenerateRequest(
            "locate",
            question.token_ids,
            SamplingParams(),
            lora_name=question.lora_name,
            cache_salt=question.cache_salt,
        )
        sequence = Sequence.start(0, request, 0, 0, self._books.identity)
        # The last token is computed in any case: its logits are wanted.
        wanted = (len(question.token_ids) - 1) // size
        identities = [sequence.identity(index, size) for index in range(wanted)]
        found: Future[int] = Future()

        def look() -> None:
            pool = self._scheduler.pool
            here = takewhile(lambda identity: pool.find(identity) is not None, identities)
            found.set_result(sum(1 for _ in here))

        with self._changed:
            self._inbox.append(look)
            self._changed.notify()
        keys = [identity.digest for identity in identities]
        return LocatedPrompt(keys, found.result(timeout_s), size)

    @property
    def preemptions(self) -> int:
        """How often a request lost its blocks to another, ever."""
        return self._scheduler.preemptions

    def check_integrity(self) -> None:
        """Raise AssertionError when the block accounting is wrong; from the driving thread."""
        self._scheduler.check_integrity()

    def run(self, emit: Callable[[Deltas], None], stop: threading.Event) -> None:
        """Step while there is work, sleep while there is none, until ``stop`` is set."""
        # OpenMP keeps a thread count for each thread; asking PyTorch for its own applies it here.
        torch.get_num_threads()
        while not stop.is_set():
            deltas = self.step()
            if deltas:
                try:
                    emit(deltas)
                except Exception:
                    log.exception("the receiver of %d deltas failed; they are lost", len(deltas))
            with self._changed:
                # Without work: no request, or every one waits for blocks from a tier.
                if not self._inbox and not self._woken and not (self._live and self.computes):
                    self._changed.wait(_WAKE_S)
                self._woken = False

    def step(self) -> Deltas:
        """Compute one step and return what it added to each request. Never raises.

        Whatever goes wrong ends the requests that it concerns with ``FinishReason.ERROR``.
        """
        try:
            if self._books.broken and not self._recovered():
                return []
            self._take_inbox()
            deltas = self._tick()
        except Exception as error:
            log.exception("the engine's books are broken: every request is ended")
            deltas = self._give_up(error)
        self._publish_events()
        with self._changed:
            # Requests aborted while the step ran say nothing more.
            deltas = [(key, delta) for key, delta in deltas if key in self._live]
            self._live -= {key for key, delta in deltas if delta.finish_reason is not None}
            self._load = self._current_load()
        return deltas

    def _take_inbox(self) -> None:
        with self._changed:
            while self._inbox:
                self._inbox.popleft()()
            self._load = self._current_load()

    def _admit(
        self, key: int, request: GenerateRequest, words: PrefillWords | DecodeWords | None
    ) -> None:
        if self._pending.get(key) is not request:  # aborted before it was seen
            self._books.skip(words)
            return
        del self._pending[key]
        seed = request.sampling.seed
        seed = secrets.randbits(62) if seed is None else seed
        sequence = Sequence.start(key, request, self._arrivals, seed, self._books.identity)
        self._arrivals += 1
        if (problem := self._books.add(sequence, words)) is not None:
            self._unserved.append((key, problem))

    def _forget_prefixes(self) -> None:
        # Looked up when it runs: the scheduler may have been replaced since.
        self._scheduler.pool.clear()

    def _tick(self) -> Deltas:
        events, unserved = self._books.update()
        self._tier_events += events
        unserved += self._unserved
        self._unserved = []
        deltas: Deltas = []
        for key, why in unserved:
            self._scheduler.remove(key)
            deltas.append((key, not_handed_over(why)))
        deltas += self._hand_over()
        step = self._scheduler.schedule()
        self._books.look_ahead()
        handed = self._hand_over()  # all of it was cached
        step = step.without(key for key, _ in handed)
        # What was handed over at once has made room for others.
        self.computes = bool(step.chunks or handed)
        deltas += handed
        return deltas + self._run_step(step) if step.chunks else deltas

    def _hand_over(self) -> Deltas:
        return [(done.key, handed_over(done)) for done in self._books.hand_over()]

    def _run_step(self, step: Step) -> Deltas:
        started_s = time.perf_counter()
        try:
            sampled = self._compute(step)
        except Abandoned:
            return []  # all of it is aborted, and will be removed before the next step
        except Exception as error:
            log.exception("a step failed; its %d requests are ended", len(step.chunks))
            return self._fail((chunk.key for chunk in step.chunks), error)
        # Only now may other requests reuse the step's KV.
        self._scheduler.complete(step)
        handed = self._hand_over()
        if self._books.tiering is not None and (prompt_tokens := step.prompt_tokens):
            self._books.tiering.computed(prompt_tokens, time.perf_counter() - started_s)
        over = {key for key, _ in handed}
        appended = (self._append(key, token) for key, token in sampled if key not in over)
        return handed + [delta for deltas in appended for delta in deltas]

    def _compute(self, step: Step) -> list[tuple[int, Sampled]]:
        """The new tokens. Raises Abandoned when every request was aborted meanwhile."""
        batch = build_batch(step.chunks, self.arena, self._model.dtype)
        keys = [chunk.key for chunk in step.chunks]
        logits = self._model.forward(
            batch, self.arena, wanted=lambda: any(key in self._live for key in keys)
        )
        sequences = [self._sequence(key) for key in batch.sample_keys]
        chosen = sample(logits, sequences, self._model.config.eos_token_ids) if sequences else []
        return list(zip(batch.sample_keys, chosen, strict=True))

    def _append(self, key: int, sampled: Sampled) -> Deltas:
        sequence = self._sequence(key)
        sequence.tokens.append(sampled.token_id)
        eos_ids = self._model.config.eos_token_ids
        try:
            stop = find_stop(sequence, eos_ids, self.max_model_len, self._decode)
        except Exception as error:
            log.exception("looking for stop strings failed")
            return self._fail([key], error)
        delta = TokenDelta(
            token_ids=(sampled.token_id,),
            logprobs=() if sampled.logprob is None else (sampled.logprob,),
            cached_tokens=None if sequence.started else sequence.cached_tokens,
        )
        sequence.started = True
        if stop is not None:
            self._books.ended(sequence)
            self._scheduler.remove(key)
            delta = ended(delta, stop)
        return [(key, delta)]

    def _fail(self, keys: Iterable[int], error: Exception) -> Deltas:
        deltas = []
        for key in keys:
            self._scheduler.remove(key)
            deltas.append((key, failed(error)))
        return deltas

    def _give_up(self, error: Exception) -> Deltas:
        """The books cannot be trusted: end every request."""
        with self._changed:
            gone = self._live - set(self._pending)
        self.computes = False
        self._books.give_up()
        self._recovered()
        return [(key, failed(error)) for key in gone]

    def _recovered(self) -> bool:
        """Whether everything could begin anew."""
        recovered, events = self._books.recovered()
        self._tier_events += events
        return recovered

    def _publish_events(self) -> None:
        events = self._scheduler.pool.take_events() + self._tier_events
        self._tier_events = []
        if events and self._on_kv_events is not None:
            try:
                self._on_kv_events(events)
            except Exception:
                log.exception("the receiver of %d KV events failed; they are lost", len(events))

    @property
    def _scheduler(self) -> Scheduler:
        return self._books.scheduler

    def _sequence(self, key: int) -> Sequence:
        sequence = self._scheduler.get(key)
        assert sequence is not None, f"request {key} was scheduled but is gone"
        return sequence

    def _current_load(self) -> EngineLoad:
        pool = self._scheduler.pool
        return EngineLoad(
            running=self._scheduler.running,
            waiting=self._scheduler.waiting,
            kv_used_blocks=pool.held,
            kv_cached_blocks=pool.cached,
            kv_capacity_blocks=pool.num_blocks,
        )
