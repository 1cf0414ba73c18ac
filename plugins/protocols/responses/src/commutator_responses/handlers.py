"""Answers the requests of the Responses API."""

from __future__ import annotations

import secrets
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
from attrs import frozen

from commutator.contract.response_store import ResponseStore
from commutator.errors import RequestError
from commutator.frontend import Call, TimeLimit, answer, conversation_prompt, read_object, salted
from commutator_openai.values import not_served, optional, shown, wrong
from commutator_responses.background import Background
from commutator_responses.compaction import CompactionWriter, read_compaction
from commutator_responses.conversations import REMEMBERED, Conversations, Remembered, Turn, items_of
from commutator_responses.items import Item, with_ids
from commutator_responses.making import Making, make
from commutator_responses.reading import PARAMS, Asked, read_conversation, read_request
from commutator_responses.tools import ServerTools
from commutator_responses.truncation import truncate
from commutator_responses.writer import ResponseWriter, line_responses, new_response

_IGNORED_HEADER = "X-Commutator-Ignored"
_MAX_LISTED = 100
_LISTED = 20
_MAX_REMEMBERED_BYTES = 4 << 20
"""Of JSON that a connection remembers; a longer conversation has to be sent."""
_FALSE = ("false", "0", "")
_encode = msgspec.json.encode
_decode = msgspec.json.decode


@frozen
class Handlers:
    """``store`` None keeps nothing."""

    store: ResponseStore | None
    conversations: Conversations
    background: Background
    server_tools: ServerTools

    async def create(self, call: Call) -> None:
        """POST /v1/responses."""
        await call.traced("chat", self._create(call))

    async def _create(self, call: Call) -> None:
        limit = call.time_limit()
        async with limit:
            making = await self._read(call, await read_object(call))
            if making.asked.in_background:
                await self.background.begin(call, making)
            else:
                await self._make(call, making, limit)

    async def message(self, call: Call) -> None:
        """A message of a WebSocket."""
        await call.traced("chat", self._message(call))

    async def _message(self, call: Call) -> None:
        limit = call.time_limit()
        async with limit:
            body = await read_object(call)
            match body.pop("type", None):
                case "response.create":
                    pass
                case "response.processed":  # says that its client has read the last answer
                    return
                case other:
                    raise wrong("type", f'expected "response.create", got {shown(other)}')
            generates = optional(body, "generate", bool, "true or false") is not False
            body.pop("generate", None)
            making = (await self._read(call, body)).streamed()
            if making.asked.in_background:
                raise not_served("background", "over a WebSocket answers come as they are made")
            if generates:
                await self._make(call, making, limit, in_lines=True)
            else:
                await self._prepare(call, making)

    async def _read(self, call: Call, body: dict[str, Any]) -> Making:
        """Raises RequestError, ``Failure``."""
        turn = await self.conversations.turn(call, body)
        asked = read_request(body, turn.items, server_tools=self.server_tools, earlier=turn.earlier)
        if body.get("truncation") == "auto":
            with _in_our_names():
                await truncate(call, asked)
        _name_ignored(call, asked.ignored)
        key = secrets.token_hex(16)
        _join_session(call, asked, turn, key)
        keeps = asked.stores and self.store is not None
        kept_input = _encode(with_ids(turn.new, key)) if keeps else b""
        self._check_fits(kept_input)
        asked.echo["store"] = keeps
        return Making(key=key, turn=turn, asked=asked, keeps=keeps, input=kept_input)

    async def _make(
        self, call: Call, making: Making, limit: TimeLimit, *, in_lines: bool = False
    ) -> None:
        async def keep(writer: ResponseWriter) -> None:
            if making.keeps and self.store is not None:
                await self.store.put(making.stored(call.principal.name, writer.final))
            _remember(call, making, writer.final)

        await make(call, making, limit, keep, in_lines=in_lines)

    async def _prepare(self, call: Call, making: Making) -> None:
        """``generate: false``: tokenize the prompt, and remember the turn."""
        services, generate = call.services, making.asked.generate
        name, _ = call.text_model(generate.model, generate.session_id)
        assert generate.conversation is not None
        async with services.limiter.of(call.caller()):
            prompts = services.preprocessors[name]
            with _in_our_names():
                await conversation_prompt(
                    prompts, generate.conversation, salted(call.principal, generate.cache_salt)
                )
        response = new_response(making.key, name, making.asked.echo, generate)
        lines, final = line_responses(response)
        if making.keeps and self.store is not None:
            await self.store.put(making.stored(call.principal.name, final))
        _remember(call, making, final)
        await call.end(lines)

    async def input_tokens(self, call: Call) -> None:
        """POST /v1/responses/input_tokens: how long the prompt would be."""
        services, principal = call.services, call.principal
        async with call.time_limit():
            body = await read_object(call)
            turn = await self.conversations.turn(call, body)
            conversation, _, ignored = read_conversation(
                body, turn.items, server_tools=self.server_tools, earlier=turn.earlier
            )
            _name_ignored(call, ignored)
            async with services.limiter.of(call.caller()):
                model = optional(body, "model", str, "a name from /v1/models")
                name, _ = call.text_model(model)
                prompts, salt = services.preprocessors[name], salted(principal, None)
                with _in_our_names():
                    prompt = await conversation_prompt(prompts, conversation, salt)
        counted = {"object": "response.input_tokens", "input_tokens": len(prompt.token_ids)}
        await call.reply([_encode(counted)])

    async def compact(self, call: Call) -> None:
        """POST /v1/responses/compact: what may take the place of a conversation."""
        await call.traced("chat", self._compact(call))

    async def _compact(self, call: Call) -> None:
        limit = call.time_limit()
        async with limit:
            body = await read_object(call)
            turn = await self.conversations.turn(call, body)
            asked = read_compaction(
                body, turn.items, server_tools=self.server_tools, earlier=turn.earlier
            )
            _name_ignored(call, asked.ignored)
            key = secrets.token_hex(16)
            _join_session(call, asked, turn, key)
            await answer(call, asked.generate, lambda _: CompactionWriter(key, turn.items), limit)

    async def retrieve(self, call: Call) -> None:
        """GET /v1/responses/ID."""
        streams = call.query.get("stream", "false").lower() not in _FALSE
        after = call.query.get("starting_after")
        if after is not None and not (streams and after.isdecimal() and len(after) < 10):  # noqa: PLR2004 - fits
            text = f"expected a number of sequence, with stream=true, got {shown(after)}"
            raise wrong("starting_after", text)
        found = await self.conversations.found(call)
        if streams:
            await self.background.follow(call, found, -1 if after is None else int(after))
        else:
            await call.reply([found.response])

    async def delete(self, call: Call) -> None:
        """DELETE /v1/responses/ID."""
        await self.conversations.delete(call)
        name = call.parts["id"]
        self.background.forget(call.principal.name, name)
        await call.reply([_encode({"id": name, "object": "response", "deleted": True})])

    async def cancel(self, call: Call) -> None:
        """POST /v1/responses/ID/cancel."""
        found = await self.conversations.found(call)
        if not _decode(found.response).get("background"):
            raise not_served(
                "id",
                "only a response in the background can be cancelled; close its connection instead",
            )
        if found.maker is not None:
            cancelled = await self.background.cancel(found)
            found = cancelled or await self.conversations.found(call)
        await call.reply([found.response])

    async def input_items(self, call: Call) -> None:
        """GET /v1/responses/ID/input_items: what it answers, those of earlier turns as well."""
        found = await self.conversations.history(call, call.parts["id"], "id")
        items = [*items_of(found[:-1]), *_decode(found[-1].input)]
        await call.reply([_encode(_page(items, call.query))])

    def _check_fits(self, data: bytes) -> None:
        if self.store is not None and len(data) > self.store.max_bytes:
            raise wrong(
                "store",
                f"the input has {len(data)} bytes and {self.store.max_bytes} are kept here for all "
                "responses together; send store: false",
            )


