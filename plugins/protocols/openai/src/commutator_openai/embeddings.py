"""POST /v1/embeddings: texts or token ids become vectors."""

from __future__ import annotations

from base64 import b64encode
from typing import Annotated, Literal

import msgspec
from attrs import frozen

from commutator import Bounds, Operation, PositiveInt, setting
from commutator.errors import RequestError
from commutator.frontend import Call, read_object
from commutator_openai.chat import as_request
from commutator_openai.fields import MAX_INT, Label, OneOf, PromptList
from commutator_openai.pass_through import PassThrough
from commutator_openai.pooling import MAX_INPUTS, Asked, Cut, Pooled, floats, offered, pool
from commutator_openai.responses import Embedding, EmbeddingList, PoolingUsage
from commutator_openai.tolerance import IGNORED_HEADER, ignored_header


@frozen(kw_only=True)
class Truncation:
    """How inputs that are too long are cut, as vLLM says it."""

    truncate_prompt_tokens: Annotated[int, Bounds(minimum=-1, maximum=MAX_INT)] | None = setting(
        "Cut inputs to this many tokens; -1: to what the model takes. Without it, inputs that are "
        "too long are refused.",
        None,
    )
    truncation_side: Annotated[str, OneOf(("left", "right"), {})] | None = setting(
        "Which end of an input is cut off; right by default.", None
    )


@frozen(kw_only=True)
class EmbeddingRequest(Truncation):
    """Body of POST /v1/embeddings."""

    model: str | None = setting("A name from /v1/models; not needed where there is one.", None)
    input: Annotated[tuple[str | list[int], ...], PromptList(maximum=MAX_INPUTS)] = setting(
        "A string, a list of strings, token ids, or a list of such lists; none of them empty."
    )
    encoding_format: Annotated[str, OneOf(("float", "base64"), {})] | None = setting(
        "base64: of little-endian 32-bit floats. float by default.", None
    )
    dimensions: PositiveInt | None = setting(
        "Cut vectors to this length, and normalize them again; for models trained for it.", None
    )
    add_special_tokens: bool | None = setting(
        "Add what the model's tokenizer adds to texts; true by default.", None
    )
    priority: Annotated[int, Bounds(minimum=-MAX_INT, maximum=MAX_INT)] | None = setting(
        "Lower is served earlier; 0 by default.", None
    )
    user: Annotated[str, Label()] | None = setting("A label for the log line.", None)


def cut_of(body: Truncation) -> Cut:
    """What ``body`` says of inputs that are too long. Raises RequestError."""
    tokens = body.truncate_prompt_tokens
    if tokens is None:
        if body.truncation_side is not None:
            raise RequestError("truncation_side: needs truncate_prompt_tokens", "truncation_side")
        return Cut()
    if tokens == 0:
        raise RequestError(
            "truncate_prompt_tokens: expected -1 or at least 1, got 0", "truncate_prompt_tokens"
        )
    side: Literal["left", "right"] = "left" if body.truncation_side == "left" else "right"
    return Cut(side=side, tokens=None if tokens < 0 else tokens)


@frozen
class Embeddings:
    """``strict``: parameters without effect are refused."""

    strict: bool
    pass_through: PassThrough

    async def embeddings(self, call: Call) -> None:
        """POST /v1/embeddings."""
        await call.traced("embeddings", self._serve(call))

    async def _serve(self, call: Call) -> None:
        limit = call.time_limit()
        async with limit:
            data = await read_object(call)
            if offered(call, data, (Operation.EMBED,), foreign=("messages",)) is None:
                await self.pass_through.passed(call, data)
                return
            body, ignored = await as_request(call, data, EmbeddingRequest, strict=self.strict)
            if ignored:
                call.answer_headers[IGNORED_HEADER] = ignored_header(ignored)
            if not all(body.input):
                raise RequestError("input: expected no empty text or list", "input")
            asked = Asked(
                model=body.model,
                operation=Operation.EMBED,
                inputs=body.input,
                cut=cut_of(body),
                dimensions=body.dimensions,
                priority=body.priority,
                user=body.user,
                special_tokens=body.add_special_tokens is not False,
            )
            found = await pool(call, asked, limit)

            def encoded() -> list[bytes]:
                return [_encoded(found, as_base64=body.encoding_format == "base64")]

            parts = await call.off_loop(found.size_bytes, encoded)
        await call.reply(parts)


def _encoded(found: Pooled, *, as_base64: bool) -> bytes:
    usage = PoolingUsage(found.prompt_tokens, found.prompt_tokens)
    data = tuple(
        Embedding("embedding", index, b64encode(row).decode() if as_base64 else floats(row))
        for index, row in enumerate(found.rows)
    )
    return msgspec.json.encode(EmbeddingList("list", data, found.model, usage))
