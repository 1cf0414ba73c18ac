"""From a request to a ``Plan``: one engine request for each answer that the client wants."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from attrs import define, evolve

from commutator import GenerateRequest, SamplingParams
from commutator.contract.principal import Principal
from commutator.contract.request import Caller
from commutator.errors import RequestError
from commutator.frontend import (
    ChoiceRules,
    Plan,
    Preprocessor,
    allowed_priority,
    check_answers,
    require,
    salted,
    size_of,
)
from commutator.tokenizer import PromptTokens, TextModel
from commutator_openai.protocol.fields import CacheControl, retention_of
from commutator_openai.protocol.requests import (
    ChatMessage,
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    TokenizeRequest,
)

__all__ = [
    "Target",
    "chat_prompt",
    "plan_chat",
    "plan_completion",
]

_MAX_ANSWERS = 256
_MAX_MARKS = 4
_COMPLETION_MAX_TOKENS = 16
_MAX_STOP_CHARACTERS = 512
_MAX_ECHOED_CHARACTERS = 4 << 20
_MAX_VARIABLES = 64
_MAX_VARIABLES_CHARACTERS = 256 << 10


@define(kw_only=True)  # made for each request, and a frozen class takes twice as long to fill
class Target:
    """What a plan needs beside the request's body."""

    model: str
    """The name that clients give."""
    text: TextModel
    prompts: Preprocessor
    max_model_len: int
    """Longest prompt plus answer in tokens."""
    principal: Principal
    request_id: str
    caller: Caller


async def plan_chat(request: ChatRequest, target: Target) -> Plan:
    """Raises RequestError when the request cannot be served as it stands."""
    _check_stream_options(request)
    salt = salted(target.principal, request.cache_salt)
    prompt = await chat_prompt(target.prompts, request, salt, target.max_model_len)
    plan = _plan(request, target, salt, [prompt])
    marks = await _marked_prefixes(target, request, salt, prompt)
    if not marks:
        return plan
    kept = retention_of(marks)
    requests = (evolve(each, retention=each.retention + kept) for each in plan.requests)
    return evolve(plan, requests=tuple(requests))


async def plan_completion(request: CompletionRequest, target: Target) -> Plan:
    """Raises RequestError when the request cannot be served as it stands."""
    _check_stream_options(request)
    answers = request.n or 1
    if request.best_of is not None and request.best_of != answers:
        raise RequestError(
            f"best_of is not supported. Remove it, or set it to n ({answers}).",
            "best_of",
            "unsupported_parameter",
        )
    if request.echo and request.logprobs is not None:
        raise RequestError(
            "echo is not supported together with logprobs, as logprobs of a prompt are not "
            "computed. Remove one of them.",
            "echo",
            "unsupported_parameter",
        )
    _check_answers(answers, len(request.prompt))
    limit = target.max_model_len
    check_answers(target.principal, answers * len(request.prompt))
    salt = salted(target.principal, request.cache_salt)
    prompts = await target.prompts.completion(request.prompt, salt=salt, max_tokens=limit)
    plan = _plan(request, target, salt, prompts)
    if not request.echo:
        return plan
    texts = [
        given if isinstance(given, str) else await target.prompts.decode(given)
        for given in request.prompt
    ]
    characters = answers * sum(map(len, texts))
    if characters > _MAX_ECHOED_CHARACTERS:
        raise RequestError(
            f"echo: expected at most {_MAX_ECHOED_CHARACTERS} characters in all answers, "
            f"got {characters}",
            "echo",
        )
    return evolve(plan, echoes=tuple(text for text in texts for _ in range(answers)))


def _plan(
    request: GenerationRequest, target: Target, salt: str | None, prompts: Sequence[PromptTokens]
) -> Plan:
    answers = request.n or 1
    rules = _choice_rules(request, target.text)
    check_answers(target.principal, answers * len(prompts))
    if request.cache_control is not None:
        require(target.principal, "pin", "cache_control")
    retention = retention_of([(request.cache_control, None)])
    priority = allowed_priority(target.principal, request.priority)
    requests: list[GenerateRequest] = []
    prompt_tokens = 0
    for prompt in prompts:
        tokens = len(prompt.token_ids)
        prompt_tokens += tokens
        max_tokens = _max_tokens(request, tokens, target.max_model_len)
        sampling = _sampling_params(request, rules, target.text, max_tokens)
        for answer in range(answers):
            number = len(requests)
            requests.append(
                GenerateRequest(
                    request_id=_own_id(target.request_id, number, answers * len(prompts)),
                    token_ids=prompt.token_ids,
                    sampling=_with_own_seed(sampling, answer),
                    cache_salt=salt,
                    priority=priority,
                    retention=retention,
                    options=request.engine_options or {},
                )
            )
    hashes = tuple(prompt.sequence_hashes for prompt in prompts for _ in range(answers))
    return Plan(
        target.model,
        target.text,
        tuple(requests),
        hashes,
        prompt_tokens,
        rules,
        answers,
        caller=target.caller,
        migration_limit=request.migration_limit,
    )


