"""From what is asked to a ``Plan``: one engine request for each answer that the client wants."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from attrs import define, evolve

from commutator.auth.rights import allowed_priority, check_answers, require, salted
from commutator.contract.conversation import Conversation, Generate, Message, Text, ToolResult
from commutator.contract.parser import AnswerParser, ForcedCalls, Parser
from commutator.contract.principal import Principal
from commutator.contract.request import (
    AdapterIdentity,
    Caller,
    GenerateRequest,
    KvRetention,
    SamplingParams,
)
from commutator.errors import RequestError
from commutator.frontend.request.conversation import (
    NOT_SERVED,
    characters_of,
    check_template,
    check_tools,
    messages_of,
    offered_tools,
)
from commutator.frontend.request.generation import ChoiceRules, Plan
from commutator.frontend.request.preprocessor import Preprocessor, size_of
from commutator.tokenizer.control_tokens import RenderedPrompt
from commutator.tokenizer.prompt_cache import PromptTokens
from commutator.tokenizer.text_model import TextModel

_PROMPT_END = 256
"""Characters of the rendered prompt that tell a parser how the answer begins."""
_MAX_ANSWERS = 256
_MAX_MARKS = 4
_COMPLETION_MAX_TOKENS = 16
_MAX_STOP_CHARACTERS = 512
_MAX_ECHOED_CHARACTERS = 4 << 20
_MAX_CONSTRAINT_CHARACTERS = 128 << 10
_MAX_VARIABLES = 64
_SHOWN_KEYS = 8
_MAX_VARIABLES_CHARACTERS = 256 << 10


@define(kw_only=True)  # made for each request, and a frozen class takes twice as long to fill
class Target:
    """What a plan needs beside what is asked."""

    model: str
    text: TextModel
    adapter: AdapterIdentity | None
    prompts: Preprocessor
    parser: Parser | None
    """Reads the model's answers; None: they are text."""
    max_model_len: int
    """Longest prompt plus answer in tokens."""
    principal: Principal
    request_id: str
    caller: Caller


async def make_plan(asked: Generate, target: Target) -> Plan:
    """Raises RequestError when what is asked cannot be served as it stands."""
    salt = salted(target.principal, asked.cache_salt)
    if asked.conversation is None:
        return await _plan_prompts(asked, target, salt)
    conversations = [asked.conversation, *asked.further]
    _check_answers(asked.answers, len(conversations))
    check_answers(target.principal, asked.answers * len(conversations))
    plans = [await _plan_conversation(asked, one, target, salt) for one in conversations]
    return plans[0] if len(plans) == 1 else _joined(plans, target.request_id)


def _joined(plans: Sequence[Plan], request_id: str) -> Plan:
    """The plans of several conversations as one."""
    makers = iter([plan.parser for plan in plans for _ in plan.requests])

    def parser() -> AnswerParser | None:
        make = next(makers)
        return None if make is None else make()

    requests = [request for plan in plans for request in plan.requests]
    return evolve(
        plans[0],
        requests=tuple(
            evolve(request, request_id=_own_id(request_id, number, len(requests)))
            for number, request in enumerate(requests)
        ),
        sequence_hashes=tuple(hashes for plan in plans for hashes in plan.sequence_hashes),
        prompt_tokens=sum(plan.prompt_tokens for plan in plans),
        parser=parser,
    )


async def _plan_conversation(
    asked: Generate, conversation: Conversation, target: Target, salt: str | None
) -> Plan:
    limit = None if asked.keep_tokens else target.max_model_len
    check_tools(conversation, target.prompts.template, target.parser)
    rendered = await _rendered(target.prompts, conversation, limit)
    forced = _forced_calls(target.parser, conversation, rendered.text)
    offered, mode, choice = offered_tools(conversation), None, conversation.tool_choice
    if forced is not None and choice is not None:  # there is no text for another constraint
        asked, mode = evolve(asked, constraint=forced.constraint), choice.mode
    elif target.parser and any(one.strict or asked.constraint for one in offered):
        mode = None if asked.constraint else "auto"
        asked = evolve(asked, constraint=target.parser.strict(conversation, asked.constraint))
    _check_constraint(asked, "response_format" if mode is None else "tools")
    opening = "" if forced is None else forced.opening
    prompt = await target.prompts.encode(
        rendered.followed_by(opening), salt=salt, add_special_tokens=False, max_tokens=limit
    )
    read, thinks_until = _answer_parser(target.parser, conversation, rendered.text)
    if asked.constraint is not None and thinks_until is not None:
        after = tuple(target.text.encode(thinks_until, add_special_tokens=False))
        asked = evolve(asked, constraint=evolve(asked.constraint, after=after))
    plan = evolve(_plan(asked, target, salt, [prompt], read), forced=mode)
    marked = _marked(conversation)
    if not marked:
        return plan
    kept = await _marked_prefixes(target, conversation, marked, salt, prompt)
    requests = (evolve(each, retention=each.retention + kept) for each in plan.requests)
    return evolve(plan, requests=tuple(requests))


