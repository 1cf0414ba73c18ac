"""The tokens of prompt and answer, as vLLM tells them in Responses."""

from __future__ import annotations

import json

from tests.support.front_door import MODEL, TEXT, FakeDispatcher, answer, front_door

from commutator_responses.protocol import ResponsesConfig


async def test_prompt_and_answer_in_tokens_where_they_are_asked_for() -> None:
    dispatcher = FakeDispatcher(answer("one two"))
    protocols = (ResponsesConfig(kind="responses"),)
    async with front_door(dispatcher, protocols=protocols) as door:
        asked = {"model": MODEL, "input": "Hi"}
        _, plain = await door.post("/v1/responses", asked)
        asked["enable_response_messages"] = True  # type: ignore[assignment]
        _, told = await door.post("/v1/responses", asked)
        body = json.dumps({**asked, "stream": True})
        headers = {"Content-Type": "application/json"}
        url = door.url + "/v1/responses"
        async with door.session.post(url, data=body, headers=headers) as response:
            sent = (await response.read()).decode()
    prompt = [*dispatcher.requests[1].token_ids]
    ids = [*TEXT.encode("one two", add_special_tokens=False), *TEXT.eos_ids]
    assert "input_messages" not in plain
    assert told["input_messages"] == [
        {
            "type": "raw_message_tokens",
            "message": TEXT.decode(prompt, skip_special_tokens=False),
            "tokens": prompt,
        }
    ]
    (output,) = told["output_messages"]
    assert output["tokens"] == ids
    assert output["message"].startswith("one two")
    last = [line for line in sent.split("\n") if line.startswith("data: {")][-1]
    assert json.loads(last.removeprefix("data: "))["response"]["output_messages"] == [output]
