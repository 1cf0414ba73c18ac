"""The engine: takes requests, runs steps, emits tokens. One thread drives it."""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Many
from concurrent.futures import Future
from typing import Any

import torch
from attrs import evolve

from commutator import (
    AdapterIdentity,
    EngineLoad,
    FinishReason,
    GenerateRequest,
    KvPrompt,
    SamplingParams,
    TokenDelta,
)
from commutator.contract.block import KvEvent
from commutator.contract.request import Constraint
from commutator.errors import EngineOverloadedError, RequestError
from commutator_engine_kit.kv import KvConnector, LocatedPrompt, announced_group
from commutator_engine_kit.kv.transfer import parse_transfer_params
from commutator_reference.arena import KVArena
from commutator_reference.block_pool import BlockPool
from commutator_reference.config import ReferenceConfig
from commutator_reference.constraints import Grammars, Matcher
from commutator_reference.decoder import DecoderModel
from commutator_reference.handover import Handover, TransferParams
from commutator_reference.lora import Adapters, LoraAdapter
from commutator_reference.model import Abandoned, LlamaModel
from commutator_reference.pages import PageArena
from commutator_reference.sampler import (
    Decode,
    Sampled,
    find_stop,
    prompt_logprobs,
    sample,
    validate_request,
)
from commutator_reference.scheduler import (
    ANONYMOUS,
    Chunk,
    Scheduler,
    Sequence,
    Step,
    find_hits,
    most_blocks,
)
from commutator_reference.tiering import Tiering

log = logging.getLogger(__name__)

Deltas = list[tuple[int, TokenDelta]]
"""The deltas of one step, by request key."""

_WAKE_S = 0.2
"""How often an idle ``run`` checks its stop event, in seconds."""