async def _plan_prompts(asked: Generate, target: Target, salt: str | None) -> Plan:
    _check_constraint(asked, "response_format")
    _check_answers(asked.answers, len(asked.prompts))
    limit = None if asked.keep_tokens else target.max_model_len
    check_answers(target.principal, asked.answers * len(asked.prompts))
    prompts = await target.prompts.completion(asked.prompts, salt=salt, max_tokens=limit)
    plan = _plan(asked, target, salt, prompts)
    if not asked.echo:
        return plan
    texts = [
        given
        if isinstance(given, str) and not asked.keep_tokens
        else await target.prompts.decode(request.token_ids)
        for given, request in zip(asked.prompts, plan.requests[:: asked.answers], strict=True)
    ]
    characters = asked.answers * sum(map(len, texts))
    if characters > _MAX_ECHOED_CHARACTERS:
        raise RequestError(
            f"echo: expected at most {_MAX_ECHOED_CHARACTERS} characters in all answers, "
            f"got {characters}",
            "echo",
        )
    return evolve(plan, echoes=tuple(text for text in texts for _ in range(asked.answers)))


def _forced_calls(
    parser: Parser | None, conversation: Conversation, rendered: str
) -> ForcedCalls | None:
    """How the model is made to call tools; None: it is not."""
    choice = conversation.tool_choice
    if parser is None or choice is None or choice.mode not in {"required", "named"}:
        return None
    return parser.forced(conversation, rendered[-_PROMPT_END:])


def _check_constraint(asked: Generate, param: str) -> None:
    """Raises RequestError for one that takes engines too long to compile."""
    value = "" if asked.constraint is None else asked.constraint.value
    size = len(value) if isinstance(value, str) else sum(map(len, value))
    if size > _MAX_CONSTRAINT_CHARACTERS:
        raise RequestError(
            f"{param}: what the answer follows has {size} characters, and at most "
            f"{_MAX_CONSTRAINT_CHARACTERS} are served",
            param,
        )


def _answer_parser(
    parser: Parser | None, conversation: Conversation, rendered: str
) -> tuple[Callable[[], AnswerParser] | None, str | None]:
    """(what makes the reader of each answer, what ends the thoughts in which answers begin).

    The former is None where answers are nothing but text.
    """
    if parser is None:
        return None, None
    made: list[AnswerParser] = []
    end = rendered[-_PROMPT_END:]

    def make() -> AnswerParser:
        one = made.pop() if made else parser.answer(conversation, end)
        assert one is not None  # as the first one was none
        return one

    first = parser.answer(conversation, end)
    if first is None:
        return None, None
    made.append(first)
    return make, first.thinks_until


def _plan(
    asked: Generate,
    target: Target,
    salt: str | None,
    prompts: Sequence[PromptTokens],
    parser: Callable[[], AnswerParser] | None = None,
) -> Plan:
    answers = asked.answers
    rules = _choice_rules(asked, target.text)
    check_answers(target.principal, answers * len(prompts))
    if asked.retention not in {None, KvRetention()}:
        require(target.principal, "pin", "retention")
    retention = () if asked.retention is None else (asked.retention,)
    priority = allowed_priority(target.principal, asked.priority)
    constraint = asked.constraint
    if constraint is not None and constraint.kind == "structural_tag":
        value = target.text.with_added_tokens(str(constraint.value))
        constraint = evolve(constraint, value=value)
    requests: list[GenerateRequest] = []
    prompt_tokens = 0
    for prompt in (_kept(prompt, asked.keep_tokens) for prompt in prompts):
        tokens = len(prompt.token_ids)
        prompt_tokens += tokens
        max_tokens = _max_tokens(asked, tokens, target)
        sampling = _sampling_params(asked, rules, target.text, max_tokens)
        if parser is not None and rules.stop:  # stop strings end the text, and nothing else
            sampling = evolve(sampling, stop=())
        for answer in range(answers):
            number = len(requests)
            requests.append(
                GenerateRequest(
                    request_id=_own_id(target.request_id, number, answers * len(prompts)),
                    token_ids=prompt.token_ids,
                    sampling=_with_own_seed(sampling, answer),
                    adapter=target.adapter,
                    cache_salt=salt,
                    priority=priority,
                    retention=retention,
                    session=target.caller.session_id or None,
                    constraint=constraint,
                    prompt_logprobs=asked.prompt_logprobs,
                    options=asked.engine_options,
                )
            )
    hashes = tuple(
        None if asked.keep_tokens or target.adapter else prompt.sequence_hashes
        for prompt in prompts
        for _ in range(answers)
    )
    return Plan(
        target.model,
        target.text,
        tuple(requests),
        hashes,
        prompt_tokens,
        rules,
        answers,
        caller=target.caller,
        migration_limit=asked.migration_limit,
        parser=parser,
    )


