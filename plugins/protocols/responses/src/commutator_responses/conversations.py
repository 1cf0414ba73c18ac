"""What a request adds to which conversation: by ids of responses and of items that are kept."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
from attrs import evolve, frozen

from commutator.contract.answer import Failure
from commutator.contract.response_store import ResponseStore, StoredResponse
from commutator.frontend import Call
from commutator_openai.values import not_served, optional, shown, wrong
from commutator_responses.items import Item, input_items
from commutator_responses.writer import failed_response

REMEMBERED = "responses"
"""The name under which a connection has its ``Remembered``."""
_MAKER_GONE = Failure(
    503, "the front door that made it has ended; ask again", "background_door_lost"
)
_encode = msgspec.json.encode
_decode = msgspec.json.decode


@frozen
class Turn:
    """What a request adds to which conversation."""

    items: Sequence[Item]
    """All, those of earlier turns first."""
    earlier: int = 0
    """How many are of earlier turns."""
    previous: str | None = None
    """The id of the response that it continues."""
    session: str | None = None
    """That of the response that it continues."""

    @property
    def new(self) -> Sequence[Item]:
        return self.items[self.earlier :]


@frozen
class Remembered:
    """The last response of a connection, with all that it answered."""

    id: str
    items: Sequence[Item]
    session: str | None
    size_bytes: int
    """About, of the JSON of its items."""


@frozen
class Conversations:
    """``store`` None keeps nothing. ``clock`` is one that all front doors agree on."""

    store: ResponseStore | None
    clock: Callable[[], float] = time.time

    async def turn(self, call: Call, body: Mapping[str, Any]) -> Turn:
        """Raises RequestError, and ``Failure`` for 404."""
        name = optional(body, "previous_response_id", str, "the id of a response")
        items = await self._resolved(call, input_items(body.get("input")))
        if not name:
            return Turn(items)
        last = None if call.connection is None else call.connection.get(REMEMBERED)
        if isinstance(last, Remembered) and last.id == name:
            return Turn([*last.items, *items], len(last.items), name, last.session)
        if self.store is None:
            raise not_served(
                "previous_response_id", "no responses are kept here; send the items themselves"
            )
        found = await self.history(call, name, "previous_response_id")
        if found[-1].maker is not None:
            text = f"response {name} is still being made; wait until it is completed"
            raise wrong("previous_response_id", text)
        earlier = items_of(found)
        return Turn([*earlier, *items], len(earlier), name, found[-1].session)

    async def history(self, call: Call, name: str, param: str) -> list[StoredResponse]:
        """The whole conversation up to a response. Raises ``Failure`` for 404."""
        found = await self._read(call, name, param)
        if (lost := found[0].previous) is not None:
            raise _absent(lost, param, f", which {name} continues")
        return found

    async def found(self, call: Call) -> StoredResponse:
        """The response that the path names. Raises ``Failure`` for 404."""
        return (await self._read(call, call.parts["id"], "id", 1))[-1]

    async def _read(
        self, call: Call, name: str, param: str, limit: int | None = None
    ) -> list[StoredResponse]:
        """At least one; the last is not one whose maker has gone."""
        store = self.store
        owner = call.principal.name
        found = [] if store is None else await store.history(owner, name, limit)
        if found and store is not None and _is_orphaned(last := found[-1], self.clock()):
            assert last.maker is not None
            response = _encode(failed_response(_decode(last.response), _MAKER_GONE))
            await store.replace(evolve(last, response=response, maker=None), last.maker)
            found = await store.history(owner, name, limit)
        if not found:
            raise _absent(name, param)
        return found

    async def delete(self, call: Call) -> None:
        """Forget the response that the path names. Raises ``Failure`` for 404."""
        name = call.parts["id"]
        if self.store is None or not await self.store.delete(call.principal.name, name):
            raise _absent(name, "id")

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
        for item in items_of(found):
            if item.get("id") == name:
                return item
        raise _absent(name, path)


def items_of(turns: Sequence[StoredResponse]) -> list[Item]:
    """Input and output, turn by turn."""
    found: list[Item] = []
    for turn in turns:
        found += _decode(turn.input)
        found += _decode(turn.response)["output"]
    return found


def _is_orphaned(stored: StoredResponse, now_s: float) -> bool:
    """Its maker was not heard of for as long as it had promised."""
    return stored.maker is not None and stored.until_unix_s < now_s


def _absent(name: str, param: str, more: str = "") -> Failure:
    kind = "item" if param.startswith("input") else "response"
    text = f"{param}: {kind} {name[:100]!r}{more} is not kept here: it was not stored, it was "
    text += "deleted, or it was not used for long"
    return Failure(404, text, f"{kind}_not_found", param)
