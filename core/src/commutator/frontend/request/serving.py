"""The life cycle of a request that generates, the same for every door and protocol."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator
from functools import partial

from commutator.contract.answer import AnswerWriter, Batch, Content, Finish, PromptLogprobs
from commutator.contract.conversation import Generate
from commutator.contract.request import Caller
from commutator.errors import PermissionDeniedError, RequestError
from commutator.frontend.limits import TimeLimit
from commutator.frontend.request.call import Call
from commutator.frontend.request.conversation import NOT_SERVED
from commutator.frontend.request.generation import Generation, Plan
from commutator.frontend.request.planning import Target, make_plan
from commutator.frontend.work import WorkPool
from commutator.tokenizer.text_model import TextModel

_INLINE_BYTES = 1 << 20
_INLINE_LOGPROBS = 32
"""Each takes some microseconds to encode, with 20 alternatives some tens."""

MAX_TOKENS_HEADER = "X-Commutator-Max-Tokens"
"""The longest answer that there was room for, where the client asked for a longer one."""

MakeWriter = Callable[[Plan], AnswerWriter]


async def _nothing() -> None:
    """Most protocols keep no answers."""


async def answer(
    call: Call,
    asked: Generate,
    make_writer: MakeWriter,
    limit: TimeLimit,
    *,
    written: Callable[[], Awaitable[None]] = _nothing,
) -> None:
    """Limit, preprocess, route, generate, write and account ``asked``.

    ``limit`` is entered already: reading the request counts, too. ``written`` is awaited once the
    writer has made all of the answer, and before the client has its end: who keeps answers has
    kept this one by the client's next request. Raises RequestError, what dispatching and
    ``written`` raise; once the answer has begun, the door ends it with the writer's
    ``stream_failed``.
    """
    call.model, _ = call.text_model(asked.model, asked.session_id)
    call.user = asked.user
    sender = call.caller(asked.user, asked.session_id)
    async with call.services.limiter.of(sender):
        attempt = partial(_answer, call, asked, make_writer, limit, written, sender)
        try:
            await call.serve(asked.model, attempt)
        except (RequestError, PermissionDeniedError) as error:
            error.rename(asked.params)
            raise


async def _answer(
    call: Call,
    asked: Generate,
    make_writer: MakeWriter,
    limit: TimeLimit,
    written: Callable[[], Awaitable[None]],
    sender: Caller,
    name: str,
    text: TextModel,
) -> None:
    """Have the model answer that is to serve the request now."""
    services = call.services
    target = Target(
        model=name,
        text=text,
        adapter=call.adapter,
        prompts=services.preprocessors[name],
        parser=services.parsers.get(name),
        max_model_len=services.max_model_len(name, call.principal),
        request_id=call.request_id,
        principal=call.principal,
        caller=sender,
    )
    plan = await make_plan(asked, target)
    longest = plan.requests[0].sampling.max_tokens
    call.answer_headers.pop(MAX_TOKENS_HEADER, None)  # of a model that could not serve
    if asked.max_tokens is not None and longest < asked.max_tokens:
        call.answer_headers[MAX_TOKENS_HEADER] = str(longest)
    writer = make_writer(plan)
    if call.counts and call.ticket is None:
        is_open = asked.max_tokens is None and asked.conversation is not None
        stated = None if is_open else longest
        call.ticket = await services.request_limiter.admit(
            call.principal, plan.prompt_tokens, len(plan.requests), stated
        )
    if asked.stream:
        call.will_stream(writer)
    try:
        async with Generation(
            services.dispatcher,
            services.metrics,
            plan,
            services.logprobs,
            call.arrived_s,
            limit.deadline_s,
        ) as generation:
            try:
                if asked.stream:
                    call.generating = True
                    await _stream(call, generation, writer, written)
                    return
                parts = await _collect(generation, writer, services.work)
            finally:
                call.generating = False
                if not call.begun:
                    _note_routing(call, generation)
                _account(call, generation)
    except RequestError as refused:
        if (told := _of_constraint(refused, plan)) is None:
            raise
        raise told from refused
    call.answering = True
    await written()
    await call.reply(parts, writer.whole_type)


def _of_constraint(refused: RequestError, plan: Plan) -> RequestError | None:
    """An engine's refusal of a constraint, in the client's words; None: it is of something else.

    Engines that take clients' requests unchanged may still serve calls that are forced.
    """
    field = "response_format"
    text = str(refused).removeprefix(f"{field}: ")
    if refused.param not in {None, field}:
        return None
    if plan.forced is not None:
        where = "tools: strict" if plan.forced == "auto" else "tool_choice"
        param = where.partition(":")[0]
        return RequestError(f"{where}: {text}", param, refused.code or NOT_SERVED)
    if refused.param is None and text == str(refused):
        return None
    return RequestError(f"{field}: {text}", field, refused.code)


async def _collect(generation: Generation, writer: AnswerWriter, work: WorkPool) -> list[bytes]:
    """The whole answer in parts.

    Log probabilities are encoded as they come: as objects they would be millions, which keep the
    garbage collector busy and take long to free.
    """
    async for batch in generation.batches():
        generation.keep(batch)
        if generation.wants_logprobs and _takes_long(batch):
            await work.run(partial(writer.keep, batch), refusable=False)
        else:
            writer.keep(batch)
    usage = generation.usage()
    if writer.kept_bytes <= _INLINE_BYTES:
        return [*writer.whole(usage)]

    def encoded() -> Generator[None, None, list[bytes]]:
        parts = []
        for part in writer.whole(usage):
            parts.append(part)
            yield
        return parts

    return await work.run_in_steps(encoded(), refusable=False)


async def _stream(
    call: Call,
    generation: Generation,
    writer: AnswerWriter,
    written: Callable[[], Awaitable[None]],
) -> None:
    unfinished, noted, work = len(generation.choices), False, call.services.work
    async for batch in generation.batches():
        if not noted:
            noted = True
            _note_routing(call, generation)
            call.answering = True
            await call.begin(writer.stream_type, failed=writer.stream_failed)
        for _, event in batch:
            if type(event) is Finish:
                unfinished -= 1
        if generation.wants_logprobs and _takes_long(batch):
            data = await work.run(partial(writer.stream, batch), refusable=False)
        else:
            data = writer.stream(batch)
        if not unfinished:
            last = writer.stream_end(generation.usage())
            if written is not _nothing:
                await call.write(data)  # if it is not kept, the stream ends otherwise after that
                data = b""
                await written()
            await call.end(data + last)
        elif data:
            await call.write(data)


def _takes_long(batch: Batch) -> bool:
    """Whether log probabilities keep the event loop from other requests."""
    count = 0
    for _, event in batch:
        if type(event) is Content and event.logprobs:
            count += len(event.logprobs)
        elif type(event) is PromptLogprobs:
            count += len(event.entries)
    return count > _INLINE_LOGPROBS


def _note_routing(call: Call, generation: Generation) -> None:
    call.note_routing(generation.worker_ids, lambda: generation.explanations)


def _account(call: Call, generation: Generation) -> None:
    usage = generation.usage()
    call.workers = generation.worker_ids
    call.used(usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens)
    call.ttft_s = generation.times[0].ttft_s
    call.services.metrics.tokens_used(
        call.model, call.prompt_tokens, call.cached_tokens, call.generated_tokens
    )
