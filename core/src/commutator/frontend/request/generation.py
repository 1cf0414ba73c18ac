"""Runs the engine requests of a plan at the same time and merges their events."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from typing import Any, Self

from attrs import define

from commutator.contract.answer import (
    AnswerEvent,
    Batch,
    Content,
    Finish,
    FinishKind,
    PromptLogprobs,
    ReasoningContent,
    Usage,
)
from commutator.contract.parser import AnswerParser
from commutator.contract.request import (
    UNKNOWN_CALLER,
    Caller,
    FinishReason,
    GenerateRequest,
    TokenDelta,
    TokenLogprob,
)
from commutator.errors import EngineError, OverloadedError, RequestError
from commutator.frontend.limits import HeldLogprobs, LogprobBudget
from commutator.metrics.frontend import FrontendMetrics, TokenTimes
from commutator.routing.dispatch import Dispatch
from commutator.routing.dispatcher import Dispatcher
from commutator.tokenizer.text_model import StopMatcher, TextModel

_FINISHES: dict[FinishReason, FinishKind] = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.TOOL_CALLS: "tool_calls",
    FinishReason.CONTENT_FILTER: "refusal",
}
_MERGED_PIECES = 64
_EXPLAINED = 8

Events = list[tuple[int, AnswerEvent]]


def _logprobs_in(batch: Batch) -> int:
    """Alternatives included."""
    count = 0
    for _, event in batch:
        if type(event) is Content:
            count += sum(1 + len(entry.top) for _, entry in event.logprobs)
        elif type(event) is PromptLogprobs:
            count += sum(1 + len(entry.top) for entry in event.entries)
    return count


@define  # made for each request, and a frozen class takes twice as long to fill
class ChoiceRules:
    """What ends an answer, and which of its tokens are shown."""

    stop: tuple[str, ...] = ()
    end_ids: frozenset[int] = frozenset()
    """Tokens that end the answer; the last one is not shown unless ``include_stop``."""
    stop_ids: frozenset[int] = frozenset()
    """Those of them that the client named."""
    include_stop: bool = False
    skip_special_tokens: bool = True
    min_tokens: int = 0
    """Stop strings are looked for only after this many tokens."""
    token_ids: bool = False
    """Whether events tell the answer's tokens."""
    no_answer: bool = False
    """Whether the answer is not shown: only the prompt is asked about."""


@define  # as above
class Plan:
    """The engine requests of one client request, and how to turn their tokens into answers."""

    model: str
    text: TextModel
    requests: tuple[GenerateRequest, ...]
    """One for each answer; the answers to one prompt stand together."""
    sequence_hashes: tuple[Sequence[int] | None, ...]
    """For each answer the hashes of its prompt's blocks, if known."""
    prompt_tokens: int
    """Each prompt counts once."""
    rules: ChoiceRules
    answers_per_prompt: int
    echoes: tuple[str, ...] | None = None
    """For each answer the prompt that it begins with."""
    caller: Caller = UNKNOWN_CALLER
    migration_limit: int | None = None
    """How often an answer may change its worker; None leaves it to the configuration."""
    parser: Callable[[], AnswerParser | None] | None = None
    """Makes what reads each answer in turn, already begun; None: an answer is text."""
    forced: str | None = None
    """The mode of a tool choice, "required" or "named", that the constraint of the requests is for;
    "auto": it is for strict tools; None: it is the client's own, or there is none."""

    @property
    def name(self) -> str:
        """The model as answers name it: that of the adapter, where one is used."""
        adapter = self.requests[0].adapter
        return self.model if adapter is None else adapter.name


