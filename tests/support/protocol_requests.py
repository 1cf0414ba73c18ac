"""One request for each operation of each protocol, and what is true of its answer.

They are the places of the table docs/reference/protocols.md.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import httpx
from tests.support.kserve import (
    ModelStreamInferResponse,
    free_port,
    infer_request,
    plain,
    values_of,
)

from commutator import ModelConfig
from commutator_kserve.messages import SERVICE

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
import protocols_page

__all__ = [
    "LABELS",
    "REQUESTS",
    "STREAMED",
    "TOOL_TEMPLATE",
    "Doors",
    "ask",
    "attached_config",
    "cases",
]

PROTOCOLS = [{"kind": kind} for kind in ("openai", "responses", "anthropic", "pooling", "kserve")]
HI = [{"role": "user", "content": "Hi"}]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"sky": {"enum": ["clear", "grey"]}},
    "required": ["sky"],
    "additionalProperties": False,
}
TEXTS = ["w1 w2", "w3"]
LABELS = 3
TOOL_TEMPLATE = """
{%- if tools %}<|im_start|>system
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking %}<think>
{% endif %}{% endif %}"""
"""For a model whose own template knows no tools."""
STREAMED = ("kserve", "streams over gRPC")
"""Which is asked by gRPC; everything else by HTTP."""


class Doors:
    """A front door's doors: every protocol over HTTP, and `kserve` over gRPC."""

    def __init__(self) -> None:
        self.grpc_port = free_port()
        kserve = {"kind": "grpc", "port": self.grpc_port, "protocols": [{"kind": "kserve"}]}
        self.config = {"doors": [{"kind": "http", "port": 0, "protocols": PROTOCOLS}, kserve]}


def attached_config(
    doors: Doors, kind: str, url: str, model: ModelConfig, template: Path
) -> dict[str, Any]:
    """A deployment before an engine's server; ``template`` is the model's."""
    return {
        "models": [{"name": model.name, "source": model.source, "chat_template": str(template)}],
        "engines": [{"kind": kind, "url": url}],
        "frontend": doors.config,
        "runtime": {"lease_s": 300},  # a busy machine makes it no lost worker
    }


class Asked(NamedTuple):
    path: str
    body: dict[str, Any]
    has: Callable[[Any], Any]
    """What is true of the answer: JSON, or of a stream the list of its events."""


def _text_of(events: list[Any]) -> str:
    """What the events of a stream say, in each protocol's words."""
    said = ""
    for event in events:
        for choice in event.get("choices", ()):
            said += choice["delta"].get("content") or ""
        delta = event.get("delta")
        said += delta if isinstance(delta, str) else (delta or {}).get("text", "")
    return said


def tensor(*texts: str) -> dict[str, Any]:
    return {"name": "text_input", "datatype": "BYTES", "shape": [len(texts)], "data": texts}


def _is_sky(text: str) -> bool:
    return json.loads(text)["sky"] in SCHEMA["properties"]["sky"]["enum"]


