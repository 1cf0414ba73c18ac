"""Chat and completions: bodies of OpenAI's API become what core asks, and are answered."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import Any, Literal, TypeVar, cast

from attrs import evolve, field, frozen

from commutator.contract.conversation import (
    Conversation,
    Generate,
    Message,
    Part,
    Reasoning,
    Text,
    Tool,
    ToolCall,
    ToolChoice,
    ToolResult,
)
from commutator.contract.request import KvRetention
from commutator.errors import RequestError
from commutator.frontend import (
    INLINE_BYTES,
    NOT_SERVED,
    Call,
    answer,
    parse_object,
    read_object,
    thinking_variables,
)
from commutator.schema import StructureError, structure
from commutator_openai.constraints import constraint_of
from commutator_openai.fields import (
    MAX_INT,
    CacheControl,
    Hint,
    build_request_converter,
    hints_given,
    retention_of,
)
from commutator_openai.known_parts import KnownParts, ReadTools, tools_of
from commutator_openai.load_report import ASKED_BY, note_load
from commutator_openai.pass_through import PassThrough
from commutator_openai.requests import (
    CONSTRAINT_FIELDS,
    BatchRequest,
    ChatMessage,
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    TextPart,
    TokenizeRequest,
)
from commutator_openai.tolerance import IGNORED_HEADER, ignored_header, set_aside
from commutator_openai.writers import ChatWriter, CompletionWriter, Shown

T = TypeVar("T")
RequestT = TypeVar("RequestT", ChatRequest, CompletionRequest, BatchRequest)

_OF_TOOLS = {"messages", "tools", "tool_choice"}
"""What an engine may serve that is asked as clients ask, where the front door cannot."""


@frozen
class Generations:
    """``strict``: parameters without effect are refused."""

    strict: bool
    pass_through: PassThrough
    known_parts: KnownParts = field(factory=KnownParts)

    async def chat_completions(self, call: Call) -> None:
        """POST /v1/chat/completions."""
        serving = self._serve(call, ChatRequest, asked_chat, ChatWriter)
        await call.traced("chat", serving)

    async def batch(self, call: Call) -> None:
        """POST /v1/chat/completions/batch."""
        serving = self._serve(call, BatchRequest, asked_batch, ChatWriter)
        await call.traced("chat", serving)

    async def invocations(self, call: Call) -> None:
        """POST /invocations: the body shows which of the others is meant, as SageMaker has it."""
        body = await read_object(call)
        found = next((path for key, path in _INVOKED.items() if key in body), None)
        if found is None:
            raise RequestError(
                f"expected one of {', '.join(_INVOKED)}, by which the kind of request is known",
                code="missing_required_parameter",
            )
        call.endpoint = found
        await (self.chat_completions if "messages" in body else self.completions)(call)

    async def completions(self, call: Call) -> None:
        """POST /v1/completions."""
        serving = self._serve(call, CompletionRequest, asked_completion, CompletionWriter)
        await call.traced("completion", serving)

    async def _serve(
        self,
        call: Call,
        cls: type[RequestT],
        asked: Callable[[RequestT], Generate],
        writer: type[ChatWriter | CompletionWriter],
    ) -> None:
        limit = call.time_limit()
        async with limit:
            read: tuple[RequestT, tuple[str, ...]]
            try:
                read = await read_request(call, cls, strict=self.strict, known=self.known_parts)
            except RequestError as refused:
                if await self._answered(call, refused, cls):
                    return
                raise
            body = read[0]
            unknown: tuple[str, ...] = (*read[1], *_without_effect(read[0]))
            given: Mapping[str, Hint] = unserved_hints(call, body)
            if given and await self._passed_on(call, given, cls):
                return
            if given or unknown:
                call.answer_headers[IGNORED_HEADER] = ignored_header([*given, *unknown])
            if ASKED_BY in call.headers:
                note_load(call, body.model, _session(body))
            make_writer = partial(writer, call.request_id, shown=_shown(body))
            try:
                await answer(call, asked(body), make_writer, limit)
            except RequestError as refused:
                if refused.param not in _OF_TOOLS:
                    raise
                if not await self._answered(call, refused, cls):
                    raise

    async def _answered(self, call: Call, refused: RequestError, cls: type[Any]) -> bool:
        return cls is not BatchRequest and await self.pass_through.answered(call, refused, cls)

    async def _passed_on(self, call: Call, given: Mapping[str, Hint], cls: type[RequestT]) -> bool:
        """Whether an engine answered that may know the hints; otherwise they are to be ignored.

        Raises RequestError where they are not to be ignored.
        """
        name, hint = next(iter(given.items()))
        refused = RequestError(
            f"{name} is not supported, because {hint.why}. Remove it.", name, NOT_SERVED
        )
        if self.strict or any(hint.for_engines for hint in given.values()):
            if await self._answered(call, refused, cls):
                return True
            if self.strict:
                raise refused
        return False


def unserved_hints(call: Call, body: GenerationRequest) -> Mapping[str, Hint]:
    """The hints that a request sets to more than "off", by name.

    Without the effort of reasoning, where the model's chat template looks at it.
    """
    given = hints_given(body)
    if "reasoning_effort" not in given:
        return given
    try:
        template = call.text_model(body.model, _session(body))[1].chat_template
    except RequestError:
        return given  # the model is not served, which is said later
    if template is None or "reasoning_effort" not in template.reads:
        return given
    return {name: hint for name, hint in given.items() if name != "reasoning_effort"}


def _session(body: GenerationRequest) -> str | None:
    return body.session_id or (body.prompt_cache_key if isinstance(body, ChatRequest) else None)


_INVOKED = {"messages": "/v1/chat/completions", "prompt": "/v1/completions"}


def _without_effect(body: GenerationRequest) -> tuple[str, ...]:
    """What is known, and says nothing in this request."""
    return ("tool_choice",) if _chooses_from_nothing(body) else ()


def _chooses_from_nothing(body: GenerationRequest) -> bool:
    return isinstance(body, ChatRequest) and body.tool_choice is not None and not body.tools


def _shown(body: ChatRequest | CompletionRequest) -> Shown:
    options = body.stream_options
    include_usage = options is not None and bool(options.include_usage)
    shown = Shown(
        include_usage=include_usage,
        continuous_usage=include_usage and bool(options and options.continuous_usage_stats),
        logprobs=body.logprobs,
        named_tokens=bool(body.logprob_token_ids),
        prompt_logprobs=body.prompt_logprobs is not None,
        token_ids=bool(body.return_token_ids),
        tokens_as_ids=bool(body.return_tokens_as_token_ids),
    )
    if isinstance(body, ChatRequest):
        shown.reasoning = body.include_reasoning is not False
        if body.echo and not isinstance(body, BatchRequest):
            shown.before = (_echoed(body.messages),)
        elif body.echo:
            shown.before = tuple(map(_echoed, cast("Any", body.messages)))
    return shown


def _echoed(messages: Sequence[ChatMessage]) -> str:
    """The text of the last message, if it is an assistant's."""
    last = messages[-1]
    if last.role != "assistant" or last.content is None:
        return ""
    if isinstance(last.content, str):
        return last.content
    return "\n".join(part.text or part.refusal or "" for part in last.content)


