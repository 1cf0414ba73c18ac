"""A request ready to be sent: one engine request for each answer that the client wants."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import evolve, frozen

from commutator.errors import RequestError
from commutator.frontend.choice import ChoiceRules
from commutator.frontend.prompts import chat_prompt, completion_prompts, marked_prefixes
from commutator.frontend.requests import ChatRequest, CompletionRequest, GenerationRequest
from commutator.frontend.retention import retention_of
from commutator.frontend.sampling import choice_rules, max_tokens_of, sampling_params
from commutator.text.model import TextModel
from commutator.text.prefix_cache import PrefixCache, PromptTokens
from commutator.types import GenerateRequest, SamplingParams

__all__ = ["Plan", "plan_chat", "plan_completion"]

_MAX_ANSWERS = 256


@frozen
class Plan:
    """What to ask of the engines, and how to read what they say."""

    model: str
    text: TextModel
    requests: tuple[GenerateRequest, ...]
    """One for each answer; the answers to one prompt stand together."""
    sequence_hashes: tuple[Sequence[int] | None, ...]
    """For each answer those of its prompt's blocks, where they are known."""
    rules: ChoiceRules
    answers_per_prompt: int
    echoes: tuple[str, ...] | None = None
    """For each answer the prompt to begin it with."""
    session_id: str | None = None
    migration_limit: int | None = None
    """How often an answer may change its worker, if the client says so."""

    @property
    def prompt_tokens(self) -> int:
        """Each prompt counts once."""
        return sum(len(r.token_ids) for r in self.requests[:: self.answers_per_prompt])


async def plan_chat(
    request: ChatRequest,
    model: str,
    text: TextModel,
    cache: PrefixCache,
    max_model_len: int,
    request_id: str,
) -> Plan:
    """Raises RequestError when the request cannot be served as it is."""
    _check_stream_options(request)
    prompts = [await chat_prompt(text, cache, request)]
    session_id = request.session_id or request.prompt_cache_key
    plan = _plan(request, model, text, prompts, max_model_len, request_id, session_id)
    marks = await marked_prefixes(text, cache, request, prompts[0])
    if not marks:
        return plan
    kept = retention_of(marks)
    requests = (evolve(each, retention=each.retention + kept) for each in plan.requests)
    return evolve(plan, requests=tuple(requests))


async def plan_completion(
    request: CompletionRequest,
    model: str,
    text: TextModel,
    cache: PrefixCache,
    max_model_len: int,
    request_id: str,
) -> Plan:
    """Raises RequestError when the request cannot be served as it is."""
    _check_stream_options(request)
    answers = request.n or 1
    if request.best_of is not None and request.best_of != answers:
        raise RequestError(
            f"best_of: not supported; leave it out, or give the same number as n ({answers})",
            "best_of",
            "unsupported_parameter",
        )
    if request.echo and request.logprobs is not None:
        raise RequestError(
            "echo: not supported together with logprobs; those of a prompt are not computed",
            "echo",
            "unsupported_parameter",
        )
    prompts = await completion_prompts(text, cache, request.prompt)
    plan = _plan(request, model, text, prompts, max_model_len, request_id, request.session_id)
    if not request.echo:
        return plan
    texts = [
        given if isinstance(given, str) else text.decode(given, skip_special_tokens=False)
        for given in request.prompt
        for _ in range(answers)
    ]
    return evolve(plan, echoes=tuple(texts))


def _plan(
    request: GenerationRequest,
    model: str,
    text: TextModel,
    prompts: Sequence[PromptTokens],
    max_model_len: int,
    request_id: str,
    session_id: str | None,
) -> Plan:
    answers = request.n or 1
    if answers * len(prompts) > _MAX_ANSWERS:
        raise RequestError(
            f"n: expected at most {_MAX_ANSWERS} answers, "
            f"got {len(prompts)} prompts with {answers} each",
            "n",
        )
    rules = choice_rules(request, text)
    requests: list[GenerateRequest] = []
    for prompt in prompts:
        max_tokens = max_tokens_of(request, len(prompt.token_ids), max_model_len)
        sampling = sampling_params(request, rules, text, max_tokens)
        for answer in range(answers):
            number = len(requests)
            requests.append(
                GenerateRequest(
                    request_id=_own_id(request_id, number, answers * len(prompts)),
                    token_ids=prompt.token_ids,
                    sampling=_with_own_seed(sampling, answer),
                    cache_salt=request.cache_salt,
                    priority=request.priority or 0,
                    retention=retention_of([(request.cache_control, None)]),
                )
            )
    # Those of the prompt cache are made without a salt; routing makes salted ones itself.
    salted = request.cache_salt is not None
    hashes = tuple(
        None if salted else prompt.sequence_hashes for prompt in prompts for _ in range(answers)
    )
    return Plan(
        model,
        text,
        tuple(requests),
        hashes,
        rules,
        answers,
        session_id=session_id,
        migration_limit=request.migration_limit,
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
