"""The served engine: drives the model by the clock, or as fast as it will go.

It runs inside the server's event loop: a tick of the model is far shorter than what a thread of
its own would cost in hand-overs.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.metadata import version
from typing import Any

from attrs import define, evolve

from commutator.engine import Emit, TokenEngine
from commutator.engine.handover import DecodeWords, PrefillWords
from commutator.errors import (
    EngineError,
    EngineHandoverError,
    EngineOverloadedError,
    RequestError,
)
from commutator.kv import EventPublisher
from commutator.text import TextModel
from commutator.types import EngineInfo, EngineLoad, FinishReason, GenerateRequest, TokenDelta
from commutator_sim.answers import Answer, plan_answer, refuse_what_needs_a_model
from commutator_sim.block_keys import block_keys, root_key
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
from commutator_sim.kv_events import EventFeed
from commutator_sim.model import SimModel
from commutator_sim.request import SimRequest
from commutator_sim.served_handover import FailedHandover, ServedHandover

__all__ = ["SimEngine"]

_SHORTEST_SLEEP_S = 0.001
_GATHER_EVENTS_S = 0.01
"""At unlimited speed. A real step takes as long, and its events come in one message."""


@define(eq=False)
class _Stream:
    """One request's answer on its way out."""

    answer: Answer
    token_ids: list[int]
    """Prompt and answer."""
    keys: Sequence[int]
    request: GenerateRequest
    cached_tokens: int | None = None
    """Set between the first token's event and its delta."""
    sent: int = 0

    def delta(self, generated: int) -> TokenDelta:
        """What was generated and not yet sent."""
        answer, cached = self.answer, self.cached_tokens
        token_ids = tuple(answer.token_ids[self.sent : generated])
        self.sent, self.cached_tokens = generated, None
        if generated < len(answer.token_ids):
            return TokenDelta(token_ids, cached_tokens=cached)
        return TokenDelta(token_ids, (), answer.finish_reason, answer.stop_reason, cached)


