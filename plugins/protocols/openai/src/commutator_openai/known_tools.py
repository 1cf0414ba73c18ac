"""Tools that came before: agents send the same ones with each turn, and reading them costs most.

The text of a body's ``tools`` is looked up as it is. Only what was read whole and without a mistake
is known, and each principal knows only what it sent itself.
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
from commutator_openai.requests import ToolSpec

T = TypeVar("T")

_SHORTEST = 512
"""Bytes of tools that are worth it."""
_MOST_BYTES = 8 << 20
"""Of all texts; what is read of them takes some five times as much."""
_LARGEST = 1 << 20


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


class KnownTools:
    """By owner and text. Any thread may use it."""

    def __init__(self, most_bytes: int = _MOST_BYTES) -> None:
        self._most_bytes = most_bytes
        self._lock = threading.Lock()
        # It guards the following.
        self._known: OrderedDict[tuple[str, bytes], ReadTools] = OrderedDict()
        self._bytes = 0

    def read(
        self,
        owner: str,
        structured: Callable[[dict[str, Any]], tuple[T, tuple[str, ...]]],
        body: bytes,
    ) -> tuple[T, tuple[str, ...]]:
        """What ``structured`` makes of a body: a request, and what of it is ignored.

        It gets no tools that ``owner`` sent before; the request has them then as they were read.
        Raises RequestError for a body that is no JSON, and what ``structured`` does.
        """
        found = _without_tools(body)
        if found is None:
            return structured(parse_object(body))
        others, text = found
        key = (owner, text)
        if (tools := self._find(key)) is not None:
            request, ignored = structured(_decoded(others))
            cast("Any", request).tools = tools
            return request, ignored
        request, ignored = structured(parse_object(body))
        if not any(name.startswith("tools") for name in ignored):
            self._keep(key, cast("Any", request).tools or ())
        return request, ignored

    def _find(self, key: tuple[str, bytes]) -> ReadTools | None:
        with self._lock:
            found = self._known.get(key)
            if found is not None:
                self._known.move_to_end(key)
            return found

    def _keep(self, key: tuple[str, bytes], specs: Sequence[ToolSpec]) -> None:
        """Those used longest ago leave for it."""
        with self._lock:
            if key in self._known or len(key[1]) > _LARGEST:
                return
            self._known[key] = ReadTools(specs)
            self._bytes += len(key[1])
            while self._bytes > self._most_bytes:
                (_, text), _ = self._known.popitem(last=False)
                self._bytes -= len(text)


_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])


def _without_tools(body: bytes) -> tuple[dict[str, msgspec.Raw], bytes] | None:
    """The other fields of a body, and the text of its tools; None: they are not worth it."""
    if len(body) < _SHORTEST:
        return None
    try:
        fields = _fields.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None  # the error comes from reading the whole body
    tools = fields.pop("tools", None)
    if tools is None or len(tools) < _SHORTEST:
        return None
    return fields, bytes(tools)


def _decoded(fields: dict[str, msgspec.Raw]) -> dict[str, Any]:
    """What they say. Raises RequestError."""
    names = map(msgspec.json.encode, fields)
    pairs = zip(names, fields.values(), strict=True)
    return parse_object(b"{%b}" % b",".join(b"%b:%b" % pair for pair in pairs))
