"""The served engine: advances the model with the clock, or as fast as possible.

It runs in the server's event loop: a tick of the model is far shorter than a switch to another
thread.
"""

from __future__ import annotations

import asyncio
import math
import os
from array import array
from collections.abc import Iterable, Iterator, Sequence
from importlib.metadata import version

from attrs import define, evolve

from commutator import EngineInfo, EngineLoad, FinishReason, GenerateRequest, Operation, TokenDelta
from commutator.contract.worker import TransferStatistics
from commutator.errors import EngineHandoverError, EngineOverloadedError, RequestError
from commutator.tokenizer import TextModel
from commutator_engine_kit import Emit, EventPublisher, TokenEngine
from commutator_engine_kit.kv.transfer import (
    DecodeTransferParams,
    PrefillTransferParams,
    parse_transfer_params,
)
from commutator_sim.answers import (
    Answer,
    logprobs_of,
    plan_answer,
    refuse_what_needs_a_model,
    scripted,
)
from commutator_sim.config import SimConfig
from commutator_sim.constrained import KINDS, constrained_text
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
from commutator_sim.handover import Handover
from commutator_sim.kv_events import EventFeed, block_keys, root_key
from commutator_sim.model import SimModel
from commutator_sim.pooling import PoolingQueue
from commutator_sim.request import SimRequest

_SHORTEST_SLEEP_S = 0.001
_GATHER_EVENTS_S = 0.01
"""At unlimited speed. A real step takes about as long, and publishes one message of events."""


@define(eq=False)
class _Stream:
    """A running request with its answer, which is sent as the model generates it."""

    answer: Answer
    token_ids: array[int]
    """Prompt and answer."""
    keys: Sequence[int]
    request: GenerateRequest
    cached_tokens: int | None = None
    """Set between the first token's event and its delta."""
    sent: int = 0
    """Tokens of the answer that were sent."""
    text: TextModel | None = None

    def delta(self, generated: int) -> TokenDelta:
        """The generated tokens that were not sent yet."""
        answer = self.answer
        ended = generated == len(answer.token_ids)
        token_ids = tuple(answer.token_ids[self.sent : generated])
        top, of_prompt = self.request.sampling.top_logprobs, self.request.prompt_logprobs
        delta = TokenDelta(
            token_ids=token_ids,
            logprobs=() if top is None else logprobs_of(token_ids, top, self.text),
            prompt_logprobs=()
            if of_prompt is None or self.sent
            else logprobs_of(self.request.token_ids[1:], of_prompt, self.text),
            finish_reason=answer.finish_reason if ended else None,
            stop_reason=answer.stop_reason if ended else None,
            cached_tokens=self.cached_tokens,
        )
        self.sent, self.cached_tokens = generated, None
        return delta


