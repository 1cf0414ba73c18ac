"""One turn of a trained model, asked by the clients of three APIs, whole and streamed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import anthropic
import openai
from attrs import evolve, frozen
from tests.support.trained_models import THINK
from tests.support.trained_scripts import Said, Turn

__all__ = [
    "APIS",
    "Answer",
    "ask_chat",
    "ask_messages",
    "ask_responses",
    "messages_fields",
    "responses_fields",
    "with_ids",
]

_MOST_TOKENS = 400


@frozen(kw_only=True)
class Answer:
    """What a client read."""

    said: Said
    ids: Sequence[str]
    """Of its calls."""
    ended: str
    """Why it ended, in chat completions' words."""
    usage: tuple[int, int]
    """Tokens of the prompt and of the answer."""


def ask_chat(
    url: str, model: str, turn: Turn, *, streamed: bool, api_key: str = "-", strict: bool = True
) -> Answer:
    """By chat completions; ``strict``: answers are as OpenAI's API has them."""
    fields: dict[str, Any] = {"model": model, "messages": turn.messages, "temperature": 0}
    fields["max_tokens"] = _MOST_TOKENS
    if turn.tools:
        fields |= {"tools": turn.tools, "tool_choice": turn.tool_choice}
    if turn.schema is not None:
        described = {"name": "n", "schema": turn.schema, "strict": True}
        fields["response_format"] = {"type": "json_schema", "json_schema": described}
    if turn.thinks:
        fields["extra_body"] = {"chat_template_kwargs": THINK}
    with openai.OpenAI(
        base_url=f"{url}/v1", api_key=api_key, max_retries=0, _strict_response_validation=strict
    ) as client:
        if not streamed:
            answer = client.chat.completions.create(**fields)
            (choice,) = answer.choices
            message, usage = choice.message.to_dict(), answer.usage
            message["tool_calls"] = message.get("tool_calls") or []
            return _of_chat(message, str(choice.finish_reason), usage)
        message, ended, usage = {"content": "", "reasoning_content": "", "tool_calls": []}, "", None
        options: Any = {"include_usage": True}
        for chunk in client.chat.completions.create(**fields, stream=True, stream_options=options):
            usage = chunk.usage or usage
            for one in chunk.choices:
                ended = one.finish_reason or ended
                _add(message, one.delta.to_dict())
        return _of_chat(message, ended, usage)


def _add(message: Mapping[str, Any], delta: Mapping[str, Any]) -> None:
    """What a chunk adds to a message."""
    made: Any = message
    made["content"] += delta.get("content") or ""
    made["reasoning_content"] += delta.get("reasoning_content") or delta.get("reasoning") or ""
    calls: list[Any] = made["tool_calls"]
    for call in delta.get("tool_calls") or []:
        if call["index"] == len(calls):
            named = {"name": call["function"]["name"], "arguments": ""}
            calls.append({"id": call["id"], "function": named})
        calls[call["index"]]["function"]["arguments"] += call["function"].get("arguments") or ""


def _of_chat(message: Mapping[str, Any], ended: str, usage: Any) -> Answer:
    return Answer(
        said=Said(
            reasoning=message.get("reasoning_content") or message.get("reasoning") or None,
            content=message["content"] or None,
            calls=tuple(
                (call["function"]["name"], json.loads(call["function"]["arguments"]))
                for call in message["tool_calls"]
            ),
        ),
        ids=[call["id"] for call in message["tool_calls"]],
        ended=ended,
        usage=(usage.prompt_tokens, usage.completion_tokens),
    )


def messages_fields(model: str, turn: Turn) -> dict[str, Any]:
    """The turn as Anthropic's Messages have it."""
    fields: dict[str, Any] = {"model": model, "max_tokens": _MOST_TOKENS}
    fields |= {"messages": [*_blocks(turn.messages)], "extra_body": {"temperature": 0}}
    if turn.tools:
        functions = [one["function"] for one in turn.tools]
        fields["tools"] = [
            {
                "name": one["name"],
                "description": one["description"],
                "input_schema": one["parameters"],
            }
            for one in functions
        ]
    if turn.forced:
        fields["tool_choice"] = {"type": "tool", "name": turn.tool_choice["function"]["name"]}
    if turn.schema is not None:
        described = {"type": "json_schema", "schema": turn.schema}
        fields["output_config"] = {"format": described}
    if turn.thinks:
        fields["thinking"] = {"type": "enabled", "budget_tokens": 1024}
    return fields