def _kept(prompt: PromptTokens, keep: int | None) -> PromptTokens:
    if keep is None or len(prompt.token_ids) <= abs(keep):
        return prompt
    tokens = prompt.token_ids[-keep:] if keep > 0 else prompt.token_ids[:-keep]
    return PromptTokens(tokens, None, 0)


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


async def conversation_prompt(
    prompts: Preprocessor,
    conversation: Conversation,
    salt: str | None,
    max_tokens: int | None = None,
    *,
    add_special_tokens: bool = False,
) -> PromptTokens:
    """The rendered conversation, tokenized with the help of prompts of the same salt.

    Raises RequestError, also for one that is certainly longer than ``max_tokens``.
    """
    rendered = await _rendered(prompts, conversation, max_tokens)
    return await prompts.encode(
        rendered, salt=salt, add_special_tokens=add_special_tokens, max_tokens=max_tokens
    )


async def _rendered(
    prompts: Preprocessor, conversation: Conversation, max_tokens: int | None
) -> RenderedPrompt:
    continues = conversation.continue_final_message
    if continues and conversation.add_generation_prompt:
        raise RequestError(
            "continue_final_message: needs add_generation_prompt to be false",
            "continue_final_message",
        )
    if conversation.reasoning:
        raise RequestError("reasoning: not served by these engines", "reasoning", NOT_SERVED)
    check_template(conversation, prompts.template)
    variables = conversation.variables
    if variables:
        _check_variables(variables)
    if tools := offered_tools(conversation):
        variables = {**(variables or {}), "tools": [tool.described for tool in tools]}
    return await prompts.render(
        messages_of(conversation.messages, prompts.template),
        sum(map(characters_of, conversation.messages)),
        max_tokens=max_tokens,
        add_generation_prompt=conversation.add_generation_prompt,
        continue_final_message=continues,
        variables=variables,
    )


def _check_variables(variables: Mapping[str, Any]) -> None:
    if len(variables) > _MAX_VARIABLES or size_of(variables) > _MAX_VARIABLES_CHARACTERS:
        raise RequestError(
            f"chat_template_kwargs: expected at most {_MAX_VARIABLES} variables of "
            f"{_MAX_VARIABLES_CHARACTERS} characters together",
            "chat_template_kwargs",
        )


_NOBODYS = "\N{OBJECT REPLACEMENT CHARACTER}"
"""What no user says first."""
_Marked = list[tuple[int, list[KvRetention]]]
"""(number of messages up to one that is marked, its marks)"""


def _marked(conversation: Conversation) -> _Marked:
    messages = enumerate(conversation.messages, 1)
    return [(number, marks) for number, one in messages if (marks := _marks(one))]


async def _marked_prefixes(
    target: Target,
    conversation: Conversation,
    marked: _Marked,
    salt: str | None,
    prompt: PromptTokens,
) -> tuple[KvRetention, ...]:
    """The retentions of messages, each for the prompt tokens up to the end of its message.

    That is as far as the prompt agrees with one that ends there: templates may look ahead. The
    last message ends with the prompt. Marks that ask for nothing need no permission.
    """
    count = sum(len(marks) for _, marks in marked)
    if count > _MAX_MARKS:  # each message with marks is rendered and tokenized once more
        raise RequestError(
            f"messages: expected at most {_MAX_MARKS} cache_control marks, got {count}", "messages"
        )
    if any(mark != KvRetention() for _, marks in marked for mark in marks):
        require(target.principal, "pin", "messages")
    found: list[KvRetention] = []
    for number, marks in marked:
        messages = conversation.messages[:number]
        if number == len(conversation.messages):
            found += marks
            continue
        if all(message.role == "system" for message in messages):  # which some templates refuse
            messages = [*messages, Message(role="user", content=_NOBODYS)]
        until = evolve(
            conversation,
            messages=messages,
            add_generation_prompt=False,
            continue_final_message=False,
        )
        ending = await conversation_prompt(target.prompts, until, salt, target.max_model_len)
        agreed = _agreement(ending.token_ids, prompt.token_ids)
        found += [evolve(mark, tokens=agreed) for mark in marks]
    return tuple(found)


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


def _marks(message: Message) -> list[KvRetention]:
    given = [] if message.retention is None else [message.retention]
    for part in () if isinstance(message.content, str) else message.content:
        texts = part.parts if isinstance(part, ToolResult) else (part,)
        given += [one.retention for one in texts if isinstance(one, Text) and one.retention]
    return given


