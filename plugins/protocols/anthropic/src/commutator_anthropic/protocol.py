"""The protocol of kind `anthropic`: messages, count_tokens, models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Literal

import msgspec
from attrs import frozen

from commutator import MountedProtocol, Protocol, ProtocolConfig, Route, setting
from commutator.contract.answer import Failure
from commutator.contract.protocol import DoorFacts, Example

if TYPE_CHECKING:
    from commutator.frontend import Call, FrontendServices, Plan


_VERSION = "anthropic-version"
_IGNORED_HEADER = "X-Commutator-Ignored"
_encode = msgspec.json.encode


@frozen(kw_only=True)
class AnthropicConfig(ProtocolConfig):
    """Anthropic's Messages API."""

    server_tools: Literal["leave_out", "refuse"] = setting(
        "What becomes of tools that Anthropic's own servers run, such as web search: `leave_out` "
        "answers without them and names `tools` in X-Commutator-Ignored, `refuse` answers 400.",
        "leave_out",
    )


class Anthropic(Protocol[AnthropicConfig, "FrontendServices"]):
    """Imports what answers only where it is mounted."""

    def mount(
        self, config: AnthropicConfig, services: FrontendServices, door: DoorFacts
    ) -> MountedProtocol:
        del services, door
        return _Mounted(config)

    def example(self, url: str, model: str) -> Example:
        question = {"role": "user", "content": "What is the capital of France?"}
        return Example(
            api_url=url,
            path="/v1/messages",
            body={"model": model, "messages": [question], "temperature": 0, "max_tokens": 64},
        )


class _Mounted(MountedProtocol):
    session_headers = ("x-claude-code-session-id", "x-session-id")

    def __init__(self, config: AnthropicConfig) -> None:
        self._server_tools = config.server_tools

    def routes(self) -> Sequence[Route]:
        return [
            Route(method="POST", path="/v1/messages", handle=self._messages),
            Route(method="POST", path="/v1/messages/count_tokens", handle=self._count_tokens),
            Route(method="GET", path="/v1/models", handle=_models, is_mine=_is_anthropic),
            Route(method="GET", path="/v1/models/{id:.+}", handle=_model, is_mine=_is_anthropic),
        ]

    def failed(self, failure: Failure) -> bytes:
        from commutator_anthropic.writer import error_body

        return _encode(error_body(failure))

    async def _messages(self, call: Call) -> None:
        from commutator.frontend import answer, read_object
        from commutator_anthropic.reading import read_request, without_lifetimes
        from commutator_anthropic.writer import MessageWriter

        async def serving() -> None:
            limit = call.time_limit()
            async with limit:
                asked = read_request(await read_object(call), server_tools=self._server_tools)
                _name_ignored(call, asked.ignored)
                generate = asked.generate
                if not call.principal.may("pin"):
                    generate = without_lifetimes(generate)

                def writer(plan: Plan) -> MessageWriter:
                    longest = plan.requests[0].sampling.max_tokens
                    return MessageWriter(
                        call.request_id,
                        plan.name,
                        plan.prompt_tokens,
                        fills_context=longest < (generate.max_tokens or 0),
                        marked_tokens=_marked_tokens(plan, call.services),
                    )

                await answer(call, generate, writer, limit)

        await call.traced("chat", serving())

    async def _count_tokens(self, call: Call) -> None:
        from commutator.frontend import conversation_prompt, read_object, salted
        from commutator_anthropic.reading import read_conversation

        services, principal = call.services, call.principal
        async with call.time_limit():
            body = await read_object(call)
            conversation, _ = read_conversation(body, server_tools=self._server_tools)
            async with services.limiter.of(call.caller()):
                name, _ = call.text_model(body.get("model"))
                prompts, salt = services.preprocessors[name], salted(principal, None)
                prompt = await conversation_prompt(prompts, conversation, salt)
        await call.reply([_encode({"input_tokens": len(prompt.token_ids)})])


def _marked_tokens(plan: Plan, services: FrontendServices) -> int:
    """Prompt tokens up to the last mark, as far as they fill blocks that a worker caches."""
    (request,) = plan.requests
    block_size = services.dispatcher.cached_block_size(plan.model)
    if not request.retention or block_size is None:
        return 0
    tokens = len(request.token_ids)
    last = max(tokens if mark.tokens is None else mark.tokens for mark in request.retention)
    return last // block_size * block_size


def _name_ignored(call: Call, ignored: Sequence[str]) -> None:
    if ignored:
        call.answer_headers[_IGNORED_HEADER] = ", ".join(one[:64] for one in ignored[:32])


def _is_anthropic(headers: Mapping[str, str]) -> bool:
    """OpenAI's API has the same paths of models."""
    return _VERSION in headers


async def _models(call: Call) -> None:
    names = call.services.names_for(call.principal)
    listed = {
        "data": [_card(call, name) for name in names],
        "has_more": False,
        "first_id": names[0] if names else None,
        "last_id": names[-1] if names else None,
    }
    await call.reply([_encode(listed)])


async def _model(call: Call) -> None:
    name = call.parts["id"]
    call.text_model(name)  # raises where it is not served
    await call.reply([_encode(_card(call, name))])


def _card(call: Call, name: str) -> dict[str, Any]:
    created = datetime.fromtimestamp(call.services.started_unix_s, UTC)
    return {
        "type": "model",
        "id": name,
        "display_name": name,
        "lifecycle": "active",
        "created_at": created.strftime("%Y-%m-%dT%H:%M:%SZ"),
        "max_input_tokens": call.services.least_model_len(name, call.principal),
    }
