"""Answers the requests of the Responses API."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from attrs import frozen

from commutator.contract.answer import Failure
from commutator.contract.response_store import ResponseStore, StoredResponse
from commutator.frontend import (
    Call,
    Plan,
    answer,
    conversation_prompt,
    read_object,
    salted,
    traced,
)
from commutator_responses.items import Item, input_items, with_ids
from commutator_responses.reading import Asked, read_conversation, read_request
from commutator_responses.tools import ServerTools
from commutator_responses.truncation import fitted, prompt_limit
from commutator_responses.values import not_served, optional, shown, wrong
from commutator_responses.writer import ResponseWriter

__all__ = ["Handlers"]

_IGNORED_HEADER = "X-Commutator-Ignored"
_MAX_LISTED = 100
_LISTED = 20
_encode = msgspec.json.encode
_decode = msgspec.json.decode


@frozen
class _Turn:
    """What a request adds to which conversation."""

    items: Sequence[Item]
    """All, those of earlier turns first."""
    earlier: int = 0
    """How many are of earlier turns."""
    previous: StoredResponse | None = None
    """The response that it continues."""

    @property
    def new(self) -> Sequence[Item]:
        return self.items[self.earlier :]


@frozen
class Handlers:
    """``store`` None keeps nothing."""

    store: ResponseStore | None
    server_tools: ServerTools

    async def create(self, call: Call) -> None:
        """POST /v1/responses."""
        await traced("chat", call.headers, {"http.route": call.path}, self._create(call))

    async def _create(self, call: Call) -> None:
        limit = call.time_limit()
        async with limit:
            body = await read_object(call)
            turn = await self._turn(call, body)
            asked = read_request(
                body, turn.items, server_tools=self.server_tools, earlier=turn.earlier
            )
            if body.get("truncation") == "auto":
                await _truncate(call, asked)
            _name_ignored(call, asked.ignored)
            key = secrets.token_hex(16)
            _join_session(call, asked, turn, key)
            keeps = asked.stores and self.store is not None
            kept_input = _encode(with_ids(turn.new, key)) if keeps else b""
            self._check_fits(kept_input)
            asked.echo["store"] = keeps
            made: list[ResponseWriter] = []

            def writer(plan: Plan) -> ResponseWriter:
                wanted = asked.generate.top_logprobs is not None
                one = ResponseWriter(key, plan, asked.toolbox, asked.echo, logprobs=wanted)
                made.append(one)
                return one

            async def written() -> None:
                if keeps and self.store is not None:
                    stored = StoredResponse(
                        id=f"resp_{key}",
                        owner=call.principal.name,
                        previous=None if turn.previous is None else turn.previous.id,
                        session=asked.generate.session_id,
                        input=kept_input,
                        response=made[0].final,
                    )
                    await self.store.put(stored)

            await answer(call, asked.generate, writer, limit, written=written)

    async def input_tokens(self, call: Call) -> None:
        """POST /v1/responses/input_tokens: how long the prompt would be."""
        services, principal = call.services, call.principal
        async with call.time_limit():
            body = await read_object(call)
            turn = await self._turn(call, body)
            conversation, _, ignored = read_conversation(
                body, turn.items, server_tools=self.server_tools, earlier=turn.earlier
            )
            _name_ignored(call, ignored)
            async with services.limiter.of(call.caller()):
                model = optional(body, "model", str, "a name from /v1/models")
                name, _ = services.text_model(model, principal)
                prompts, salt = services.preprocessors[name], salted(principal, None)
                prompt = await conversation_prompt(prompts, conversation, salt)
        counted = {"object": "response.input_tokens", "input_tokens": len(prompt.token_ids)}
        await call.reply([_encode(counted)])

    async def retrieve(self, call: Call) -> None:
        """GET /v1/responses/ID."""
        for name in ("stream", "starting_after"):
            if call.query.get(name, "false").lower() not in ("false", "0", ""):
                raise not_served(name, "a response is streamed once, as it is made")
        found = await self._found(call)
        await call.reply([found.response])

    async def delete(self, call: Call) -> None:
        """DELETE /v1/responses/ID."""
        name = call.parts["id"]
        if self.store is None or not await self.store.delete(call.principal.name, name):
            raise _absent(name, "id")
        await call.reply([_encode({"id": name, "object": "response", "deleted": True})])

    async def cancel(self, call: Call) -> None:
        """POST /v1/responses/ID/cancel."""
        await self._found(call)
        raise not_served(
            "id", "only a response in the background can be cancelled; close its connection instead"
        )

    async def input_items(self, call: Call) -> None:
        """GET /v1/responses/ID/input_items: what it answers, those of earlier turns as well."""
        found = await self._history(call, call.parts["id"], "id")
        items = [*_items_of(found[:-1]), *_decode(found[-1].input)]
        await call.reply([_encode(_page(items, call.query))])

    # ------------------------------------------------------------------ the store

    async def _turn(self, call: Call, body: Mapping[str, Any]) -> _Turn:
        """Raises RequestError, and ``Failure`` for 404."""
        name = optional(body, "previous_response_id", str, "the id of a response")
        items = await self._resolved(call, input_items(body.get("input")))
        if not name:
            return _Turn(items)
        if self.store is None:
            raise not_served(
                "previous_response_id", "no responses are kept here; send the items themselves"
            )
        found = await self._history(call, name, "previous_response_id")
        earlier = _items_of(found)
        return _Turn([*earlier, *items], len(earlier), found[-1])

    async def _history(self, call: Call, name: str, param: str) -> list[StoredResponse]:
        """The whole conversation up to a response. Raises ``Failure`` for 404."""
        store = self.store
        found = [] if store is None else await store.history(call.principal.name, name)
        if not found:
            raise _absent(name, param)
        if (lost := found[0].previous) is not None:
            raise _absent(lost, param, f", which {name} continues")
        return found

    async def _found(self, call: Call) -> StoredResponse:
        name = call.parts["id"]
        found = [] if self.store is None else await self.store.history(call.principal.name, name, 1)
        if not found:
            raise _absent(name, "id")
        return found[0]

    async def _resolved(self, call: Call, items: Sequence[Item]) -> list[Item]:
        """With the items that others only refer to: those of responses that are kept."""
        return [
            await self._referred(call, item.get("id"), f"input.{number}.id")
            if item["type"] == "item_reference"
            else item
            for number, item in enumerate(items)
        ]

    async def _referred(self, call: Call, name: Any, path: str) -> Item:
        """An item by its id, in which is the key of its response."""
        if not isinstance(name, str):
            raise wrong(path, f"expected the id of an item, got {shown(name)}")
        _, _, rest = name.partition("_")
        owner, response_id = call.principal.name, f"resp_{rest.partition('_')[0]}"
        found = [] if self.store is None else await self.store.history(owner, response_id, 1)
        item: Item
        for item in _items_of(found):
            if item.get("id") == name:
                return item
        raise _absent(name, path)

    def _check_fits(self, data: bytes) -> None:
        if self.store is not None and len(data) > self.store.max_bytes:
            raise wrong(
                "store",
                f"the input has {len(data)} bytes and {self.store.max_bytes} are kept here for all "
                "responses together; send store: false",
            )


def _absent(name: str, param: str, more: str = "") -> Failure:
    kind = "item" if param.startswith("input") else "response"
    text = f"{param}: {kind} {name[:100]!r}{more} is not kept here: it was not stored, it was "
    text += "deleted, or it was not used for long"
    return Failure(404, text, f"{kind}_not_found", param)


def _items_of(turns: Sequence[StoredResponse]) -> list[Item]:
    """Input and output, turn by turn."""
    found: list[Item] = []
    for turn in turns:
        found += _decode(turn.input)
        found += _decode(turn.response)["output"]
    return found


def _join_session(call: Call, asked: Asked, turn: _Turn, key: str) -> None:
    """The session by which routing knows the conversation; one that is kept has one anyway.

    The body's comes first, then that of the client's headers.
    """
    generate = asked.generate
    named = generate.session_id or call.caller().session_id
    kept = None if turn.previous is None else turn.previous.session
    own = f"resp_{key}" if asked.stores else None
    generate.session_id = named or kept or own


async def _truncate(call: Call, asked: Asked) -> None:
    """Leave out the oldest turns, and say so, where the conversation is too long."""
    services, generate, before = call.services, asked.generate, asked.generate.conversation
    assert before is not None
    async with services.limiter.of(call.caller()):
        name, _ = services.text_model(generate.model, call.principal)
        limit = prompt_limit(services.max_model_len(name, call.principal), generate.max_tokens)
        salt = salted(call.principal, generate.cache_salt)
        generate.conversation = await fitted(services.preprocessors[name], before, salt, limit)
    if generate.conversation is not before:
        asked.ignored.append("input")


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


def _name_ignored(call: Call, ignored: Sequence[str]) -> None:
    if ignored:
        call.answer_headers[_IGNORED_HEADER] = ", ".join(one[:64] for one in ignored[:32])