def _check_answers(answers: int, prompts: int) -> None:
    if answers * prompts > _MAX_ANSWERS:
        raise RequestError(
            f"n: expected at most {_MAX_ANSWERS} answers, "
            f"got {prompts} prompts with {answers} each",
            "n",
        )


def _own_id(request_id: str, number: int, count: int) -> str:
    return request_id if count == 1 else f"{request_id}-{number}"


def _with_own_seed(sampling: SamplingParams, answer: int) -> SamplingParams:
    if sampling.seed is None or not answer:
        return sampling
    seed = (sampling.seed + answer + 2**63) % 2**64 - 2**63  # stays a signed 64-bit number
    return evolve(sampling, seed=seed)


def _check_stream_options(request: GenerationRequest) -> None:
    if request.stream_options is not None and not request.stream:
        raise RequestError("stream_options: only allowed when stream is true", "stream_options")


async def chat_prompt(
    prompts: Preprocessor,
    request: ChatRequest | TokenizeRequest,
    salt: str | None,
    max_tokens: int | None = None,
) -> PromptTokens:
    """The rendered conversation, tokenized with the help of prompts of the same salt.

    Raises RequestError, also for one that is certainly longer than ``max_tokens``.
    """
    continues = bool(request.continue_final_message)
    if continues and request.add_generation_prompt is not False:
        raise RequestError(
            "continue_final_message: needs add_generation_prompt to be false",
            "continue_final_message",
        )
    if request.chat_template_kwargs:
        _check_variables(request.chat_template_kwargs)
    special = isinstance(request, TokenizeRequest) and bool(request.add_special_tokens)
    return await prompts.chat(
        [_as_mapping(message) for message in request.messages or ()],
        max_tokens=max_tokens,
        add_special_tokens=special,
        salt=salt,
        add_generation_prompt=request.add_generation_prompt is not False,
        continue_final_message=continues,
        variables=request.chat_template_kwargs,
    )


def _check_variables(variables: Mapping[str, Any]) -> None:
    if len(variables) > _MAX_VARIABLES or size_of(variables) > _MAX_VARIABLES_CHARACTERS:
        raise RequestError(
            f"chat_template_kwargs: expected at most {_MAX_VARIABLES} variables of "
            f"{_MAX_VARIABLES_CHARACTERS} characters together",
            "chat_template_kwargs",
        )


async def _marked_prefixes(
    target: Target, request: ChatRequest, salt: str | None, prompt: PromptTokens
) -> list[tuple[CacheControl, int]]:
    """The messages' marks, each with the number of prompt tokens up to the end of its message.

    That is as far as the prompt agrees with one that ends there: templates may look ahead.
    """
    marked = [(number, _marks(message)) for number, message in enumerate(request.messages, 1)]
    marked = [(number, marks) for number, marks in marked if marks]
    if not marked:
        return []
    count = sum(len(marks) for _, marks in marked)
    if count > _MAX_MARKS:  # each message with marks is rendered and tokenized once more
        raise RequestError(
            f"messages: expected at most {_MAX_MARKS} cache_control marks, got {count}", "messages"
        )
    require(target.principal, "pin", "messages")
    found: list[tuple[CacheControl, int]] = []
    for number, marks in marked:
        until = evolve(
            request,
            messages=request.messages[:number],
            add_generation_prompt=False,
            continue_final_message=False,
        )
        ending = await chat_prompt(target.prompts, until, salt, target.max_model_len)
        agreed = _agreement(ending.token_ids, prompt.token_ids)
        found += [(mark, agreed) for mark in marks]
    return found


def _agreement(one: Sequence[int], other: Sequence[int]) -> int:
    """The number of tokens with which both begin."""
    agreed, differs = 0, min(len(one), len(other)) + 1
    while differs - agreed > 1:  # comparing slices is fifty times quicker than token by token
        middle = (agreed + differs) // 2
        if one[agreed:middle] == other[agreed:middle]:
            agreed = middle
        else:
            differs = middle
    return agreed