FORMAT = {"type": "json_schema", "json_schema": {"name": "sky", "schema": SCHEMA}}
REQUESTS = {
    ("openai", "chat"): Asked(
        "/v1/chat/completions",
        {"messages": HI, "max_tokens": 4},
        lambda said: said["choices"][0]["message"]["content"],
    ),
    ("openai", "chat, streamed"): Asked(
        "/v1/chat/completions", {"messages": HI, "max_tokens": 4, "stream": True}, _text_of
    ),
    ("openai", "completions"): Asked(
        "/v1/completions",
        {"prompt": "Rivers run", "max_tokens": 4},
        lambda said: said["choices"][0]["text"],
    ),
    ("openai", "structured output"): Asked(
        "/v1/chat/completions",
        {"messages": HI, "max_tokens": 40, "response_format": FORMAT},
        lambda said: _is_sky(said["choices"][0]["message"]["content"]),
    ),
    ("openai", "log probabilities"): Asked(
        "/v1/chat/completions",
        {"messages": HI, "max_tokens": 4, "logprobs": True, "top_logprobs": 2},
        lambda said: len(said["choices"][0]["logprobs"]["content"][0]["top_logprobs"]) == 2,
    ),
    ("openai", "embeddings"): Asked(
        "/v1/embeddings",
        {"input": TEXTS},
        lambda said: [len(set(one["embedding"])) > 8 for one in said["data"]] == [True, True],
    ),
    ("responses", "responses"): Asked(
        "/v1/responses",
        {"input": "Hi", "max_output_tokens": 4},
        lambda said: said["output"][0]["content"][0]["text"],
    ),
    ("responses", "responses, streamed"): Asked(
        "/v1/responses",
        {"input": "Hi", "max_output_tokens": 4, "stream": True},
        lambda said: _text_of(said) and said[-1]["type"] == "response.incomplete",
    ),
    ("responses", "structured output"): Asked(
        "/v1/responses",
        {
            "input": "Hi",
            "max_output_tokens": 40,
            "text": {"format": {"type": "json_schema", "name": "sky", "schema": SCHEMA}},
        },
        lambda said: _is_sky(said["output"][0]["content"][0]["text"]),
    ),
    ("responses", "tool calls"): Asked(
        "/v1/responses",
        {
            "input": "Hi",
            "max_output_tokens": 120,
            "tools": [{"type": "function", "name": "tell", "parameters": SCHEMA}],
            "tool_choice": "required",
        },
        lambda said: (
            said["output"][0]["name"] == "tell" and _is_sky(said["output"][0]["arguments"])
        ),
    ),
    ("anthropic", "messages"): Asked(
        "/v1/messages",
        {"messages": HI, "max_tokens": 4},
        lambda said: said["content"][0]["text"],
    ),
    ("anthropic", "messages, streamed"): Asked(
        "/v1/messages",
        {"messages": HI, "max_tokens": 4, "stream": True},
        lambda said: _text_of(said) and said[-1]["type"] == "message_stop",
    ),
    ("anthropic", "structured output"): Asked(
        "/v1/messages",
        {
            "messages": HI,
            "max_tokens": 40,
            "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
        },
        lambda said: _is_sky(said["content"][0]["text"]),
    ),
    ("anthropic", "tool calls"): Asked(
        "/v1/messages",
        {
            "messages": HI,
            "max_tokens": 120,
            "tools": [{"name": "tell", "input_schema": SCHEMA}],
            "tool_choice": {"type": "any"},
        },
        lambda said: (
            said["stop_reason"] == "tool_use" and _is_sky(json.dumps(said["content"][0]["input"]))
        ),
    ),
    ("pooling", "rerank"): Asked(
        "/v2/rerank",
        {"query": "w1", "documents": TEXTS},
        lambda said: sorted(one["index"] for one in said["results"]) == [0, 1],
    ),
    ("pooling", "score"): Asked(
        "/score",
        {"text_1": "w1", "text_2": TEXTS},
        lambda said: [type(one["score"]) for one in said["data"]] == [float, float],
    ),
    ("pooling", "classify"): Asked(
        "/classify",
        {"input": TEXTS},
        lambda said: [round(sum(one["probs"]), 4) for one in said["data"]] == [1, 1],
    ),
    ("pooling", "vectors of tokens"): Asked(
        "/pooling",
        {"input": TEXTS, "task": "token_embed"},
        lambda said: len(said["data"][0]["data"]) > len(said["data"][1]["data"]) > 0,
    ),
    ("pooling", "embeddings"): Asked(
        "/v2/embed",
        {"texts": TEXTS},
        lambda said: len(said["embeddings"]["float"]) == 2,
    ),
    ("kserve", "infer"): Asked(
        "/v2/models/{model}/infer",
        {"inputs": [tensor("Rivers run")], "parameters": {"max_tokens": 4}},
        lambda said: said["outputs"][0]["data"][0],
    ),
    ("kserve", "generate"): Asked(
        "/v2/models/{model}/generate",
        {"text_input": "Rivers run", "max_tokens": 4},
        lambda said: said["text_output"],
    ),
    ("kserve", "generate, streamed"): Asked(
        "/v2/models/{model}/generate_stream",
        {"text_input": "Rivers run", "max_tokens": 4, "stream": True},
        lambda said: "".join(one["text_output"] for one in said) and said[-1]["finish_reason"],
    ),
    ("kserve", "structured output"): Asked(
        "/v2/models/{model}/generate",
        {"messages": HI, "max_tokens": 40, "schema": SCHEMA},
        lambda said: _is_sky(said["text_output"]),
    ),
    ("kserve", "embeddings"): Asked(
        "/v2/models/{model}/infer",
        {"inputs": [tensor(*TEXTS)], "outputs": [{"name": "embedding"}]},
        lambda said: said["outputs"][0]["shape"][0] == 2,
    ),
}


def cases(test: str) -> list[tuple[str, str, str]]:
    """(protocol, operation, engine) of the places of the table that name ``test``."""
    return [cell[:3] for cell in protocols_page.cells() if cell.test == test]


def ask(
    url: str, protocol: str, operation: str, model: str, *, grpc_port: int | None = None
) -> str | None:
    """Ask ``model`` at ``url``, and check the answer; returns the worker, unless it streams."""
    if (protocol, operation) == STREAMED:
        _stream(f"127.0.0.1:{grpc_port}", model)
        return None
    asked = REQUESTS[protocol, operation]
    response = httpx.post(
        url + asked.path.format(model=model),
        json=asked.body if "{model}" in asked.path else {"model": model, **asked.body},
        headers={"X-Commutator-Explain": "1"},
        timeout=120,
    )
    assert response.status_code == 200, response.text
    if not asked.body.get("stream"):
        assert asked.has(response.json()), response.text
        return response.headers["x-commutator-worker"]
    lines = (line.removeprefix("data: ") for line in response.text.splitlines())
    assert asked.has([json.loads(line) for line in lines if line.startswith("{")]), response.text
    return None


def _stream(address: str, model: str) -> None:
    """Two requests on one stream, each of which has an answer of its own to its end."""
    sent = [
        infer_request("Rivers run", model=model, request_id=name, streaming=True, max_tokens=4)
        for name in ("a", "b")
    ]
    said, finished = {"a": "", "b": ""}, set()
    with grpc.insecure_channel(address) as channel:
        stream = channel.stream_stream(
            f"/{SERVICE}/ModelStreamInfer",
            request_serializer=lambda one: one.SerializeToString(),
            response_deserializer=ModelStreamInferResponse.FromString,
        )
        for message in stream(iter(sent), timeout=120):
            assert not message.error_message
            response = message.infer_response
            said[response.id] += "".join(values_of(response).get("text_output", []))
            if plain(response.parameters)["triton_final_response"]:
                finished.add(response.id)
    assert all(said.values())
    assert finished == said.keys()
