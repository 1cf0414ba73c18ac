"""Ollama's API: chat, generate, tags and show, streamed as lines of JSON."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from commutator import MountedProtocol, Protocol, ProtocolConfig, ProtocolRegister, Route, hookimpl
from commutator.contract import answer as events
from commutator.contract.conversation import Conversation, Generate, Media, Message, Text, Tool
from commutator.contract.protocol import DoorFacts, Example
from commutator.errors import RequestError

if TYPE_CHECKING:
    from commutator.frontend import Call, Plan

OPTIONS = {  # Ollama's names, and ours
    "num_predict": "max_tokens", "temperature": "temperature", "top_k": "top_k", "top_p": "top_p",
    "min_p": "min_p", "seed": "seed", "repeat_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty", "frequency_penalty": "frequency_penalty",
}  # fmt: skip
DETAILS = {"format": "commutator", "family": "commutator"}
encode = msgspec.json.encode


def message(content: str = "", **more: Any) -> dict[str, Any]:
    return {"message": {"role": "assistant", "content": content, **more}}


def response(content: str = "", **more: Any) -> dict[str, Any]:
    return {"response": content, **more}


class Writer(events.AnswerWriter):
    """``say``: how a piece is said: ``message`` in a chat, else ``response``."""

    stream_type = "application/x-ndjson"

    def __init__(self, say: Callable[..., dict[str, Any]], plan: Plan) -> None:
        self._say, self._model, self._begun_s = say, plan.model, time.perf_counter()
        self._kept: dict[str, Any] = {"content": "", "thinking": "", "tool_calls": []}
        self._open: dict[int, list[str]] = {}
        self._reason = "stop"

    def _pieces(self, batch: events.Batch) -> Iterator[dict[str, Any]]:
        for _, event in batch:
            match event:
                case events.Content(text=text) if text:
                    yield {"content": text}
                case events.ReasoningContent(text=text):
                    yield {"thinking": text}
                case events.CallStart(call=call, name=name):
                    self._open[call] = [name]
                case events.CallArguments(call=call, text=text):
                    self._open[call].append(text)
                case events.CallEnd(call=call):
                    name, *parts = self._open.pop(call)
                    arguments = msgspec.json.decode("".join(parts))
                    yield {"tool_calls": [{"function": {"name": name, "arguments": arguments}}]}
                case events.Finish(reason=reason):
                    self._reason = "length" if reason == "length" else "stop"

    def stream(self, batch: events.Batch) -> bytes:
        return b"".join(self._line(self._say(**piece)) for piece in self._pieces(batch))

    def stream_end(self, usage: events.Usage) -> bytes:
        return self._line(self._say(), usage)

    def stream_failed(self, failure: events.Failure) -> bytes:
        return encode({"error": failure.message}) + b"\n"

    def keep(self, batch: events.Batch) -> None:
        for piece in self._pieces(batch):
            for name, value in piece.items():
                self._kept[name] += value

    @property
    def kept_bytes(self) -> int:
        return len(self._kept["content"]) + len(self._kept["thinking"])

    def whole(self, usage: events.Usage) -> Iterator[bytes]:
        kept = {name: value for name, value in self._kept.items() if value}
        yield self._line(self._say(**kept), usage)

    def _line(self, said: dict[str, Any], usage: events.Usage | None = None) -> bytes:
        now = datetime.now(UTC).isoformat()
        line = {"model": self._model, "created_at": now, **said, "done": usage is not None}
        if usage is not None:
            line["done_reason"] = self._reason
            line["total_duration"] = int((time.perf_counter() - self._begun_s) * 1e9)
            line["prompt_eval_count"] = usage.prompt_tokens
            line["eval_count"] = usage.completion_tokens
        return encode(line) + b"\n"


def _chat(body: Mapping[str, Any]) -> dict[str, Any]:
    tools = [Tool(**one["function"]) for one in body.get("tools") or ()]
    messages = [_message(one) for one in body["messages"]]
    return {"conversation": Conversation(messages=messages, tools=tools)}


def _generate(body: Mapping[str, Any]) -> dict[str, Any]:
    """With the model's template, unless it is raw."""
    if body.get("raw"):
        return {"prompts": [str(body["prompt"])]}
    said = [Message(role="system", content=str(body["system"]))] if body.get("system") else []
    user = {"role": "user", "content": body["prompt"], "images": body.get("images")}
    return {"conversation": Conversation(messages=[*said, _message(user)])}


def _message(given: Mapping[str, Any]) -> Message:
    text = str(given.get("content") or "")
    pictures = [Media(kind="image", url=f"data:,{data}") for data in given.get("images") or ()]
    return Message(role=given["role"], content=[Text(text), *pictures] if pictures else text)


async def _answer(
    call: Call, read: Callable[[Mapping[str, Any]], dict[str, Any]], say: Callable[..., Any]
) -> None:
    from commutator.frontend import answer, read_object

    limit = call.time_limit()
    async with limit:
        body = await read_object(call)
        if body.get("format"):
            raise RequestError("format: not served by this protocol; leave it out", "format")
        try:
            asked = _asked(body, read(body))
        except (KeyError, TypeError, AttributeError) as error:
            raise RequestError(f"the body is not as Ollama's API has it: {error!r}") from error
        await answer(call, asked, partial(Writer, say), limit)


def _asked(body: Mapping[str, Any], what: dict[str, Any]) -> Generate:
    given = body.get("options") or {}
    options = {OPTIONS[name]: given[name] for name in OPTIONS.keys() & given.keys()}
    if (options.get("max_tokens") or 0) < 1:  # -1: as long as there is room
        options.pop("max_tokens", None)
    stop = given.get("stop") or ()
    return Generate(
        model=str(body["model"]).removesuffix(":latest"),
        stream=body.get("stream") is not False,
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        params={"max_tokens": "num_predict"},
        **what,
        **options,
    )


async def tags(call: Call) -> None:
    """GET /api/tags."""
    names = call.services.names_for(call.principal)
    models = [{"name": name, "model": name, "details": DETAILS} for name in names]
    await call.reply([encode({"models": models})])


async def show(call: Call) -> None:
    """POST /api/show."""
    from commutator.frontend import read_object

    body = await read_object(call)
    name = str(body.get("model") or body.get("name") or "").removesuffix(":latest")
    call.text_model(name)  # raises where it is not served
    info = {"commutator.context_length": call.services.least_model_len(name, call.principal)}
    said = {"details": DETAILS, "model_info": info, "capabilities": ["completion"]}
    await call.reply([encode(said)])


class Mounted(MountedProtocol):
    def routes(self) -> Sequence[Route]:
        on_chat = partial(_answer, read=_chat, say=message)
        on_generate = partial(_answer, read=_generate, say=response)
        return [
            Route(method="POST", path="/api/chat", handle=on_chat),
            Route(method="POST", path="/api/generate", handle=on_generate),
            Route(method="POST", path="/api/show", handle=show),
            Route(method="GET", path="/api/tags", handle=tags),
        ]

    def failed(self, failure: events.Failure) -> bytes:
        return encode({"error": failure.message})


class Ollama(Protocol[ProtocolConfig, Any]):
    def mount(self, config: ProtocolConfig, services: Any, door: DoorFacts) -> MountedProtocol:
        return Mounted()

    def example(self, url: str, model: str) -> Example:
        return Example(api_url=url, path="/api/generate", body={"model": model, "prompt": "Hi"})


@hookimpl
def protocol_register(register: ProtocolRegister) -> None:
    """Kind `ollama`."""
    register("ollama", ProtocolConfig, Ollama())
