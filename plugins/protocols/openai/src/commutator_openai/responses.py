"""Answers in OpenAI's shapes. The OpenAPI document is generated from these classes.

They have no slots, because then the JSON encoder keeps the order in which the fields stand here.
"""

from __future__ import annotations

from typing import Literal

import msgspec
from attrs import frozen

from commutator import setting
from commutator.contract.answer import Failure
from commutator.contract.answer import Usage as UsedTokens

FinishReason = Literal["stop", "length", "tool_calls", "content_filter"]


@frozen(slots=False)
class ErrorDetail:
    """What went wrong."""

    message: str = setting("For a person to read.")
    type: str = setting("invalid_request_error, rate_limit_error or server_error.")
    param: str | None = setting("The parameter at fault.", None)
    code: str | None = setting("For a program to act upon.", None)


@frozen(slots=False)
class ErrorBody:
    """Every error has this shape."""

    error: ErrorDetail = setting("What went wrong.")


@frozen(slots=False)
class PromptTokensDetails:
    """Where the prompt's tokens came from."""

    cached_tokens: int = setting("Prompt tokens found in the KV cache.")


@frozen(slots=False)
class CompletionTokensDetails:
    """What the generated tokens were for."""

    reasoning_tokens: int = setting("Tokens of reasoning, as far as it is read.")


@frozen(slots=False)
class Usage:
    """Tokens of one request, all answers together."""

    prompt_tokens: int = setting("Each prompt counts once, however many answers.")
    completion_tokens: int = setting("Tokens generated.")
    total_tokens: int = setting("Both together.")
    prompt_tokens_details: PromptTokensDetails = setting("Where the prompt's tokens came from.")
    completion_tokens_details: CompletionTokensDetails = setting("What they were for.")


@frozen(slots=False)
class TopLogprob:
    """One token that could have been chosen."""

    token: str = setting(
        "Its text; bytes:\\xNN for part of a character; token_id:N where that was asked for."
    )
    logprob: float = setting("Natural logarithm of its probability.")
    bytes: tuple[int, ...] = setting("Its bytes.")


@frozen(slots=False)
class TokenLogprobs(TopLogprob):
    """One generated token."""

    top_logprobs: tuple[TopLogprob, ...] = setting("The most likely tokens, best first.")


@frozen(slots=False)
class ChatLogprobs:
    """Log probabilities of an answer."""

    content: tuple[TokenLogprobs, ...] = setting("One entry a token.")
    refusal: None = setting("Always null.", None)


@frozen(slots=False)
class PromptLogprob:
    """One token that the prompt has, or could have, at a place."""

    logprob: float = setting("Natural logarithm of its probability.")
    rank: int | None = setting("Its place among all tokens, 1 for the likeliest, if known.")
    decoded_token: str = setting("Its text.")


@frozen(slots=False)
class AssistantMessage:
    """The answer."""

    role: Literal["assistant"] = setting("Always assistant.")
    content: str = setting("The text.")
    refusal: None = setting("Always null.", None)


@frozen(slots=False)
class ChatChoice:
    """One of `n` answers."""

    index: int = setting("Its number.")
    message: AssistantMessage = setting("The answer.")
    logprobs: ChatLogprobs | None = setting("When asked for.")
    finish_reason: FinishReason = setting("Why it ended.")
    stop_reason: int | str | None = setting(
        "The stop string or token id of the request that ended it.", None
    )
    token_ids: tuple[int, ...] | None = setting("All tokens generated, when asked for.", None)


@frozen(slots=False)
class ChatCompletion:
    """Answer of POST /v1/chat/completions."""

    id: str = setting("Names this answer.")
    object: Literal["chat.completion"] = setting("The kind of object.")
    created: int = setting("Unix time in seconds.")
    model: str = setting("The model that answered.")
    prompt_logprobs: tuple[dict[str, PromptLogprob] | None, ...] | None = setting(
        "By token id, of each token of the prompt, when asked for; null for the first."
    )
    prompt_token_ids: tuple[int, ...] | None = setting("Those of the prompt, when asked for.")
    choices: tuple[ChatChoice, ...] = setting("The answers.")
    usage: Usage = setting("Tokens used.")


