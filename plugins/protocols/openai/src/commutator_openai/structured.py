"""Reads a body by one of two converters: a quick one, and one that names every mistake."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeVar

from commutator.frontend import INLINE_BYTES, Call

T = TypeVar("T")


class WrongSomewhereError(Exception):
    """A quick converter refused a body, and does not say why."""


async def read_structured(
    call: Call, quickly: Callable[[bytes], T], thoroughly: Callable[[bytes], T]
) -> T:
    """The body as ``quickly`` reads it, or else as ``thoroughly`` does, which names each mistake.

    Raises what they raise but for ``WrongSomewhereError`` of ``quickly``, and what ``Call.read``
    does.
    """
    async with call.room_for_body():
        body = await call.read()
        try:
            if len(body) <= INLINE_BYTES:
                return quickly(body)
            return await call.services.work.run(partial(quickly, body))
        except WrongSomewhereError:
            size = max(len(body), INLINE_BYTES + 1)  # finding every mistake takes much longer
            return await call.off_loop(size, partial(thoroughly, body))