class Choice:
    """Assembles one answer. ``push`` until ``finished``, then no more."""

    def __init__(
        self,
        model: TextModel,
        rules: ChoiceRules,
        *,
        number: int = 0,
        wants_logprobs: bool = False,
        prompt_logprobs: int | None = None,
        parser: AnswerParser | None = None,
    ) -> None:
        """``prompt_logprobs`` is the number of them that the worker has to send, if any."""
        self._number = number
        self._parser = parser
        self.finished = False
        self._rules = rules
        self._wants_logprobs = wants_logprobs
        self._prompt_logprobs = prompt_logprobs
        self._counts_end = rules.token_ids or prompt_logprobs is not None
        skip = rules.skip_special_tokens and parser is None  # markers are special tokens
        self._detokenizer = model.detokenizer(skip_special_tokens=skip)
        self._specials = {} if parser is None else model.special_texts
        self._marks: list[tuple[int, int]] = []
        """The special tokens of this delta, as (offset, length) in the text decoded before."""
        self._thinks = False
        self._thought = 0.0
        self._matcher: StopMatcher | None = None
        if rules.stop:
            self._matcher = StopMatcher(rules.stop, include_stop=rules.include_stop)
        self._plain = (
            not rules.stop
            and parser is None
            and not (rules.token_ids or rules.no_answer)
            and prompt_logprobs is None
        )
        self._decoded = 0
        """Characters decoded, including those that the matcher holds back."""
        self._sent = 0
        self._pending: deque[tuple[int, TokenLogprob]] = deque()
        self.generated_tokens = 0
        self.cached_tokens = 0

    def push(self, delta: TokenDelta) -> Events:
        """What a delta adds to the answer. Raises EngineError when the engine gave it up.

        Raises RequestError when it ignores that the request wants logprobs.
        """
        if self._wants_logprobs and delta.token_ids and not self.generated_tokens:
            _require_logprobs(delta)
        if self._prompt_logprobs is not None and delta.token_ids:
            return self._with_prompt(delta)
        if delta.cached_tokens is not None:
            self.cached_tokens = delta.cached_tokens
        if self._plain and delta.finish_reason is None and not delta.logprobs:
            # The quick way for most deltas, which only add text.
            ids = delta.token_ids
            text = self._decode(ids)
            self._sent += len(text)
            self.generated_tokens += len(ids)
            return [(self._number, Content(text))]
        if delta.finish_reason in (FinishReason.ABORT, FinishReason.ERROR):
            raise EngineError(delta.error or "the worker aborted the request")
        if self._rules.no_answer:
            self.finished = True
            return [(self._number, Finish("length"))]
        self._marks.clear()
        events = self._read(delta)
        if self._rules.token_ids and delta.token_ids:
            first = events[0][1] if events else None
            if type(first) is Content:
                first.token_ids = delta.token_ids
            else:
                events.insert(0, (self._number, Content("", (), delta.token_ids)))
        return events

    def _read(self, delta: TokenDelta) -> Events:
        start = self._decoded
        shown = self._shown(delta)
        text = self._text(shown, delta.logprobs)
        if self._counts_end:  # those of the token that ended the answer, too
            self._pending += [(self._decoded, one) for one in delta.logprobs[len(shown) :]]
        self.generated_tokens += len(delta.token_ids)
        if self._parser is not None:
            return self._parsed(self._parser, text, start, delta)
        held, finish = self._ending(delta.finish_reason)
        text += held
        self._sent += len(text)
        logprobs = self._certain(finish) if self._pending else ()
        events: Events = []
        if text or logprobs or finish is None:
            events.append((self._number, Content(text, logprobs)))
        if finish is not None:
            self.finished = True
            events.append((self._number, Finish(finish, self._stop(delta.stop_reason))))
        return events

    def _with_prompt(self, delta: TokenDelta) -> Events:
        """What the delta adds that has the log probabilities of the prompt."""
        wanted, self._prompt_logprobs = self._prompt_logprobs, None
        if len(delta.prompt_logprobs) != wanted:
            raise EngineError(
                f"the worker sent {len(delta.prompt_logprobs)} log probabilities of a prompt, "
                f"expected {wanted}"
            )
        return [(self._number, PromptLogprobs(delta.prompt_logprobs)), *self.push(delta)]

    def _ending(self, reason: FinishReason | None) -> tuple[str, FinishKind | None]:
        """What the matcher held back of an answer that ends for ``reason``, and why it ends."""
        finish, matcher = None if reason is None else _FINISHES[reason], self._matcher
        if matcher is None:
            return "", finish
        if matcher.matched is not None:
            return "", "stop"
        # The detokenizer is not flushed: half a character at the end is never shown.
        return "" if finish is None else matcher.flush(), finish

    def _stop(self, stop_reason: str | int | None) -> str | int | None:
        """What of the request ended the answer; None where the model did."""
        if self._matcher is not None and self._matcher.matched is not None:
            return self._matcher.matched
        known = isinstance(stop_reason, str) or stop_reason in self._rules.stop_ids
        return stop_reason if known else None

    def _parsed(self, parser: AnswerParser, text: str, start: int, delta: TokenDelta) -> Events:
        """The events of ``text``, which begins at ``start``.

        Stop strings are looked for in the answer's text only, not in thoughts and calls.
        """
        marks = [(at - start, length) for at, length in self._marks]
        found = list(parser.feed(text, marks)) if text else []
        finish = None if delta.finish_reason is None else _FINISHES[delta.finish_reason]
        if finish is not None:
            last, finish = parser.finish(finish)
            found += last
        self._count_reasoning(found, text, len(delta.token_ids))
        if self._matcher is not None and self.generated_tokens > self._rules.min_tokens:
            found = self._until_stop(found, finish, self._matcher)
            finish = "stop" if self._matcher.matched is not None else finish
        if finish is not None:
            self.finished = True
            found.append(Finish(finish, self._stop(delta.stop_reason)))
        self._sent = self._decoded
        if logprobs := self._certain(finish):
            found.insert(0, Content("", logprobs))
        return [(self._number, event) for event in found]

    def _count_reasoning(self, events: Sequence[AnswerEvent], text: str, tokens: int) -> None:
        """Of tokens that are part reasoning, as many as is their part of the characters."""
        if not events:
            self._thought += tokens if self._thinks else 0
            return
        self._thinks = type(events[-1]) is ReasoningContent
        thought = sum(len(one.text) for one in events if type(one) is ReasoningContent)
        if thought:
            self._thought += tokens * min(1.0, thought / max(1, len(text)))

    @property
    def reasoning_tokens(self) -> int:
        """Of the tokens generated, those of reasoning."""
        return round(self._thought)

    def _until_stop(
        self, events: Sequence[AnswerEvent], finish: FinishKind | None, matcher: StopMatcher
    ) -> list[AnswerEvent]:
        """The events up to a stop string in the answer's text."""
        found: list[AnswerEvent] = []
        for event in events:
            if type(event) is Content:
                if text := matcher.push(event.text):
                    found.append(Content(text))
                if matcher.matched is not None:
                    return found
                continue
            if held := matcher.flush():
                found.append(Content(held))
            found.append(event)
        if finish is not None and (held := matcher.flush()):
            found.append(Content(held))
        return found

    def _shown(self, delta: TokenDelta) -> Sequence[int]:
        """The delta's tokens, less the one that ended the answer."""
        ids = delta.token_ids
        ended_by_token = delta.finish_reason is FinishReason.STOP and not isinstance(
            delta.stop_reason, str
        )
        if ended_by_token and ids and ids[-1] in self._rules.end_ids:
            return ids if self._rules.include_stop else ids[:-1]
        return ids

    def _text(self, ids: Sequence[int], logprobs: Sequence[TokenLogprob]) -> str:
        if self._parser is not None:
            return self._marked_text(ids, logprobs)
        matcher = self._matcher
        free = len(ids)  # tokens in which no stop string is looked for
        if matcher is not None:
            free = max(0, self._rules.min_tokens - self.generated_tokens)
        if not logprobs:
            text = self._decode(ids[:free]) if free else ""
            return text if matcher is None else text + matcher.push(self._decode(ids[free:]))
        text = ""
        for place, (token_id, logprob) in enumerate(zip(ids, logprobs, strict=False)):
            self._pending.append((self._decoded, logprob))
            decoded = self._decode((token_id,))
            text += decoded if matcher is None or place < free else matcher.push(decoded)
        return text

    def _marked_text(self, ids: Sequence[int], logprobs: Sequence[TokenLogprob]) -> str:
        """All the text, with ``_marks`` of its special tokens."""
        specials = self._specials
        if not logprobs and specials.keys().isdisjoint(ids):
            return self._decode(ids)
        text = ""
        for place, token_id in enumerate(ids):
            if place < len(logprobs):
                self._pending.append((self._decoded, logprobs[place]))
            text += self._decode((token_id,))
            if special := specials.get(token_id):
                self._marks.append((self._decoded - len(special), len(special)))
        return text

    def _decode(self, ids: Sequence[int]) -> str:
        text = self._detokenizer.push(ids)
        self._decoded += len(text)
        return text

    def _certain(self, finish: FinishKind | None) -> tuple[tuple[int, TokenLogprob], ...]:
        """The entries whose text has been sent; at a natural end, all that are left."""
        pending = self._pending
        stopped = self._matcher is not None and self._matcher.matched is not None
        everything = finish is not None and not stopped
        entries = []
        while pending and (everything or pending[0][0] < self._sent):
            entries.append(pending.popleft())
        return tuple(entries)