@frozen(slots=False)
class CompletionLogprobs:
    """Log probabilities, one entry a token in each list."""

    tokens: tuple[str, ...] = setting("The tokens' text.")
    token_logprobs: tuple[float | None, ...] = setting(
        "Their log probabilities; null for the first of an echoed prompt."
    )
    top_logprobs: tuple[dict[str, float] | None, ...] = setting(
        "The token and the most likely ones at each place, up to `logprobs` + 1."
    )
    text_offset: tuple[int, ...] = setting("Where each token begins in the text.")


@frozen(slots=False)
class CompletionChoice:
    """One answer; they are ordered by prompt."""

    index: int = setting("Its number.")
    text: str = setting("The text.")
    logprobs: CompletionLogprobs | None = setting("When asked for.")
    finish_reason: FinishReason = setting("Why it ended.")
    stop_reason: int | str | None = setting(
        "The stop string or token id of the request that ended it.", None
    )
    prompt_logprobs: tuple[dict[str, PromptLogprob] | None, ...] | None = setting(
        "By token id, of each token of the prompt, when asked for; null for the first.", None
    )
    prompt_token_ids: tuple[int, ...] | None = setting("Those of the prompt, when asked for.", None)
    token_ids: tuple[int, ...] | None = setting("All tokens generated, when asked for.", None)


@frozen(slots=False)
class Completion:
    """Answer of POST /v1/completions."""

    id: str = setting("Names this answer.")
    object: Literal["text_completion"] = setting("The kind of object.")
    created: int = setting("Unix time in seconds.")
    model: str = setting("The model that answered.")
    choices: tuple[CompletionChoice, ...] = setting("The answers.")
    usage: Usage = setting("Tokens used.")


@frozen(slots=False)
class ModelCard:
    """One model."""

    id: str = setting("The value of `model` in requests.")
    object: Literal["model"] = setting("The kind of object.")
    created: int = setting("Unix time in seconds at which this front door started.")
    owned_by: str = setting("Who serves it.")
    max_model_len: int = setting("Longest prompt plus answer in tokens.")
    parent: str | None = setting("Of an adapter: the model that it adapts.", None)


@frozen(slots=False)
class ModelList:
    """Answer of GET /v1/models."""

    object: Literal["list"] = setting("The kind of object.")
    data: tuple[ModelCard, ...] = setting("The models.")


@frozen(slots=False)
class TokenizeResponse:
    """Answer of POST /tokenize."""

    count: int = setting("How many tokens.")
    max_model_len: int = setting("Longest prompt plus answer in tokens.")
    tokens: tuple[int, ...] = setting("Token ids.")
    token_strs: tuple[str, ...] | None = setting(
        "The vocabulary's piece of each token, when asked for."
    )


@frozen(slots=False)
class DetokenizeResponse:
    """Answer of POST /detokenize."""

    prompt: str = setting("The text.")


@frozen(slots=False)
class Embedding:
    """The vector of one input."""

    object: Literal["embedding"] = setting("The kind of object.")
    index: int = setting("The place of its input.")
    embedding: tuple[float, ...] | str = setting("The numbers; base64: of 32-bit floats.")


@frozen(slots=False)
class PoolingUsage:
    """Tokens of one request, all inputs together."""

    prompt_tokens: int = setting("Those of the inputs, special tokens included.")
    total_tokens: int = setting("The same.")


@frozen(slots=False)
class EmbeddingList:
    """Answer of POST /v1/embeddings."""

    object: Literal["list"] = setting("The kind of object.")
    data: tuple[Embedding, ...] = setting("One for each input, in their order.")
    model: str = setting("Its name here.")
    usage: PoolingUsage = setting("Tokens.")


def usage_of(used: UsedTokens) -> Usage:
    """In OpenAI's words."""
    return Usage(
        used.prompt_tokens,
        used.completion_tokens,
        used.prompt_tokens + used.completion_tokens,
        PromptTokensDetails(used.cached_tokens),
        CompletionTokensDetails(used.reasoning_tokens),
    )


_KINDS = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_FIRST_SERVER_ERROR = 500


def error_body(failure: Failure) -> bytes:
    """The JSON of an error."""
    theirs = failure.status < _FIRST_SERVER_ERROR
    kind = _KINDS.get(failure.status, "invalid_request_error" if theirs else "server_error")
    return msgspec.json.encode(
        ErrorBody(ErrorDetail(failure.message, kind, failure.param, failure.code))
    )