def _marks(message: ChatMessage) -> list[CacheControl]:
    given = [message.cache_control]
    if not isinstance(message.content, str):
        given += [part.cache_control for part in message.content]
    return [mark for mark in given if mark is not None]


def _as_mapping(message: ChatMessage) -> dict[str, Any]:
    content = message.content
    if not isinstance(content, str):
        content = "\n".join(part.text for part in content)
    name = {} if message.name is None else {"name": message.name}
    return {"role": message.role, "content": content, **name}


def _max_tokens(request: GenerationRequest, prompt_tokens: int, max_model_len: int) -> int:
    """The longest answer allowed. Raises RequestError with both lengths when it cannot fit."""
    left = max_model_len - prompt_tokens
    is_chat = isinstance(request, ChatRequest)
    if left < 1:
        raise RequestError(
            f"this model's context is {max_model_len} tokens and the prompt has {prompt_tokens}: "
            "no room is left for an answer; shorten the prompt",
            "messages" if is_chat else "prompt",
            "context_length_exceeded",
        )
    asked, param = request.max_tokens, "max_tokens"
    if isinstance(request, ChatRequest) and request.max_completion_tokens is not None:
        asked, param = request.max_completion_tokens, "max_completion_tokens"
    if asked is None:
        return left if is_chat else min(left, _COMPLETION_MAX_TOKENS)
    if asked > left:
        raise RequestError(
            f"this model's context is {max_model_len} tokens; the prompt has {prompt_tokens} and "
            f"{param} asks for {asked} more",
            param,
            "context_length_exceeded",
        )
    return asked


def _choice_rules(request: GenerationRequest, model: TextModel) -> ChoiceRules:
    """When and how the frontend itself ends an answer. Raises RequestError."""
    return ChoiceRules(
        stop=_stop_strings(request),
        end_ids=model.eos_ids | frozenset(request.stop_token_ids or ()),
        include_stop=bool(request.include_stop_str_in_output),
        skip_special_tokens=request.skip_special_tokens is not False,
        min_tokens=request.min_tokens or 0,
    )


def _sampling_params(
    request: GenerationRequest, rules: ChoiceRules, model: TextModel, max_tokens: int
) -> SamplingParams:
    """The engine's part. Raises RequestError."""
    if rules.min_tokens > max_tokens:
        raise RequestError(
            f"min_tokens: expected at most {max_tokens}, the longest answer allowed, "
            f"got {rules.min_tokens}",
            "min_tokens",
        )
    # The model's files may name more ends than the engine knows.
    ends = () if request.ignore_eos else model.eos_ids
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=rules.min_tokens,
        temperature=_or(request.temperature, 1.0),
        top_p=_or(request.top_p, 1.0),
        top_k=max(0, request.top_k or 0),
        min_p=_or(request.min_p, 0.0),
        seed=request.seed,
        repetition_penalty=_or(request.repetition_penalty, 1.0),
        presence_penalty=_or(request.presence_penalty, 0.0),
        frequency_penalty=_or(request.frequency_penalty, 0.0),
        logit_bias=_logit_bias(request.logit_bias or {}, model.vocab_size),
        top_logprobs=_top_logprobs(request),
        stop=rules.stop,
        stop_token_ids=tuple(sorted({*ends, *(request.stop_token_ids or ())})),
        ignore_eos=bool(request.ignore_eos),
    )


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


def _stop_strings(request: GenerationRequest) -> tuple[str, ...]:
    stop = request.stop
    strings = (stop,) if isinstance(stop, str) else stop or ()
    for string in strings:
        if not string or len(string) > _MAX_STOP_CHARACTERS:
            raise RequestError(
                f"stop: expected strings of 1 to {_MAX_STOP_CHARACTERS} characters, "
                f"got one of {len(string)}",
                "stop",
            )
    return strings


def _logit_bias(biases: Mapping[str, float], vocab_size: int) -> dict[int, float]:
    by_id = {}
    for key, bias in biases.items():
        token_id = int(key) if key.isascii() and key.isdigit() and len(key) < 10 else -1  # noqa: PLR2004
        if not 0 <= token_id < vocab_size:
            raise RequestError(
                f"logit_bias: expected token ids below {vocab_size} as keys, got {key[:40]!r}",
                "logit_bias",
            )
        by_id[token_id] = bias
    return by_id


def _top_logprobs(request: GenerationRequest) -> int | None:
    if isinstance(request, CompletionRequest):
        return request.logprobs
    assert isinstance(request, ChatRequest)
    if request.logprobs:
        return request.top_logprobs or 0
    if request.top_logprobs:
        raise RequestError("top_logprobs: needs logprobs to be true", "top_logprobs")
    return None