class _WrongSomewhereError(Exception):
    """The quick converter refused a body, and does not say why."""


_fast = build_request_converter(detailed=False)
_thorough = build_request_converter(detailed=True)
_SHOWN_PROBLEMS = 8
_SHOWN_CHARACTERS = 200


async def read_request(
    call: Call, cls: type[T], *, strict: bool, known: KnownParts | None = None
) -> tuple[T, tuple[str, ...]]:
    """The body as ``cls``, and the names of its fields that are ignored.

    With ``strict`` there are none: they are refused. Tools and messages that are ``known`` are not
    read again; those of ``ChatRequest`` become so. Raises RequestError, ``Failure`` for 408, 413
    and 415, and OverloadedError.
    """
    async with call.room_for_body():
        body = await call.read()
        again = b'"tools"' in body or b'"assistant"' in body
        if known is not None and cls is ChatRequest and again:
            structured = partial(_structure_quickly, cls, strict)
            quickly = partial(known.read, call.principal.name, structured, body)
        else:
            quickly = partial(_parse_quickly, cls, strict, body)
        try:
            if len(body) <= INLINE_BYTES:
                return quickly()
            return await call.services.work.run(quickly)
        except _WrongSomewhereError:
            size = max(len(body), INLINE_BYTES + 1)  # finding every mistake takes much longer
            return await call.off_loop(size, partial(_parse_thoroughly, cls, strict, body))


