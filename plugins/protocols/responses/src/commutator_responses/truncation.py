"""`truncation: auto`: the oldest turns of a conversation give way where it is too long."""

from __future__ import annotations

from attrs import evolve

from commutator.contract.conversation import Conversation
from commutator.errors import RequestError
from commutator.frontend import Call, Preprocessor, conversation_prompt, salted
from commutator_responses.reading import Asked

_TOO_LONG = "context_length_exceeded"


async def truncate(call: Call, asked: Asked) -> None:
    """Leave out the oldest turns, and say so, where the conversation is too long."""
    services, generate, before = call.services, asked.generate, asked.generate.conversation
    assert before is not None
    async with services.limiter.of(call.caller()):
        name, _ = call.text_model(generate.model, generate.session_id)
        limit = prompt_limit(services.max_model_len(name, call.principal), generate.max_tokens)
        salt = salted(call.principal, generate.cache_salt)
        generate.conversation = await fitted(services.preprocessors[name], before, salt, limit)
    if generate.conversation is not before:
        asked.ignored.append("input")


def prompt_limit(max_model_len: int, max_tokens: int | None) -> int:
    """The most tokens of a prompt that leave room for an answer.

    That is for ``max_tokens``, but at most for half of what the model takes; a quarter where the
    client leaves the length open.
    """
    wanted = max_model_len // 4 if max_tokens is None else max_tokens
    return max_model_len - max(1, min(wanted, max_model_len // 2))


async def fitted(
    prompts: Preprocessor, conversation: Conversation, salt: str | None, limit: int
) -> Conversation:
    """As much of the end of ``conversation`` as has a prompt of at most ``limit`` tokens.

    It begins with a turn of the user, and keeps what stands before the first one. The last turn
    is there even if it does not fit. Raises RequestError for what templates refuse.
    """
    if await _fits(prompts, conversation, salt, limit):
        return conversation
    messages = conversation.messages
    turns = [number for number, message in enumerate(messages) if message.role == "user"]
    if len(turns) <= 1:
        return conversation
    head = messages[: turns[0]]

    def from_turn(number: int) -> Conversation:
        return evolve(conversation, messages=[*head, *messages[turns[number] :]])

    low, high = 1, len(turns) - 1  # the first turn that may be kept lies between these
    while low < high:
        middle = (low + high) // 2
        if await _fits(prompts, from_turn(middle), salt, limit):
            high = middle
        else:
            low = middle + 1
    return from_turn(low)


async def _fits(
    prompts: Preprocessor, conversation: Conversation, salt: str | None, limit: int
) -> bool:
    try:
        prompt = await conversation_prompt(prompts, conversation, salt, limit)
    except RequestError as error:
        if error.code != _TOO_LONG:
            raise
        return False
    return len(prompt.token_ids) <= limit