def _require_logprobs(delta: TokenDelta) -> None:
    if not delta.logprobs:
        raise RequestError(
            "logprobs is not supported, because the engine of this model computes none. Remove it.",
            "logprobs",
            "unsupported_parameter",
        )


class _Answer:
    """The events of one answer. Not a generator, because asyncio tracks every one of those."""

    def __init__(self, dispatched: Dispatch, choice: Choice, times: TokenTimes) -> None:
        self._dispatched = dispatched
        self._choice = choice
        self._times = times

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Events:
        if self._choice.finished:
            raise StopAsyncIteration
        delta = await self._dispatched.__anext__()
        if delta.token_ids:
            self._times.tokens(len(delta.token_ids))
        events = self._choice.push(delta)
        if events and type(events[-1][1]) is Finish:
            await self._dispatched.stop()  # after a stop string the engine may still be at work
        return events


class Generation:
    """Runs a plan inside ``async with``, which aborts every engine request that still runs.

    Errors are those of ``Dispatcher.dispatch`` and of its streams. If one answer fails, all
    of them end.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        metrics: FrontendMetrics,
        plan: Plan,
        logprobs: LogprobBudget,
        arrived_s: float,
        deadline_s: float | None = None,
    ) -> None:
        """``deadline_s`` is by the event loop's clock."""
        self._dispatcher = dispatcher
        self._deadline_s = deadline_s
        self._plan = plan
        self._metrics = metrics
        self._held = HeldLogprobs(logprobs)
        wants = plan.requests[0].sampling.top_logprobs is not None
        of_prompt = plan.requests[0].prompt_logprobs is not None
        self.wants_logprobs = wants or of_prompt
        self.choices = [
            Choice(
                plan.text,
                plan.rules,
                number=number,
                wants_logprobs=wants,
                prompt_logprobs=len(request.token_ids) - 1 if of_prompt else None,
                parser=None if plan.parser is None else plan.parser(),
            )
            for number, request in enumerate(plan.requests)
        ]
        self.times = [metrics.token_times(plan.model, arrived_s) for _ in plan.requests]
        self._dispatched: list[Dispatch] = []
        self._merging: AsyncGenerator[Events, None] | None = None

    @property
    def explanations(self) -> list[dict[str, Any]]:
        """Why each answer's worker was chosen; of the first few answers, as they are long."""
        return [dispatched.explain() for dispatched in self._dispatched[:_EXPLAINED]]

    @property
    def worker_ids(self) -> tuple[str, ...]:
        """Each worker once, in order of the answers; grows when one is replaced."""
        if len(self._dispatched) == 1:
            return tuple(self._dispatched[0].worker_ids)
        served = (worker_id for one in self._dispatched for worker_id in one.worker_ids)
        return tuple(dict.fromkeys(served))

    async def __aenter__(self) -> Self:
        plan = self._plan
        try:
            for request, hashes in zip(plan.requests, plan.sequence_hashes, strict=True):
                if self._dispatched:  # hundreds of answers must not hold the event loop
                    await asyncio.sleep(0)
                # Waiting for a worker that runs an earlier answer to the same request might never
                # end, so the first is admitted for all of them.
                dispatched = await self._dispatcher.dispatch(
                    plan.model,
                    request,
                    plan.caller,
                    hashes,
                    may_wait=not self._dispatched,
                    migration_limit=plan.migration_limit,
                    deadline_s=self._deadline_s,
                )
                self._dispatched.append(dispatched)
                self._metrics.routed(plan.model, dispatched.route)
        except BaseException:
            await self._close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        self._held.give_back(self._held.count)
        if self._merging is not None:
            await self._merging.aclose()
        await self._close()

    def batches(self) -> AsyncIterator[Events]:
        """New events until every answer is finished. Called once.

        Log probabilities are kept for a slow reader within their budget, beyond which the answers
        end with OverloadedError. Other events are not made before it is ready for them.
        """
        if len(self._dispatched) == 1 and not self.wants_logprobs:
            return self._answer(0)
        self._merging = self._merged()
        return self._merging

    def keep(self, batch: Batch) -> None:
        """The reader keeps these log probabilities to the end. Raises OverloadedError."""
        self._held.add(_logprobs_in(batch))

    def usage(self) -> Usage:
        """Tokens so far. Cached tokens are those of each prompt's first answer."""
        if len(self.choices) == 1:
            (only,) = self.choices
            return Usage(
                prompt_tokens=self._plan.prompt_tokens,
                completion_tokens=only.generated_tokens,
                cached_tokens=only.cached_tokens,
                reasoning_tokens=only.reasoning_tokens,
            )
        first_answers = self.choices[:: self._plan.answers_per_prompt]
        return Usage(
            prompt_tokens=self._plan.prompt_tokens,
            completion_tokens=sum(choice.generated_tokens for choice in self.choices),
            cached_tokens=sum(choice.cached_tokens for choice in first_answers),
            reasoning_tokens=sum(choice.reasoning_tokens for choice in self.choices),
        )

    def _answer(self, number: int) -> _Answer:
        return _Answer(self._dispatched[number], self.choices[number], self.times[number])

    async def _merged(self) -> AsyncGenerator[Events, None]:
        # Streams merge the tokens that wait in them, which take little.
        most = 0 if self.wants_logprobs else _MERGED_PIECES
        ready: asyncio.Queue[Events | BaseException] = asyncio.Queue(most)
        pumps = [
            asyncio.create_task(self._pump(number, ready)) for number in range(len(self.choices))
        ]
        running = len(pumps)
        try:
            while running:
                items = [await ready.get()]
                while not ready.empty() and len(items) < _MERGED_PIECES:
                    items.append(ready.get_nowait())
                batch: Events = []
                for item in items:
                    if isinstance(item, BaseException):
                        raise item
                    batch += item
                    running -= bool(item) and type(item[-1][1]) is Finish
                yield batch
                if self.wants_logprobs:
                    self._held.give_back(_logprobs_in(batch))
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)

    async def _pump(self, number: int, ready: asyncio.Queue[Events | BaseException]) -> None:
        try:
            async for batch in self._answer(number):
                if self.wants_logprobs:
                    self._hold(batch, ready)
                await ready.put(batch)
        except Exception as error:  # noqa: BLE001 - raised by the reader of the queue
            await ready.put(error)
            await self._dispatched[number].aclose()  # nobody takes what still comes

    def _hold(self, batch: Batch, ready: asyncio.Queue[Events | BaseException]) -> None:
        """Hold log probabilities until they are read. Drops those that are not if it raises."""
        try:
            self._held.add(_logprobs_in(batch))
        except OverloadedError:
            while not ready.empty():
                dropped = ready.get_nowait()
                if not isinstance(dropped, BaseException):
                    self._held.give_back(_logprobs_in(dropped))
            raise

    async def _close(self) -> None:
        for dispatched in self._dispatched:
            await dispatched.aclose()