async def as_request(
    call: Call, data: dict[str, Any], cls: type[T], *, strict: bool
) -> tuple[T, tuple[str, ...]]:
    """``read_request`` of a body that was read as ``data``, which is changed."""
    size = len(call.body)
    try:
        return await call.off_loop(size, partial(_structure_quickly, cls, strict, data))
    except _WrongSomewhereError:
        return await call.services.work.run(partial(_parse_thoroughly, cls, strict, call.body))


def asked_chat(body: ChatRequest) -> Generate:
    """Raises RequestError for what contradicts itself."""
    _check_stream_options(body)
    asked = _asked(body)
    asked.conversation, asked.params = conversation_of(body), _PARAMS_OF_CHAT
    if body.max_completion_tokens is not None:
        asked.max_tokens = body.max_completion_tokens
        asked.params = _PARAMS_OF_NEWER_CHAT
    if body.logprobs:
        asked.top_logprobs = body.top_logprobs or 0
    elif body.top_logprobs:
        raise RequestError("top_logprobs: needs logprobs to be true", "top_logprobs")
    if body.kv_transfer_params is not None:
        _take_tokens(asked, body.kv_transfer_params)
    if asked.user is None:
        asked.user = body.safety_identifier
    if not asked.session_id:
        asked.session_id = body.prompt_cache_key
    return asked


def _take_tokens(asked: Generate, token_ids: list[int]) -> None:
    """The prompt is given; of it no chat template is known, and calls are not read."""
    conversation = asked.conversation
    if asked.max_tokens is None or (conversation is not None and conversation.tools):
        raise RequestError(
            "kv_transfer_params: needs max_completion_tokens, and no tools", "kv_transfer_params"
        )
    asked.conversation, asked.prompts = None, (token_ids,)


def asked_batch(body: BatchRequest) -> Generate:
    """Raises RequestError for what contradicts itself."""
    if body.kv_transfer_params is not None:
        problem = "one prompt cannot stand for several conversations"
        raise RequestError(f"kv_transfer_params: {problem}", "kv_transfer_params")
    conversations = cast("Any", body.messages)
    first, *further = (evolve(body, messages=messages) for messages in conversations)
    asked = asked_chat(first)
    asked.further = [conversation_of(one) for one in further]
    return asked


def asked_completion(body: CompletionRequest) -> Generate:
    """Raises RequestError for what contradicts itself, or is not served."""
    _check_stream_options(body)
    answers = body.n or 1
    if body.best_of is not None and body.best_of != answers:
        raise RequestError(
            f"best_of is not supported. Remove it, or set it to n ({answers}).",
            "best_of",
            NOT_SERVED,
        )
    asked = _asked(body)
    asked.prompts = body.prompt
    asked.top_logprobs = body.logprobs
    asked.echo = bool(body.echo)
    if body.echo and body.logprobs is not None and asked.prompt_logprobs is None:
        asked.prompt_logprobs = body.logprobs
    if body.max_tokens == 0:
        if not asked.echo and asked.prompt_logprobs is None:
            problem = "expected at least 1; 0 is for echo and prompt_logprobs alone"
            raise RequestError(f"max_tokens: {problem}", "max_tokens")
        if body.logprob_token_ids:
            problem = "with max_tokens 0 there is no answer that they could be of"
            raise RequestError(f"logprob_token_ids: {problem}", "logprob_token_ids")
        asked.top_logprobs = None
    return asked