class ReferenceEngine:
    """Continuous batching over one model and one KV arena.

    ``submit``, ``abort``, ``load`` and ``reset_prefix_cache`` may be called from any thread;
    ``step`` and ``run`` from one. ``decode`` returns the text in which stop strings are searched,
    ``encode`` the tokens of words that must not be generated, ``grammars`` what compiles
    constraints, ``adapters`` what loads them. ``on_kv_events`` is called by that thread, once a
    step, with the blocks that the prefix cache stored and removed.
    """

    def __init__(
        self,
        model: LlamaModel | DecoderModel,
        options: ReferenceConfig,
        num_blocks: int,
        *,
        max_model_len: int | None = None,
        decode: Decode | None = None,
        encode: Callable[[str], Many[int]] | None = None,
        grammars: Grammars | None = None,
        adapters: Adapters | None = None,
        on_kv_events: Callable[[Many[KvEvent]], None] | None = None,
    ) -> None:
        """``num_blocks``: KV blocks in the arena.

        ``max_model_len``: by default what model and arena allow.
        """
        self.arena = model.arena(num_blocks, options.block_size)
        longest = min(max_model_len or model.config.context_length, model.config.context_length)
        step_tokens = options.max_tokens_per_step
        self.max_model_len = _longest(self.arena, num_blocks, longest, step_tokens)
        """Most tokens of prompt and answer together."""
        self._model = model
        self._options = options
        self._decode = decode
        self._encode = encode
        self._grammars = grammars
        self._adapters = adapters
        self._on_kv_events = on_kv_events
        self.block_size = self.arena.block_size
        """Tokens in a block: those of the options, or more where states would not fit."""
        self.pool = BlockPool(
            num_blocks,
            self.block_size,
            prefix_caching=options.prefix_caching,
            groups=self.arena.groups,
        )
        self._scheduler = Scheduler(
            self.pool,
            self.max_model_len,
            max_running_requests=options.max_running_requests,
            max_tokens_per_step=options.max_tokens_per_step,
        )
        self._tiering: Tiering | None = None
        self._handover: Handover | None = None
        self._identity = ANONYMOUS
        """Everything that decides a block's bytes, except tokens, adapter and salt."""
        self._arrivals = 0
        self.computes = False
        """Whether the last step had anything to compute; if not, requests may wait for a tier."""
        self._tier_events: list[KvEvent] = []
        self._unserved: list[tuple[int, str]] = []
        """Requests that could not be served, and why."""

        self._changed = threading.Condition()
        # The condition's lock guards the following.
        self._inbox: deque[Callable[[], object]] = deque()
        self._live: set[int] = set()
        self._adapted: dict[int, str] = {}
        """The adapters, by digest, of those of ``_live`` that use one."""
        self._pending: dict[int, GenerateRequest] = {}
        self._load = EngineLoad(kv_capacity_blocks=num_blocks)
        self._woken = False

    def use_tiers(self, connector: KvConnector) -> None:
        """Keep blocks in storage tiers, too; before the first request."""
        self._identity = connector.identity
        self._tiering = Tiering(connector, self.pool)

    def use_handover(self, handover: Handover) -> None:
        """Take part in disaggregated requests; before the first request."""
        self._handover = handover

    @property
    def storing(self) -> bool:
        """Whether blocks are on their way to a tier; from the driving thread."""
        return self._tiering is not None and self._tiering.storing

    def wake(self) -> None:
        """Run a step soon, because a tier or hand-over made progress; from any thread."""
        with self._changed:
            self._woken = True
            self._changed.notify()

    def submit(self, key: int, request: GenerateRequest) -> None:
        """Take a request, to begin with the next step; ``key`` names it until its last delta.

        Takes up to some seconds for one with a constraint, and microseconds otherwise. Raises
        RequestError when it can never be served, EngineOverloadedError when the queue is full.
        """
        validate_request(
            request,
            vocab_size=self._model.config.vocab_size,
            max_model_len=self.max_model_len,
            can_decode=self._decode is not None,
        )
        params = None
        if request.handover is not None:
            if self._handover is None:
                raise RequestError("this worker hands no KV over", "handover")
            params = parse_transfer_params(request, self.block_size)
        matcher = None if request.constraint is None else self._matcher(request, request.constraint)
        bad_words = self._bad_words(request)
        adapter = None if request.adapter is None else self._adapter(request.adapter)
        limit = self._options.max_running_requests + self._options.max_queued_requests
        with self._changed:
            if key in self._live:
                raise ValueError(f"key {key} is in use")
            if len(self._live) >= limit:
                raise EngineOverloadedError(
                    f"{limit} requests run or wait here already; try again later"
                )
            self._live.add(key)
            if adapter is not None:
                self._adapted[key] = adapter.digest
            self._pending[key] = request
            self._inbox.append(
                lambda: self._admit(key, request, params, matcher, bad_words, adapter)
            )
            self._changed.notify()

    def _matcher(self, request: GenerateRequest, constraint: Constraint) -> Matcher:
        """Raises RequestError."""
        if self._grammars is None:
            raise RequestError("the reference engine enforces no constraints here", "constraint")
        done = len(request.token_ids) - request.generated_prefix
        return self._grammars.matcher(constraint, request.token_ids[done:])

    def _adapter(self, asked: AdapterIdentity) -> LoraAdapter:
        if self._adapters is None:
            raise RequestError(f"this model is served without adapters, here {asked}", "model")
        return self._adapters.get(asked, self._used_adapters)

    def _used_adapters(self) -> set[str]:
        with self._changed:
            return set(self._adapted.values())

    def _bad_words(self, request: GenerateRequest) -> list[Many[int]]:
        """Their tokens, at the beginning of a text and after a space."""
        words = request.options.get("bad_words", ())
        if not words:
            return []
        if self._encode is None:
            raise RequestError(
                "bad_words: this engine was started without a tokenizer", "bad_words"
            )
        spelled = [self._encode(form) for word in words for form in (word, f" {word.lstrip()}")]
        return [tokens for tokens in spelled if tokens]

    def abort(self, key: int) -> None:
        """Stop a request and free its blocks before the next step. No effect if unknown."""
        with self._changed:
            self._live.discard(key)
            self._adapted.pop(key, None)
            self._pending.pop(key, None)
            self._inbox.append(lambda: self._scheduler.remove(key))
            self._changed.notify()

    def reset_prefix_cache(self) -> None:
        """Forget every cached block that no request needs, before the next step."""
        with self._changed:
            self._inbox.append(self.pool.clear)
            self._changed.notify()

    def load(self) -> EngineLoad:
        """The state after the last step; requests submitted since then count as waiting."""
        with self._changed:
            return evolve(self._load, waiting=self._load.waiting + len(self._pending))

    def locate(self, question: KvPrompt, timeout_s: float = 10.0) -> LocatedPrompt:
        """A prompt's blocks, from any thread but the driving one. Raises TimeoutError."""
        size = self.block_size
        request = GenerateRequest(
            request_id="locate",
            token_ids=question.token_ids,
            sampling=SamplingParams(),
            adapter=question.adapter,
            cache_salt=question.cache_salt,
        )
        groups = self.arena.groups
        sequence = Sequence.start(0, request, 0, 0, self._identity, groups)
        chain = sequence.reusable(size, announced_group(groups) or 0)
        found: Future[int] = Future()
        with self._changed:
            self._inbox.append(lambda: found.set_result(find_hits(self.pool, sequence).tokens))
            self._changed.notify()
        keys = [block.key for block in chain]
        return LocatedPrompt(keys, found.result(timeout_s) // size, size)

    @property
    def preemptions(self) -> int:
        """How often a request has lost its blocks to another."""
        return self._scheduler.preemptions

    def run(self, emit: Callable[[Deltas], None], stop: threading.Event) -> None:
        """Step while there is work, sleep while there is none, until ``stop`` is set.

        Raises what ``step`` raises.
        """
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
        """Compute one step and return what it added to each request.

        A forward pass that fails ends its requests with ``FinishReason.ERROR``. Any other error is
        raised: the block accounting can no longer be trusted, and the engine must stop.
        """
        self._take_inbox()
        deltas = self._tick()
        self._publish_events()
        with self._changed:
            # Requests aborted while the step ran emit nothing more.
            deltas = [(key, delta) for key, delta in deltas if key in self._live]
            for key in [key for key, delta in deltas if delta.finish_reason is not None]:
                self._live.discard(key)
                self._adapted.pop(key, None)
            self._load = self._current_load()
        return deltas

    def _take_inbox(self) -> None:
        with self._changed:
            while self._inbox:
                self._inbox.popleft()()
            self._load = self._current_load()

    def _admit(
        self,
        key: int,
        request: GenerateRequest,
        params: TransferParams | None,
        matcher: Matcher | None,
        bad_words: Many[Many[int]],
        adapter: LoraAdapter | None,
    ) -> None:
        if self._pending.get(key) is not request:  # aborted before it was admitted
            if self._handover is not None and params is not None:
                self._handover.skip(params)
            return
        del self._pending[key]
        seed = request.sampling.seed
        seed = secrets.randbits(62) if seed is None else seed
        groups = self.arena.groups
        sequence = Sequence.start(key, request, self._arrivals, seed, self._identity, groups)
        sequence.matcher = matcher
        sequence.bad_words = bad_words
        sequence.adapter = adapter
        self._arrivals += 1
        if self._handover is not None and params is not None:
            problem = self._handover.begin(sequence, params)
            if problem is not None:
                self._unserved.append((key, problem))
                return
        if self._tiering is not None:  # after a hand-over, whose blocks need no lookup in tiers
            sequence.loads.append(self._tiering)
        self._scheduler.add(sequence)

    def _tick(self) -> Deltas:
        unserved, self._unserved = self._unserved, []
        if self._tiering is not None:
            self._tier_events += self._tiering.update()
        if self._handover is not None:
            unserved += self._handover.pulls.update()
        deltas = [self._failed(key, f"hand-over: {why}", handover=True) for key, why in unserved]
        deltas += self._hand_over()
        step = self._scheduler.schedule()
        if self._tiering is not None:
            self._tiering.look_ahead(self._scheduler.queue, idle=not self._scheduler.running)
        handed = self._hand_over()  # all of it was cached
        step = step.without(key for key, _ in handed)
        # Prefills handed over at once have made room for others.
        self.computes = bool(step.chunks or handed)
        deltas += handed
        return deltas + self._run_step(step) if step.chunks else deltas

    def _hand_over(self) -> Deltas:
        """Publish blocks computed so far, and end the prefills that this completes.

        Tokens after the last full block are never computed for another worker.
        """
        deltas: Deltas = []
        for key in () if self._handover is None else self._handover.exports.advance():
            if (sequence := self._scheduler.get(key)) is not None:
                self._scheduler.remove(key)
                cached = sequence.cached_tokens or 0
                last = TokenDelta(finish_reason=FinishReason.LENGTH, cached_tokens=cached)
                deltas.append((key, last))
        return deltas

    def _run_step(self, step: Step) -> Deltas:
        started_s = time.perf_counter()
        try:
            sampled = self._compute(step)
        except Abandoned:
            return []  # all of it is aborted, and will be removed before the next step
        except Exception as error:
            log.exception("step failed; its %d requests end with an error", len(step.chunks))
            why = f"{type(error).__name__}: {error}"
            return [self._failed(chunk.key, why) for chunk in step.chunks]
        # Only now may other requests reuse the step's KV.
        self._scheduler.complete(step)
        handed = self._hand_over()
        if self._tiering is not None and (prompt_tokens := step.prompt_tokens):
            self._tiering.computed(prompt_tokens, time.perf_counter() - started_s)
        over = {key for key, _ in handed}
        appended = (self._append(key, token) for key, token in sampled if key not in over)
        return handed + [delta for deltas in appended for delta in deltas]

    def _compute(self, step: Step) -> list[tuple[int, Sampled]]:
        """The new tokens. Raises Abandoned when every request was aborted during the step."""
        # A model's batches and arena fit together, whichever of the two it is.
        model: Any = self._model
        batch = model.batch(step.chunks, self.arena)
        keys = [chunk.key for chunk in step.chunks]
        logits: torch.Tensor = model.forward(
            batch,
            self.arena,
            wanted=lambda: any(key in self._live for key in keys),
            score=self._score,
        )
        sequences = [self._sequence(key) for key in batch.sample_keys]
        chosen = sample(logits, sequences, self._model.config.eos_token_ids) if sequences else []
        self.arena.settle()  # tiers and other workers may read the step's blocks from now on
        return list(zip(batch.sample_keys, chosen, strict=True))

    def _score(self, chunk: Chunk, first: int, logits: torch.Tensor) -> None:
        """Keep the log probabilities of the tokens after those of these logits."""
        sequence = self._sequence(chunk.key)
        start = chunk.start + first
        following = sequence.tokens[
            start + 1 : min(start + 1 + len(logits), sequence.prompt_length)
        ]
        # A request that lost its blocks computes its prompt again.
        del sequence.prompt_logprobs[start:]
        if following:
            top = sequence.request.prompt_logprobs or 0
            sequence.prompt_logprobs += prompt_logprobs(logits[: len(following)], following, top)

    def _append(self, key: int, sampled: Sampled) -> Deltas:
        sequence = self._sequence(key)
        sequence.tokens.append(sampled.token_id)
        eos_ids = self._model.config.eos_token_ids
        try:
            if sequence.matcher is not None:
                sequence.matcher.advance(sampled.token_id)
            stop = find_stop(sequence, eos_ids, self.max_model_len, self._decode)
        except RequestError as error:
            return [self._failed(key, str(error), refused=True)]
        except Exception as error:
            log.exception("request %s ends with an error", sequence.request.request_id)
            return [self._failed(key, f"{type(error).__name__}: {error}")]
        delta = TokenDelta(
            token_ids=(sampled.token_id,),
            logprobs=() if sampled.logprob is None else (sampled.logprob,),
            prompt_logprobs=() if sequence.started else tuple(sequence.prompt_logprobs),
            cached_tokens=None if sequence.started else sequence.cached_tokens,
        )
        sequence.started = True
        if stop is not None:
            if self._tiering is not None:
                self._tiering.prefetcher.ended(sequence)
            self._scheduler.remove(key)
            delta = evolve(delta, finish_reason=stop.finish_reason, stop_reason=stop.stop_reason)
        return [(key, delta)]

    def _failed(
        self, key: int, why: str, *, refused: bool = False, handover: bool = False
    ) -> tuple[int, TokenDelta]:
        """Remove a request; returns its last delta."""
        self._scheduler.remove(key)
        reason = FinishReason.ERROR
        return key, TokenDelta(
            finish_reason=reason, error=why, refused=refused, handover_failed=handover
        )

    def _publish_events(self) -> None:
        events = self.pool.take_events() + self._tier_events
        self._tier_events = []
        if events and self._on_kv_events is not None:
            try:
                self._on_kv_events(events)
            except Exception:
                log.exception("the receiver of %d KV events failed; they are lost", len(events))

    def _sequence(self, key: int) -> Sequence:
        sequence = self._scheduler.get(key)
        assert sequence is not None, f"request {key} was scheduled but no longer exists"
        return sequence

    def _current_load(self) -> EngineLoad:
        pool = self.pool
        return EngineLoad(
            running=self._scheduler.running,
            waiting=len(self._scheduler.queue),
            kv_used_blocks=pool.held,
            kv_cached_blocks=pool.cached,
            kv_capacity_blocks=pool.num_blocks,
        )


def _longest(arena: KVArena | PageArena, num_blocks: int, longest: int, step_tokens: int) -> int:
    """The longest sequence that the blocks hold when it runs alone, at most ``longest``."""
    groups, size = arena.groups, arena.block_size
    low, high = 0, longest
    while low < high:
        middle = (low + high + 1) // 2
        if most_blocks(groups, size, middle, step_tokens) <= num_blocks:
            low = middle
        else:
            high = middle - 1
    return low