def ask_messages(url: str, model: str, turn: Turn, *, streamed: bool) -> Answer:
    """By Anthropic's Messages."""
    fields = messages_fields(model, turn)
    with anthropic.Anthropic(
        base_url=url, api_key="-", max_retries=0, _strict_response_validation=True
    ) as client:
        if streamed:
            with client.messages.stream(**fields) as stream:
                answer: Any = stream.get_final_message()
        else:
            answer = client.messages.create(**fields)
    by_kind = {kind: [one for one in answer.content if one.type == kind] for kind in _KINDS}
    assert len(answer.content) == sum(map(len, by_kind.values()))
    called = by_kind["tool_use"]
    usage = answer.usage
    cached = (usage.cache_read_input_tokens or 0) + (usage.cache_creation_input_tokens or 0)
    return Answer(
        said=Said(
            reasoning="".join(one.thinking for one in by_kind["thinking"]) or None,
            content="".join(one.text for one in by_kind["text"]) or None,
            calls=tuple((one.name, one.input) for one in called),
        ),
        ids=[one.id for one in called],
        ended={"end_turn": "stop", "tool_use": "tool_calls"}[answer.stop_reason],
        usage=(usage.input_tokens + cached, usage.output_tokens),
    )


_KINDS = ("thinking", "text", "tool_use")


def _blocks(messages: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Messages of chat completions as this API has them."""
    results: list[dict[str, Any]] = []
    for message in messages:
        if message["role"] == "tool":
            names = {"tool_use_id": message["tool_call_id"], "content": message["content"]}
            results.append({"type": "tool_result", **names})
            continue
        said = [{"type": "text", "text": message["content"]}] if message["content"] else []
        if message["role"] == "user":
            yield {"role": "user", "content": [*results, *said]}
            results = []
            continue
        if results:
            yield {"role": "user", "content": results}
            results = []
        blocks: list[dict[str, Any]] = []
        if thoughts := message.get("reasoning_content"):
            blocks.append({"type": "thinking", "thinking": thoughts, "signature": "-"})
        blocks += said
        for call in message.get("tool_calls", ()):
            named = {"id": call["id"], "name": call["function"]["name"]}
            given = json.loads(call["function"]["arguments"])
            blocks.append({"type": "tool_use", **named, "input": given})
        yield {"role": "assistant", "content": blocks}
    if results:
        yield {"role": "user", "content": results}


def responses_fields(model: str, turn: Turn) -> dict[str, Any]:
    """The turn as Responses have it."""
    fields: dict[str, Any] = {"model": model, "input": [*_items(turn.messages)], "store": False}
    fields |= {"temperature": 0, "max_output_tokens": _MOST_TOKENS}
    if turn.tools:
        fields["tools"] = [{"type": "function", **one["function"]} for one in turn.tools]
    if turn.forced:
        fields["tool_choice"] = {"type": "function", "name": turn.tool_choice["function"]["name"]}
    if turn.schema is not None:
        described = {"name": "n", "schema": turn.schema, "strict": True}
        fields["text"] = {"format": {"type": "json_schema", **described}}
    if turn.thinks:
        fields["reasoning"] = {"effort": "high"}
    return fields


def ask_responses(url: str, model: str, turn: Turn, *, streamed: bool) -> Answer:
    """By Responses."""
    fields = responses_fields(model, turn)
    with openai.OpenAI(
        base_url=f"{url}/v1", api_key="-", max_retries=0, _strict_response_validation=True
    ) as client:
        answer: Any = None
        if streamed:
            for event in client.responses.create(**fields, stream=True):
                answer = event.response if event.type == "response.completed" else answer
        else:
            answer = client.responses.create(**fields)
    assert answer.status == "completed"
    called = [one for one in answer.output if one.type == "function_call"]
    thought = [one.content[0].text for one in answer.output if one.type == "reasoning"]
    return Answer(
        said=Said(
            reasoning="".join(thought) or None,
            content=answer.output_text or None,
            calls=tuple((one.name, json.loads(one.arguments)) for one in called),
        ),
        ids=[one.call_id for one in called],
        ended="tool_calls" if called else "stop",
        usage=(answer.usage.input_tokens, answer.usage.output_tokens),
    )


def _items(messages: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Messages of chat completions as this API has them."""
    for message in messages:
        if message["role"] == "tool":
            names = {"call_id": message["tool_call_id"], "output": message["content"]}
            yield {"type": "function_call_output", **names}
            continue
        if thoughts := message.get("reasoning_content"):
            content = [{"type": "reasoning_text", "text": thoughts}]
            yield {"type": "reasoning", "id": "rs_1", "summary": [], "content": content}
        if message["content"]:
            yield {"role": message["role"], "content": message["content"]}
        for call in message.get("tool_calls", ()):
            yield {"type": "function_call", "call_id": call["id"], **call["function"]}


APIS: Mapping[str, Callable[..., Answer]] = {
    "chat": ask_chat,
    "messages": ask_messages,
    "responses": ask_responses,
}


def with_ids(turn: Turn, ids: Mapping[str, str]) -> Turn:
    """With other ids of calls: those of the script and what they are instead."""
    text = json.dumps(turn.messages)
    for one, other in ids.items():
        text = text.replace(json.dumps(one), json.dumps(other))
    return evolve(turn, messages=json.loads(text))
