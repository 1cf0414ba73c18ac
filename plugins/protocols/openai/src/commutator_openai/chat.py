"""The handlers of /v1/chat/completions and /v1/completions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TypeVar

from attrs import frozen

from commutator.contract.conversation import Generate
from commutator.errors import RequestError
from commutator.frontend import NOT_SERVED, Call, answer, traced
from commutator_openai.asking import asked_chat, asked_completion, read_request
from commutator_openai.fields import Hint, hints_given
from commutator_openai.pass_through import PassThrough
from commutator_openai.requests import ChatRequest, CompletionRequest, GenerationRequest
from commutator_openai.writers import ChatWriter, CompletionWriter

__all__ = ["IGNORED_HEADER", "Generations"]

IGNORED_HEADER = "X-Commutator-Ignored"
"""Names the parameters that had no effect on the answer."""

RequestT = TypeVar("RequestT", ChatRequest, CompletionRequest)


@frozen
class Generations:
    """``strict``: parameters without effect are refused."""

    strict: bool
    pass_through: PassThrough

    async def chat_completions(self, call: Call) -> None:
        """POST /v1/chat/completions."""
        serving = self._serve(call, ChatRequest, asked_chat, ChatWriter)
        await traced("chat", call.headers, {"http.route": call.path}, serving)

    async def completions(self, call: Call) -> None:
        """POST /v1/completions."""
        serving = self._serve(call, CompletionRequest, asked_completion, CompletionWriter)
        await traced("completion", call.headers, {"http.route": call.path}, serving)

    async def _serve(
        self,
        call: Call,
        cls: type[RequestT],
        asked: Callable[[RequestT], Generate],
        writer: type[ChatWriter | CompletionWriter],
    ) -> None:
        limit = call.time_limit()
        async with limit:
            try:
                body = await read_request(call, cls)
            except RequestError as refused:
                if await self.pass_through.answered(call, refused):
                    return
                raise
            if given := hints_given(body):
                if await self._passed_on(call, given):
                    return
                call.answer_headers[IGNORED_HEADER] = ", ".join(given)
            make_writer = partial(
                writer,
                call.request_id,
                include_usage=_include_usage(body),
                logprobs=body.logprobs,
            )
            await answer(call, asked(body), make_writer, limit)

    async def _passed_on(self, call: Call, given: Mapping[str, Hint]) -> bool:
        """Whether an engine answered that may know the hints; otherwise they are to be ignored.

        Raises RequestError where they are not to be ignored.
        """
        name, hint = next(iter(given.items()))
        refused = RequestError(
            f"{name} is not supported, because {hint.why}. Remove it.", name, NOT_SERVED
        )
        if self.strict or any(hint.for_engines for hint in given.values()):
            if await self.pass_through.answered(call, refused):
                return True
            if self.strict:
                raise refused
        return False


def _include_usage(body: GenerationRequest) -> bool:
    return body.stream_options is not None and bool(body.stream_options.include_usage)