class SimEngine(TokenEngine):
    """A worker without a model. ``text`` finds special tokens and stop strings; it is optional."""

    def __init__(
        self,
        config: SimConfig,
        *,
        model: str,
        max_model_len: int,
        text: TextModel | None = None,
        host: str = "127.0.0.1",
    ) -> None:
        """``model`` is the name that clients give; ``max_model_len`` is in tokens.

        ``host`` is the address at which other workers ask for KV.
        """
        self._host = host
        self._config = config
        self._model_name = model
        self._max_model_len = min(max_model_len, config.kv_capacity_blocks * config.block_size)
        self._text = text
        self._factor = config.time_factor
        # The puller waits for the time of a transfer, so the model must not count it again.
        self._model = SimModel(
            evolve(config, handover_latency_s=0.0, handover_bandwidth_bytes_per_s=math.inf)
        )
        self._handover: Handover | None = None
        self._streams: dict[int, _Stream] = {}
        self._pooling = PoolingQueue(config, self._max_model_len)
        self._publisher: EventPublisher | None = None
        self._feed: EventFeed | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._emit: Emit | None = None
        self._timer: asyncio.Handle | None = None
        self._tick_is_next = False
        self._started_s = 0.0

    def start(self, emit: Emit) -> EngineInfo:
        config = self._config
        self._loop, self._emit = asyncio.get_running_loop(), emit
        self._started_s = self._loop.time()
        if config.kv_events and config.prefix_caching:
            self._publisher = EventPublisher(keep_messages=config.kv_events_kept)
            self._feed = EventFeed(
                self._publisher,
                config.block_size,
                has_tiers=bool(config.tiers),
                gather_s=0.0 if self._factor else _GATHER_EVENTS_S,
            )
        if config.prefix_caching:
            self._handover = Handover(
                config, self._model_name, self._model, self._tick_soon, self._host
            )
            self._handover.start()
        return EngineInfo(
            kind="sim",
            version=version("commutator-sim"),
            model=self._model_name,
            max_model_len=self._max_model_len,
            block_size=config.block_size,
            kv_capacity_blocks=config.kv_capacity_blocks,
            caches_prefixes=config.prefix_caching,
            kv_events=None if self._publisher is None else self._publisher.source,
            pid=os.getpid(),
            operations=config.operations,
            labels=config.labels if Operation.CLASSIFY in config.operations else (),
            continues_answers=True,
            continues_constraints=True,
            constraints=() if self._text is None else KINDS,
            adapters=True,
            prompt_logprobs=True,
            handover=None if self._handover is None else self._handover.info,
        )

    def submit(self, key: int, request: GenerateRequest) -> None:
        if request.pooling is not None:
            self._pooling.submit(key, request, lambda: self._emit)
            return
        config, model = self._config, self._model
        stream = self._stream_for(request)
        places = config.max_running_requests + config.max_queued_requests
        if len(self._streams) >= places:
            raise EngineOverloadedError(
                f"the worker has {len(self._streams)} requests, running and waiting, and takes "
                f"no more than {places}"
            )
        self._catch_up()
        try:
            asked = self._model_request(key, stream)
        except EngineHandoverError as error:
            assert self._loop is not None
            self._loop.call_soon(self._fail_handovers, [(key, str(error))])
            return
        self._streams[key] = stream
        model.submit(key, asked)
        self._tick_soon()

    def abort(self, key: int) -> None:
        self._pooling.abort(key)
        self._catch_up()
        self._model.abort(key)
        if self._handover is not None:
            self._handover.drop(key)
        if self._streams.pop(key, None) is not None:
            self._tick_soon()

    def load(self) -> EngineLoad:
        self._catch_up()
        model = self._model
        return EngineLoad(
            running=model.running + len(self._pooling),
            waiting=model.waiting,
            kv_used_blocks=model.cache.used_blocks,
            kv_cached_blocks=model.cache.idle_blocks,
            kv_capacity_blocks=model.cache.capacity_blocks,
        )

    def reset_prefix_cache(self) -> None:
        self._catch_up()
        self._model.reset_prefix_cache()
        self._tick_soon()

    def transfer_statistics(self) -> TransferStatistics:
        return TransferStatistics() if self._handover is None else self._handover.statistics()

    def stop(self) -> None:
        if self._handover is not None:
            self._handover.stop()
        loop, self._emit = self._loop, None
        if loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(self._cancel_timer)
        if self._publisher is not None and self._feed is not None:
            self._feed.flush()
            self._publisher.close()

    def _stream_for(self, request: GenerateRequest) -> _Stream:
        """The request with its answer. Raises RequestError if it can never be served."""
        config, length = self._config, len(request.token_ids)
        refuse_what_needs_a_model(request)
        if not 0 < length < self._max_model_len:
            raise RequestError(
                f"a prompt of {length} tokens: expected 1 to {self._max_model_len - 1}, to leave "
                f"room for an answer in the {self._max_model_len} of this worker"
            )
        if request.sampling.max_tokens < 1:
            raise RequestError("max_tokens: expected at least 1")
        answer = self._answer_to(request)
        try:  # arrays are joined and cut in a tenth of a list's time
            token_ids = array("I", request.token_ids) + array("I", answer.token_ids)
            if not config.prefix_caching:
                return _Stream(answer, token_ids, (), request, text=self._text)
            root = root_key(request.adapter_digest, request.cache_salt)
            keys = block_keys(token_ids[:-1], config.block_size, root)
        except OverflowError as error:
            raise RequestError(f"a token id is out of range: {error}") from error
        if request.prompt_logprobs is not None:  # all of the prompt is computed
            keys = []
        return _Stream(answer, token_ids, keys, request, text=self._text)

    def _model_request(self, key: int, stream: _Stream) -> SimRequest:
        """The request as the model gets it; of a hand-over's prefill only the wanted blocks.

        Raises RequestError for wrong parameters of a hand-over, EngineHandoverError for a prefill
        that is no longer wanted.
        """
        request, size, prompt = stream.request, self._config.block_size, stream.request.token_ids
        whole = SimRequest(
            len(prompt),
            len(stream.answer.token_ids),
            stream.keys,
            request.priority,
            tenant=request.cache_salt,
            retention=request.retention,
        )
        if request.handover is None:
            return whole
        if self._handover is None:
            raise RequestError("this worker hands no KV over: prefix_caching is off", "handover")
        match parse_transfer_params(request, size):
            case DecodeTransferParams() as params:
                return evolve(whole, pulls=self._handover.begin_pull(key, request, params))
            case PrefillTransferParams() as params:
                stream.answer = evolve(
                    stream.answer,
                    token_ids=stream.answer.token_ids[:1],
                    finish_reason=FinishReason.LENGTH,
                )
                if not (wanted := self._handover.begin_export(key, request, params)):
                    return evolve(whole, output_tokens=1)
                # The decode worker computes the tokens that are not handed over.
                return evolve(whole, prompt_tokens=wanted * size, output_tokens=1, exports=True)
        return whole

    def _answer_to(self, request: GenerateRequest) -> Answer:
        """The answer to the prompt without the tokens that another worker generated."""
        done = request.generated_prefix
        prompt_length = len(request.token_ids) - done
        if not 0 <= done < len(request.token_ids):
            raise RequestError(f"generated_prefix: {done} of {len(request.token_ids)} tokens")
        sampling, says = request.sampling, self._says(request, request.token_ids[:prompt_length])
        if request.constraint is not None:  # its text is the whole answer
            sampling = evolve(sampling, min_tokens=0, ignore_eos=False)
        answer = plan_answer(
            request.token_ids[:prompt_length],
            sampling,
            room=self._max_model_len - prompt_length,
            natural_tokens=self._config.answer_tokens,
            text=self._text,
            says=says,
        )
        if done >= len(answer.token_ids):
            raise RequestError(
                f"generated_prefix: {done} tokens, but the whole answer has only "
                f"{len(answer.token_ids)}"
            )
        return evolve(answer, token_ids=answer.token_ids[done:]) if done else answer

    def _says(self, request: GenerateRequest, prompt: Sequence[int]) -> Sequence[int] | None:
        """What the answer is if not the prompt again. Raises RequestError."""
        constraint, text = request.constraint, self._text
        if constraint is None:
            return scripted(self._config.answers, text, prompt)
        if text is None:
            raise RequestError("response_format: this worker has no tokenizer to follow it with")
        says = scripted(self._config.answers, text, prompt, constraint)
        if says is None:
            # The same in each process, as it is of integers.
            seed = hash((request.sampling.seed or 0, *prompt))
            says = text.encode(constrained_text(constraint, seed), add_special_tokens=False)
        return [*constraint.after, *says]

    # ----------------------------------------------------------------------- time

    def _virtual_now_ns(self) -> int:
        assert self._loop is not None
        passed_s = self._loop.time() - self._started_s
        return max(self._model.now_ns, int(passed_s * self._factor * 1e9))

    def _catch_up(self) -> None:
        """Advance the model to the present. At unlimited speed it has a time of its own."""
        if self._factor:
            self._deliver(self._model.advance(self._virtual_now_ns()))

    def _tick_soon(self) -> None:
        assert self._loop is not None
        if not self._tick_is_next:
            self._cancel_timer()
            self._tick_is_next = True
            self._timer = self._loop.call_soon(self._tick)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _tick(self) -> None:
        self._tick_is_next = False
        self._timer = None
        if self._emit is None:
            return  # stopped
        model = self._model
        self._catch_up()
        self._update_handover()
        if not self._factor:
            before_ns = model.now_ns
            self._deliver(model.advance(max_steps=self._config.burst_tokens))
            if self._streams and model.now_ns > before_ns:  # otherwise it waits for a hand-over
                self._tick_soon()
            return
        if (end_ns := model.step_end_ns()) is not None:
            assert self._loop is not None
            delay_s = (end_ns - self._virtual_now_ns()) / 1e9 / self._factor
            self._timer = self._loop.call_later(max(_SHORTEST_SLEEP_S, delay_s), self._tick)

    # -------------------------------------------------------------------- outwards

    def _update_handover(self) -> None:
        """Take blocks that arrived from other workers, and free those that they released."""
        if self._handover is None:
            return
        failed = self._handover.update()
        for key, _ in failed:
            self._model.abort(key)
            del self._streams[key]
        self._fail_handovers(failed)

    def _fail_handovers(self, failed: Sequence[tuple[int, str]]) -> None:
        if failed and self._emit is not None:
            last = TokenDelta(finish_reason=FinishReason.ERROR, handover_failed=True)
            self._emit([(key, evolve(last, error=error)) for key, error in failed])

    def _deliver(self, events: Sequence[Event]) -> None:
        """Send the tokens and publish the block events of one tick."""
        deltas: list[tuple[int, TokenDelta]] = []
        preempted: list[int] = []
        for event in events:
            match event:
                case Steps():
                    pass
                case Stored() | Removed() | Offloaded() if self._feed is not None:
                    self._feed_blocks(self._feed, event)
                case FirstToken():
                    self._streams[event.key].cached_tokens = event.cached_tokens
                case Finished():
                    stream = self._streams.pop(event.key)
                    deltas.append((event.key, stream.delta(len(stream.answer.token_ids))))
                case Preempted():
                    preempted.append(event.key)
                case Ready() | Pulling() | Pulled() if self._handover is not None:
                    self._handover.take(event)
        deltas += self._progress((*self._model.decoding(), *preempted))
        if self._feed is not None:
            self._feed.publish()
        if deltas and self._emit is not None:
            self._emit(deltas)

    def _progress(self, keys: Iterable[int]) -> Iterator[tuple[int, TokenDelta]]:
        for key in keys:
            if (stream := self._streams.get(key)) is not None:
                generated = self._model.generated(key)
                if generated > stream.sent:
                    yield key, stream.delta(generated)

    def _feed_blocks(self, feed: EventFeed, event: Stored | Removed | Offloaded) -> None:
        if isinstance(event, Stored):
            stream = self._streams[event.key]
            asked = stream.request
            feed.stored(
                event, stream.keys, stream.token_ids, asked.adapter_digest, asked.cache_salt
            )
        else:
            feed.moved(event)
