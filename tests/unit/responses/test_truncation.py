"""The oldest turns give way where a conversation is too long."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.front_door import MODEL, FakeDispatcher, make_services

from commutator.contract.conversation import Conversation, Message
from commutator.frontend import conversation_prompt
from commutator_responses.truncation import fitted, prompt_limit

PROMPTS = make_services(FakeDispatcher()).preprocessors[MODEL]
HEAD = Message(role="system", content="You are kind.")


def conversation(turns: int) -> Conversation:
    said = [
        Message(role=role, content=f"{role} says {number} " * 5)
        for number in range(turns)
        for role in ("user", "assistant")
    ]
    return Conversation(messages=[HEAD, *said[:-1]])


async def length(of: Conversation) -> int:
    return len((await conversation_prompt(PROMPTS, of, None)).token_ids)


async def test_what_fits_is_left_as_it_is() -> None:
    whole = conversation(3)
    assert await fitted(PROMPTS, whole, None, await length(whole)) is whole


@pytest.mark.parametrize("turns", [1, 2, 7, 8])
async def test_as_many_turns_stay_as_fit(turns: int) -> None:
    whole = conversation(turns)
    for kept in range(1, turns + 1):
        end = Conversation(messages=[HEAD, *whole.messages[1 + 2 * (turns - kept) :]])
        limit = await length(end)
        for more in (0, 3):
            assert (await fitted(PROMPTS, whole, None, limit + more)).messages == end.messages


async def test_the_last_turn_stays_even_if_it_does_not_fit() -> None:
    whole = conversation(4)
    assert [*(await fitted(PROMPTS, whole, None, 5)).messages] == [HEAD, whole.messages[-1]]


@given(st.integers(2, 1 << 20), st.none() | st.integers(1, 1 << 21))
def test_there_is_room_for_an_answer_and_for_a_prompt(longest: int, wanted: int | None) -> None:
    limit = prompt_limit(longest, wanted)
    assert longest // 2 <= limit < longest