class SimEngine(TokenEngine):
    """A worker without a model. Needs no files; ``text`` only makes the answers nicer."""

    def __init__(
        self,
        config: SimConfig,
        *,
        model: str,
        max_model_len: int,
        text: TextModel | None = None,
    ) -> None:
        """``model`` is the name that clients give; ``max_model_len`` is in tokens."""
        self._config = config
        self._model_name = model
        self._max_model_len = min(max_model_len, config.kv_capacity_blocks * config.block_size)
        self._text = text
        self._factor = config.time_factor
        # The bytes of a hand-over take their time outside, where the real ones would go.
        self._model = SimModel(
            evolve(config.parameters(), handover_latency_ns=0, handover_block_ns=1)
        )
        self._handover: ServedHandover | None = None
        self._streams: dict[int, _Stream] = {}
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
            self._handover = ServedHandover(config, self._model_name, self._model, self._tick_soon)
            self._handover.start()
        return EngineInfo(
            kind="sim",
            version=version("commutator-sim"),
            model=self._model_name,
            max_model_len=self._max_model_len,
            block_size=config.block_size,
            kv_capacity_blocks=config.kv_capacity_blocks,
            kv_events=None if self._publisher is None else self._publisher.source,
            pid=os.getpid(),
            continues_answers=True,
            handover=None if self._handover is None else self._handover.info,
        )

    def submit(self, key: int, request: GenerateRequest) -> None:
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
            asked = self._leg(key, stream)
        except EngineHandoverError as error:
            assert self._loop is not None
            self._loop.call_soon(self._fail_handovers, [FailedHandover(key, str(error))])
            return
        self._streams[key] = stream
        model.submit(key, asked)
        self._tick_soon()

    def abort(self, key: int) -> None:
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
            running=model.running,
            waiting=model.waiting,
            kv_used_blocks=model.cache.used_blocks,
            kv_cached_blocks=model.cache.idle_blocks,
            kv_capacity_blocks=model.cache.capacity_blocks,
        )

    def reset_prefix_cache(self) -> None:
        self._catch_up()
        self._model.reset_prefix_cache()
        self._tick_soon()

    async def handover(self, what: str, arguments: Mapping[str, Any]) -> Any:
        if self._handover is None:
            raise EngineError("this worker hands no KV over: prefix_caching is off")
        return await self._handover.answer(what, arguments)

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
        """Raises RequestError for what can never be answered."""
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
        token_ids = [*request.token_ids, *answer.token_ids]
        if not config.prefix_caching:
            return _Stream(answer, token_ids, (), request)
        try:
            root = root_key(request.lora_name, request.cache_salt)
            keys = block_keys(token_ids[:-1], config.block_size, root)
        except OverflowError as error:
            raise RequestError(f"a token id is out of range: {error}") from error
        return _Stream(answer, token_ids, keys, request)

    def _leg(self, key: int, stream: _Stream) -> SimRequest:
        """The request as the model gets it: whole, or one leg of a hand-over.

        Raises RequestError for a wrong leg, EngineHandoverError for one that nobody wants.
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
        match self._handover.leg(request):
            case DecodeWords() as words:
                return evolve(whole, pulls=self._handover.begin_pull(key, request, words))
            case PrefillWords() as words:
                stream.answer = evolve(
                    stream.answer,
                    token_ids=stream.answer.token_ids[:1],
                    finish_reason=FinishReason.LENGTH,
                )
                if not (wanted := self._handover.begin_export(key, request, words)):
                    return evolve(whole, output_tokens=1)
                # What is not handed over is computed by the decode worker, so not here.
                return evolve(whole, prompt_tokens=wanted * size, output_tokens=1, exports=True)
        return whole

    def _answer_to(self, request: GenerateRequest) -> Answer:
        """What is left to say: the answer to the prompt, less what another worker said of it."""
        done = request.generated_prefix
        prompt_length = len(request.token_ids) - done
        if not (done >= 0 < prompt_length):
            raise RequestError(f"generated_prefix: {done} of {len(request.token_ids)} tokens")
        answer = plan_answer(
            request.token_ids[:prompt_length],
            request.sampling,
            room=self._max_model_len - prompt_length,
            natural_tokens=self._config.answer_tokens,
            text=self._text,
        )
        if done >= len(answer.token_ids):
            raise RequestError(
                f"generated_prefix: the answer has only {len(answer.token_ids)} tokens, and {done} "
                "are said to be there already"
            )
        return evolve(answer, token_ids=answer.token_ids[done:]) if done else answer

    # ----------------------------------------------------------------------- time

    def _virtual_now_ns(self) -> int:
        assert self._loop is not None
        passed_s = self._loop.time() - self._started_s
        return max(self._model.now_ns, int(passed_s * self._factor * 1e9))

    def _catch_up(self) -> None:
        """Bring the model to the present; at unlimited speed there is none to bring it to."""
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
        """What other workers have sent, or need no more."""
        if self._handover is None:
            return
        failed = self._handover.update()
        for one in failed:
            self._model.abort(one.key)
            del self._streams[one.key]
        self._fail_handovers(failed)

    def _fail_handovers(self, failed: Sequence[FailedHandover]) -> None:
        if failed and self._emit is not None:
            why = TokenDelta(finish_reason=FinishReason.ERROR, handover_failed=True)
            self._emit([(one.key, evolve(why, error=one.error)) for one in failed])

    def _deliver(self, events: Sequence[Event]) -> None:
        """Send the tokens and publish the block events of one tick."""
        deltas: list[tuple[int, TokenDelta]] = []
        preempted: list[int] = []
        for event in events:
            match event:
                case Steps():
                    pass
                case Stored() | Removed() | Offloaded():
                    self._feed_blocks(event)
                case FirstToken():
                    self._streams[event.key].cached_tokens = event.cached_tokens
                case Finished():
                    stream = self._streams.pop(event.key)
                    deltas.append((event.key, stream.delta(len(stream.answer.token_ids))))
                case Preempted():
                    preempted.append(event.key)
                case _:
                    self._hand_over(event)
        deltas += self._progress((*self._model.decoding(), *preempted))
        if self._feed is not None:
            self._feed.publish()
        if deltas and self._emit is not None:
            self._emit(deltas)

    def _hand_over(self, event: Ready | Pulling | Pulled) -> None:
        assert self._handover is not None
        match event:
            case Ready():
                self._handover.ready(event)
            case Pulling():
                self._handover.pulling(event)
            case Pulled():
                self._handover.pulled(event.key)

    def _progress(self, keys: Iterable[int]) -> Iterator[tuple[int, TokenDelta]]:
        for key in keys:
            if (stream := self._streams.get(key)) is not None:
                generated = self._model.generated(key)
                if generated > stream.sent:
                    yield key, stream.delta(generated)

    def _feed_blocks(self, event: Stored | Removed | Offloaded) -> None:
        if (feed := self._feed) is None:
            return
        if isinstance(event, Stored):
            stream = self._streams[event.key]
            asked = stream.request
            feed.stored(event, stream.keys, stream.token_ids, asked.lora_name, asked.cache_salt)
        else:
            feed.moved(event)
