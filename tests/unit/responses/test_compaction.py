"""A conversation is compacted into what its user said, and a summary that any door can read."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from openai.types.responses import ResponseCompactionItem, ResponseUsage
from tests.support.front_door import MODEL, TEXT, FakeDispatcher, answer, front_door

from commutator.contract.request import FinishReason
from commutator.errors import RequestError
from commutator_responses.protocol import ResponsesConfig
from commutator_responses.summary import sealed, unsealed

PROTOCOLS = (ResponsesConfig(kind="responses"),)
SAID = [
    {"role": "developer", "content": "Be kind."},
    {"role": "user", "content": "Which password is in a.txt?"},
    {
        "type": "reasoning",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": "I read."}],
    },
    {"role": "assistant", "content": "It is heron-4711."},
    {"role": "user", "content": [{"type": "input_text", "text": "Thanks."}]},
]
SUMMARY = "The password in a.txt is heron-4711."


async def asked(dispatcher: FakeDispatcher, path: str, **fields: Any) -> tuple[int, Any]:
    async with front_door(dispatcher, protocols=PROTOCOLS) as door:
        status, said = await door.post(path, {"model": MODEL, **fields})
        return status, said


def prompt_of(dispatcher: FakeDispatcher) -> str:
    return TEXT.decode([*dispatcher.requests[-1].token_ids], skip_special_tokens=False)


async def test_what_is_returned_takes_the_place_of_the_conversation() -> None:
    dispatcher = FakeDispatcher(answer(f" {SUMMARY}\n"))
    status, said = await asked(dispatcher, "/v1/responses/compact", input=SAID)
    assert (status, said["object"]) == (200, "response.compaction")
    before = prompt_of(dispatcher)
    assert all(text in before for text in ("Be kind.", "a.txt", "heron-4711", "Summarize"))
    *kept, item = said["output"]
    assert [(one["role"], one["content"][0]["text"]) for one in kept] == [
        ("developer", "Be kind."),
        ("user", "Which password is in a.txt?"),
        ("user", "Thanks."),
    ]
    assert all(one["id"].startswith("msg_") for one in kept)
    ResponseCompactionItem.model_validate(item, strict=True)
    assert ResponseUsage.model_validate(said["usage"], strict=True).input_tokens > 50
    assert unsealed(item["encrypted_content"], "") == SUMMARY

    again = [*said["output"], {"role": "user", "content": "Say it again."}]
    status, _ = await asked(dispatcher, "/v1/responses", input=again)
    assert status == 200
    after = prompt_of(dispatcher)
    assert f"<|im_start|>assistant\nSummary of the conversation so far:\n\n{SUMMARY}" in after
    assert after.index("Thanks.") < after.index(SUMMARY) < after.index("Say it again.")


async def test_what_is_kept_is_compacted_by_its_id_and_again() -> None:
    dispatcher = FakeDispatcher(answer(SUMMARY))
    async with front_door(dispatcher, protocols=PROTOCOLS) as door:
        _, first = await door.post("/v1/responses", {"model": MODEL, "input": "Remember heron."})
        asked = {"model": MODEL, "previous_response_id": first["id"]}
        _, once = await door.post("/v1/responses/compact", asked)
        assert [one["type"] for one in once["output"]] == ["message", "compaction"]
        asked = {"model": MODEL, "input": once["output"]}
        _, twice = await door.post("/v1/responses/compact", asked)
        assert [one["type"] for one in twice["output"]] == ["message", "compaction"]
        assert SUMMARY in prompt_of(dispatcher)


@pytest.mark.parametrize("text", ["Too lo", " "])
async def test_a_summary_that_is_cut_or_empty_takes_no_place(text: str) -> None:
    finish = FinishReason.STOP if text.isspace() else FinishReason.LENGTH
    dispatcher = FakeDispatcher(answer(text, finish=finish))
    status, said = await asked(dispatcher, "/v1/responses/compact", input=SAID)
    assert (status, said["error"]["code"]) == (422, "compaction_failed")
    assert dispatcher.open == 0


async def test_fields_without_an_effect_are_named_and_wrong_ones_refused() -> None:
    dispatcher = FakeDispatcher(answer(SUMMARY))
    async with front_door(dispatcher, protocols=PROTOCOLS) as door:
        fields = {"max_output_tokens": 40, "service_tier": "flex", "image": None, "stream": True}
        async with door.session.post(
            f"{door.url}/v1/responses/compact",
            json={"model": MODEL, "input": "Hi", **fields},
        ) as said:
            assert said.status == 200
            assert said.headers["X-Commutator-Ignored"] == "service_tier, stream"
        assert dispatcher.requests[-1].sampling.max_tokens == 40
        for wrong, param in (
            ({"input": []}, "input"),
            ({}, "input"),
            ({"input": "Hi", "max_output_tokens": 0}, "max_output_tokens"),
        ):
            status, said = await door.post("/v1/responses/compact", {"model": MODEL, **wrong})
            assert (status, said["error"]["param"]) == (400, param)


async def test_content_of_other_servers_is_refused_by_its_place() -> None:
    item = {"type": "compaction", "encrypted_content": "gAAAAABpM0Yj"}
    status, said = await asked(FakeDispatcher(), "/v1/responses", input=[item])
    assert (status, said["error"]["param"]) == (400, "input.0.encrypted_content")


@given(st.text())
def test_a_summary_comes_back_as_it_was(summary: str) -> None:
    assert unsealed(sealed(summary), "") == summary


@given(st.none() | st.integers() | st.text() | st.text("!{ü").map(lambda one: sealed("a") + one))
def test_other_content_is_an_error_that_names_it(content: Any) -> None:
    assume(content != sealed("a"))
    with pytest.raises(RequestError) as refused:
        unsealed(content, "input.0")
    assert refused.value.param == "input.0"
