"""Tools and messages that came before: agents send the same ones with each turn.

The text of a body's ``tools``, and of each of its messages, is looked up as it is. Only what was
read whole and without a mistake is known, and each principal knows only what it sent itself.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, TypeVar, cast

import msgspec

from commutator.contract.conversation import Tool
from commutator.errors import RequestError
from commutator.frontend import parse_object
from commutator_openai.requests import ChatMessage, ToolSpec

T = TypeVar("T")

_SHORTEST = 512
"""Bytes of tools, and of a whole body, that are worth it."""
_MOST_BYTES = 64 << 20
"""Of memory."""
_OF_TOOLS = 6
"""Bytes of memory that a byte of tools takes, as text and as many small objects."""
_OF_MESSAGE = 2
"""The same of messages, which are mostly text."""
_BESIDE = 1_500
"""Bytes that a message takes beside them."""
_LARGEST = 1 << 20
"""Bytes of the longest text that is kept."""


class ReadTools(tuple[ToolSpec, ...]):  # noqa: SLOT001 - it remembers what is made of it
    """The tools of a body, and what a conversation has of them."""

    @cached_property
    def tools(self) -> list[Tool]:
        """Not to be changed. Raises RequestError for two of the same name."""
        return tools_of(self)


def tools_of(specs: Sequence[ToolSpec]) -> list[Tool]:
    """Raises RequestError for two of the same name."""
    tools = [
        Tool(
            name=one.function.name,
            description=one.function.description or "",
            parameters=one.function.parameters or {},
            strict=bool(one.function.strict),
        )
        for one in specs
    ]
    if len({tool.name for tool in tools}) < len(tools):
        raise RequestError("tools: expected a name of its own for each", "tools")
    return tools


class KnownParts:
    """By owner and text. Any thread may use it."""

    def __init__(self, most_bytes: int = _MOST_BYTES) -> None:
        self._most_bytes = most_bytes
        self._lock = threading.Lock()
        # It guards the following.
        self._known: OrderedDict[tuple[str, bytes], ReadTools | ChatMessage] = OrderedDict()
        self._bytes = 0

    def read(
        self,
        owner: str,
        structured: Callable[[dict[str, Any]], tuple[T, tuple[str, ...]]],
        body: bytes,
    ) -> tuple[T, tuple[str, ...]]:
        """What ``structured`` makes of a body: a request, and what of it is ignored.

        It gets no tools that ``owner`` sent before, and messages that ``owner`` sent before as they
        were read; the request has both, not to be changed. Raises RequestError for a body that is
        no JSON, and what ``structured`` does.
        """
        fields = _fields_of(body)
        if fields is None:
            return structured(parse_object(body))
        tools_text, texts = bytes(fields.get("tools", b"")), _texts_of(fields.get("messages"))
        tools, *messages = self._find(owner, [tools_text, *texts])
        if tools is None and not any(messages):
            data = parse_object(body)
        else:
            if tools is not None:
                del fields["tools"]
            data = _with_known(fields, texts, cast("Any", messages))
        request, ignored = structured(data)
        given = cast("Any", request)
        if tools is not None:
            given.tools = tools
        elif len(tools_text) >= _SHORTEST and not _any_of("tools", ignored):
            self._keep((owner, tools_text), ReadTools(given.tools or ()))
        if texts and not _any_of("messages", ignored):
            for text, one in zip(texts, given.messages, strict=True):
                self._keep((owner, text), one)
        return request, ignored

    def _find(self, owner: str, texts: Sequence[bytes]) -> list[ReadTools | ChatMessage | None]:
        """What is known of each."""
        keys = [(owner, text) for text in texts]
        with self._lock:
            found = [self._known.get(key) for key in keys]
            for key, one in zip(keys, found, strict=True):
                if one is not None:
                    self._known.move_to_end(key)
        return found

    def _keep(self, key: tuple[str, bytes], part: ReadTools | ChatMessage) -> None:
        """Those used longest ago leave for it."""
        with self._lock:
            if key in self._known or len(key[1]) > _LARGEST:
                return
            self._known[key] = part
            self._bytes += _size_of(part, key[1])
            while self._bytes > self._most_bytes:
                (_, text), gone = self._known.popitem(last=False)
                self._bytes -= _size_of(gone, text)


def _size_of(part: ReadTools | ChatMessage, text: bytes) -> int:
    if isinstance(part, ReadTools):
        return _OF_TOOLS * len(text)
    return _OF_MESSAGE * len(text) + _BESIDE


def _any_of(field: str, ignored: Sequence[str]) -> bool:
    return any(name.startswith(field) for name in ignored)


_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])
_list = msgspec.json.Decoder(list[msgspec.Raw])


def _fields_of(body: bytes) -> dict[str, msgspec.Raw] | None:
    """The fields of a body; None: it is too short, or no JSON, of which its reading tells."""
    if len(body) < _SHORTEST:
        return None
    try:
        return _fields.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def _texts_of(messages: msgspec.Raw | None) -> list[bytes]:
    """The text of each; none where they are no list."""
    try:
        return [] if messages is None else [bytes(one) for one in _list.decode(messages)]
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return []


def _with_known(
    fields: dict[str, msgspec.Raw], texts: Sequence[bytes], messages: Sequence[ChatMessage | None]
) -> dict[str, Any]:
    """What the fields say, with the known ones of its messages. Raises RequestError."""
    given: dict[str, bytes | msgspec.Raw] = {**fields}
    if texts:
        new = (text for text, one in zip(texts, messages, strict=True) if one is None)
        given["messages"] = b"[%b]" % b",".join(new)
    names = map(msgspec.json.encode, given)
    pairs = zip(names, given.values(), strict=True)
    data = parse_object(b"{%b}" % b",".join(b"%b:%b" % pair for pair in pairs))
    if texts:
        read = iter(data["messages"])
        data["messages"] = [next(read) if one is None else one for one in messages]
    return data