_PARAMS = {"retention": "cache_control"}
_PARAMS_OF_CHAT = {**_PARAMS, "prompt": "messages"}
_PARAMS_OF_NEWER_CHAT = {**_PARAMS_OF_CHAT, "max_tokens": "max_completion_tokens"}


def _asked(body: ChatRequest | CompletionRequest) -> Generate:
    stop, options = body.stop, body.stream_options
    counts = options is not None and bool(options.continuous_usage_stats)
    if body.stream and body.prompt_logprobs is not None:
        raise RequestError(
            "prompt_logprobs: not served in streams; leave out stream", "prompt_logprobs"
        )
    if body.logprob_token_ids and (body.logprobs is None or body.logprobs is False):
        raise RequestError("logprob_token_ids: needs logprobs", "logprob_token_ids")
    return Generate(
        model=body.model,
        answers=body.n or 1,
        stream=bool(body.stream),
        max_tokens=body.max_tokens,
        min_tokens=body.min_tokens or 0,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        min_p=body.min_p,
        seed=body.seed,
        repetition_penalty=body.repetition_penalty,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        logit_bias=body.logit_bias or {},
        stop=(stop,) if isinstance(stop, str) else stop or (),
        stop_token_ids=body.stop_token_ids or (),
        ignore_eos=bool(body.ignore_eos),
        include_stop=bool(body.include_stop_str_in_output),
        skip_special_tokens=body.skip_special_tokens is not False,
        user=body.user,
        session_id=body.session_id,
        priority=body.priority,
        cache_salt=body.cache_salt,
        retention=_retention(body.cache_control),
        migration_limit=body.migration_limit,
        prompt_logprobs=body.prompt_logprobs,
        token_ids=bool(body.return_token_ids) or counts,
        keep_tokens=_keep_tokens(body),
        engine_options=_engine_options(body),
        constraint=constraint_of(body) if any(_constraints(body)) else None,
        params=_PARAMS,
    )


_constraints = attrgetter(*CONSTRAINT_FIELDS)

_ENGINE_OPTIONS = ("bad_words", "allowed_token_ids", "logprob_token_ids")
"""Fields that become ``engine_options`` of the same names: not every engine has them."""
_engine_fields = attrgetter(*_ENGINE_OPTIONS)


def _engine_options(body: GenerationRequest) -> Mapping[str, Any]:
    options = body.engine_options or {}
    given = _engine_fields(body)
    if not any(given):  # nearly always
        return options
    named = {name: list(one) for name, one in zip(_ENGINE_OPTIONS, given, strict=True) if one}
    for name in named.keys() & options.keys():
        raise RequestError(f"{name}: engine_options has it, too; remove one", name)
    return {**options, **named}


def _keep_tokens(body: GenerationRequest) -> int | None:
    keep = body.truncate_prompt_tokens
    if keep is None:
        if body.truncation_side is not None:
            raise RequestError("truncation_side: needs truncate_prompt_tokens", "truncation_side")
        return None
    if not keep:
        raise RequestError(
            "truncate_prompt_tokens: expected at least 1, or -1", "truncate_prompt_tokens"
        )
    keep = MAX_INT if keep < 0 else keep
    return -keep if body.truncation_side == "right" else keep