def _max_tokens(asked: Generate, prompt_tokens: int, target: Target) -> int:
    """The longest answer allowed. Raises RequestError with both lengths when it cannot fit."""
    max_model_len = target.max_model_len
    left, own = max_model_len - prompt_tokens, target.text.max_model_len
    is_chat = asked.conversation is not None
    if left < 1:
        limited = f" (of {own}: memory or an option limits it here)" if own > max_model_len else ""
        raise RequestError(
            f"this model's context is {max_model_len} tokens{limited} and the prompt has "
            f"{prompt_tokens}: no room is left for an answer; shorten the prompt",
            "messages" if is_chat else "prompt",
            "context_length_exceeded",
        )
    if asked.max_tokens == 0:
        return 1  # an engine answers with one token at least; it is not shown
    if asked.max_tokens is None:
        most = target.text.defaults.max_tokens if is_chat else _COMPLETION_MAX_TOKENS
        return left if most is None else min(left, max(most, asked.min_tokens))
    if asked.max_tokens > left and is_chat:
        return left  # clients of agents always ask for more than there is; `answer` says so
    if asked.max_tokens > left:
        raise RequestError(
            f"max_tokens: this model's context is {max_model_len} tokens; the prompt has "
            f"{prompt_tokens} and {asked.max_tokens} more are asked for",
            "max_tokens",
            "context_length_exceeded",
        )
    return asked.max_tokens


def _choice_rules(asked: Generate, model: TextModel) -> ChoiceRules:
    """When and how the front door itself ends an answer. Raises RequestError."""
    for string in asked.stop:
        if not string or len(string) > _MAX_STOP_CHARACTERS:
            raise RequestError(
                f"stop: expected strings of 1 to {_MAX_STOP_CHARACTERS} characters, "
                f"got one of {len(string)}",
                "stop",
            )
    return ChoiceRules(
        stop=tuple(asked.stop),
        end_ids=model.eos_ids.union(asked.stop_token_ids)
        if asked.stop_token_ids
        else model.eos_ids,
        stop_ids=frozenset(asked.stop_token_ids),
        include_stop=asked.include_stop,
        skip_special_tokens=asked.skip_special_tokens,
        min_tokens=asked.min_tokens,
        token_ids=asked.token_ids,
        no_answer=asked.max_tokens == 0,
    )


def _sampling_params(
    asked: Generate, rules: ChoiceRules, model: TextModel, max_tokens: int
) -> SamplingParams:
    """The engine's part. Raises RequestError."""
    if rules.min_tokens > max_tokens:
        raise RequestError(
            f"min_tokens: expected at most {max_tokens}, the longest answer allowed, "
            f"got {rules.min_tokens}",
            "min_tokens",
        )
    # The model's files may name more ends than the engine knows.
    ends = frozenset(asked.stop_token_ids) if asked.ignore_eos else rules.end_ids
    usual = model.defaults
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=rules.min_tokens,
        temperature=usual.temperature if asked.temperature is None else asked.temperature,
        top_p=usual.top_p if asked.top_p is None else asked.top_p,
        top_k=usual.top_k if asked.top_k is None else max(0, asked.top_k),
        min_p=usual.min_p if asked.min_p is None else asked.min_p,
        seed=asked.seed,
        repetition_penalty=usual.repetition_penalty
        if asked.repetition_penalty is None
        else asked.repetition_penalty,
        presence_penalty=asked.presence_penalty or 0.0,
        frequency_penalty=asked.frequency_penalty or 0.0,
        logit_bias=_logit_bias(asked.logit_bias, model.vocab_size) if asked.logit_bias else {},
        top_logprobs=asked.top_logprobs,
        stop=rules.stop,
        stop_token_ids=_in_order(ends),
        ignore_eos=asked.ignore_eos,
    )


@lru_cache
def _in_order(ids: frozenset[int]) -> tuple[int, ...]:
    """Remembered, since nearly all requests have those of their model."""
    return tuple(sorted(ids))


def _logit_bias(biases: Mapping[str, float], vocab_size: int) -> dict[int, float]:
    ids = {
        key: int(key) if key.isascii() and key.isdigit() and len(key) < 10 else vocab_size  # noqa: PLR2004
        for key in biases
    }
    if wrong := [key[:40] for key, token_id in ids.items() if token_id >= vocab_size]:
        raise RequestError(
            f"logit_bias: expected token ids below {vocab_size} as keys, got "
            f"{', '.join(map(repr, wrong[:_SHOWN_KEYS]))}",
            "logit_bias",
        )
    return {ids[key]: bias for key, bias in biases.items()}