def _remember(call: Call, making: Making, final: bytes) -> None:
    """A connection knows its last response, stored or not."""
    if call.connection is None:
        return
    before: Remembered | None = call.connection.pop(REMEMBERED, None)
    size = len(call.body) + len(final)
    if before is not None and before.id == making.turn.previous:
        size += before.size_bytes
    if size <= _MAX_REMEMBERED_BYTES:
        items = [*making.turn.items, *_decode(final)["output"]]
        session = making.asked.generate.session_id
        call.connection[REMEMBERED] = Remembered(making.id, items, session, size)


def _join_session(call: Call, asked: Asked, turn: Turn, key: str) -> None:
    """The session by which routing knows the conversation; one that is kept has one anyway.

    The body's comes first, then that of the client's headers.
    """
    generate = asked.generate
    named = generate.session_id or call.caller().session_id
    own = f"resp_{key}" if asked.stores else None
    generate.session_id = named or turn.session or own


def _page(items: Sequence[Item], query: Mapping[str, str]) -> dict[str, Any]:
    """One page of a list, as ``query`` wants it: the newest first unless it says otherwise."""
    order, limit = query.get("order", "desc"), query.get("limit", str(_LISTED))
    if order not in ("asc", "desc"):
        raise wrong("order", f'expected "asc" or "desc", got {shown(order)}')
    if not limit.isdecimal() or not 1 <= int(limit[:9]) <= _MAX_LISTED:
        raise wrong("limit", f"expected an integer from 1 to {_MAX_LISTED}, got {shown(limit)}")
    ordered = [*items] if order == "asc" else [*reversed(items)]
    if (after := query.get("after")) is not None:
        places = [place for place, item in enumerate(ordered) if item.get("id") == after]
        if not places:
            raise wrong("after", f"{shown(after)} is no item of this list")
        ordered = ordered[places[0] + 1 :]
    page = ordered[: int(limit)]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else "",
        "last_id": page[-1]["id"] if page else "",
        "has_more": len(page) < len(ordered),
    }


@contextmanager
def _in_our_names() -> Generator[None]:
    """Errors of what all protocols share name fields as this one does."""
    try:
        yield
    except RequestError as error:
        error.rename(PARAMS)
        raise


def _name_ignored(call: Call, ignored: Sequence[str]) -> None:
    if ignored:
        call.answer_headers[_IGNORED_HEADER] = ", ".join(one[:64] for one in ignored[:32])