def conversation_of(body: ChatRequest | TokenizeRequest) -> Conversation:
    """What is to be rendered."""
    tools = _tools(body)
    choice = None
    if isinstance(body, ChatRequest):
        if tools:
            choice, tools = _choice(body, tools)
        elif body.tool_choice is not None and body.tool_choice[0] not in {"none", "auto"}:
            raise RequestError("tool_choice: there are no tools to choose from", "tool_choice")
    return Conversation(
        messages=[_message(number, message) for number, message in enumerate(body.messages or ())],
        tools=tools,
        tool_choice=choice,
        add_generation_prompt=body.add_generation_prompt is not False,
        continue_final_message=bool(body.continue_final_message),
        variables=_variables(body),
    )


def _variables(body: ChatRequest | TokenizeRequest) -> Mapping[str, Any] | None:
    """Those of the template, the effort of reasoning among them; "none" is not to think."""
    effort = body.reasoning_effort if isinstance(body, ChatRequest) else None
    documents = body.documents if isinstance(body, ChatRequest) else None
    if effort is None and not documents:
        return body.chat_template_kwargs
    # An effort asks models to think that would not by themselves.
    found = thinking_variables(effort, effort is not None or None)
    if documents:
        found["documents"] = list(documents)
    return found | {**(body.chat_template_kwargs or {})}


def _tools(body: ChatRequest | TokenizeRequest) -> list[Tool]:
    specs = body.tools
    if not specs:
        return []
    return specs.tools if isinstance(specs, ReadTools) else tools_of(specs)


def _choice(body: ChatRequest, tools: list[Tool]) -> tuple[ToolChoice, list[Tool]]:
    """What is to be called, and the tools that may be."""
    given: tuple[Literal["auto", "none", "required", "named"], tuple[str, ...]]
    given = body.tool_choice or ("auto", ())
    mode, names = given
    known = {tool.name for tool in tools}
    for name in names:
        if name not in known:
            problem = f"there is no tool {name[:100]!r} in tools"
            raise RequestError(f"tool_choice: {problem}", "tool_choice")
    parallel = body.parallel_tool_calls is not False
    if mode == "named":
        return ToolChoice(mode="named", name=names[0], parallel=parallel), tools
    if names:
        tools = [tool for tool in tools if tool.name in names]
    return ToolChoice(mode=mode, parallel=parallel), tools


def _message(number: int, message: ChatMessage) -> Message:
    """Remembered by the message, which may be one that came before. Not to be changed."""
    made: Message | None = vars(message).get(_MADE)
    if made is None:
        content = message.content
        thought = message.reasoning_content or message.reasoning
        more = thought or message.tool_calls or message.role == "tool" or message.refusal
        vars(message)[_MADE] = made = Message(
            role=message.role,
            content=content if isinstance(content, str) and not more else _parts(number, message),
            name=message.name,
            retention=_retention(message.cache_control),
        )
    return made


_MADE = "made of it"
"""No name of a field."""


def _parts(number: int, message: ChatMessage) -> Sequence[Part]:
    """Raises RequestError for what a message of its role needs, or must not have."""
    given = message.content
    where = f"messages[{number}]"
    if isinstance(given, str):
        texts = [Text(given)]
    else:
        texts = [_text(part, f"{where}.content[{place}]") for place, part in enumerate(given or ())]
    if message.role == "tool":
        if message.tool_call_id is None:
            raise RequestError(
                f"{where}.tool_call_id: required, the id of the call whose result this is",
                f"{where}.tool_call_id",
                "missing_required_parameter",
            )
        return [ToolResult(call_id=message.tool_call_id, parts=texts)]
    if message.role != "assistant":
        if message.tool_calls:
            raise RequestError(
                f"{where}.tool_calls: only an assistant calls tools", f"{where}.tool_calls"
            )
        if given is None:
            raise RequestError(
                f"{where}.content: required, but missing",
                f"{where}.content",
                "missing_required_parameter",
            )
        return texts
    if message.refusal:
        texts = [*(one for one in texts if one.text), Text(message.refusal)]
    thought = message.reasoning_content or message.reasoning
    calls = [
        ToolCall(id=one.id, name=one.function.name, arguments=one.function.arguments)
        for one in message.tool_calls or ()
    ]
    return [*([Reasoning(thought)] if thought else ()), *texts, *calls]


def _text(part: TextPart, where: str) -> Text:
    text = part.text if part.type == "text" else part.refusal
    if text is None:
        where = f"{where}.{part.type}"
        raise RequestError(f"{where}: required, but missing", where, "missing_required_parameter")
    return Text(text, _retention(part.cache_control))


def _retention(mark: CacheControl | None) -> KvRetention | None:
    return None if mark is None else retention_of(mark)


def _check_stream_options(body: GenerationRequest) -> None:
    if body.stream_options is not None and not body.stream:
        raise RequestError("stream_options: only allowed when stream is true", "stream_options")


def parse_body(cls: type[T], body: bytes, *, strict: bool = False) -> T:
    """``body`` as ``cls``. Raises RequestError: ``param`` is the first field that is wrong."""
    try:
        return _parse_quickly(cls, strict, body)[0]
    except _WrongSomewhereError:
        return _parse_thoroughly(cls, strict, body)[0]


def _parse_quickly(cls: type[T], strict: bool, body: bytes) -> tuple[T, tuple[str, ...]]:
    return _structure_quickly(cls, strict, parse_object(body))


def _structure_quickly(
    cls: type[T], strict: bool, data: dict[str, Any]
) -> tuple[T, tuple[str, ...]]:
    try:
        return _fast.structure(data, cls), ()
    except Exception as error:  # often for what can be set aside
        leftovers = set_aside(data, cls, strict=strict)
        if leftovers.refused or not leftovers.changed:
            raise _WrongSomewhereError from error
    try:
        return _fast.structure(data, cls), leftovers.ignored
    except Exception as error:
        raise _WrongSomewhereError from error


def _parse_thoroughly(cls: type[T], strict: bool, body: bytes) -> tuple[T, tuple[str, ...]]:
    data = parse_object(body)
    leftovers = set_aside(data, cls, strict=strict)
    problems = [*leftovers.refused]
    try:
        read = structure(_thorough, data, cls)
        if not problems:
            return read, leftovers.ignored
    except StructureError as error:
        problems += error.problems
    shown = [_line(path, text) for path, text in problems[:_SHOWN_PROBLEMS]]
    if len(problems) > _SHOWN_PROBLEMS:
        shown.append(f"and {len(problems) - _SHOWN_PROBLEMS} more")
    # The engine may serve what this front door does not, and judge its messages by itself. What is
    # wrong or unknown beside them is refused here, whatever the engine would say.
    refused = (p for p in problems if not _may_be_served_by_the_engine(*p))
    not_served = (p for p in problems if _code(p[1]) == NOT_SERVED)
    path, text = next(refused, None) or next(not_served, problems[0])
    raise RequestError("; ".join(shown), _shorten(path) or None, _code(text)) from None


def _may_be_served_by_the_engine(path: str, text: str) -> bool:
    return path.startswith(("messages", "prompt")) or _code(text) == NOT_SERVED


_ELSEWHERE = {"messages": "/v1/chat/completions", "prompt": "/v1/completions"}
"""Where the keys belong that people send to the wrong path."""


def _line(path: str, text: str) -> str:
    if text.startswith("unknown key;") and path in _ELSEWHERE:
        text = f"unknown key; requests with it go to {_ELSEWHERE[path]}"
    return _shorten(f"{path}: {text}" if path else text)


def _code(text: str) -> str:
    by_beginning: dict[str, Any] = {
        "unknown key": "unknown_parameter",
        "required": "missing_required_parameter",
        "not supported": NOT_SERVED,
        "not allowed": "not_allowed",
    }
    found = (code for beginning, code in by_beginning.items() if text.startswith(beginning))
    return next(found, "invalid_value")


def _shorten(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARACTERS else text[: _SHOWN_CHARACTERS - 1] + "…"
