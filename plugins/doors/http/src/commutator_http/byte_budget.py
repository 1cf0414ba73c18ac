"""How much large bodies may take together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from commutator.errors import OverloadedError


class ByteBudget:
    """Bytes that large bodies may take together while they are read and parsed.

    Those for which there is no room wait in order of arrival.
    """

    def __init__(self, most_bytes: int, max_waiting: int) -> None:
        self.used_bytes = 0
        self._most_bytes = most_bytes
        self._max_waiting = max_waiting
        self._turns: dict[asyncio.Future[None], int] = {}
        """The bytes that each wants, in order of arrival."""

    @asynccontextmanager
    async def hold(self, size: int) -> AsyncIterator[None]:
        """Hold ``size`` bytes, or all there are if it is more.

        Raises OverloadedError when too many wait.
        """
        size = min(size, self._most_bytes)
        if self._turns or self.used_bytes + size > self._most_bytes:
            await self._wait(size)
        else:
            self.used_bytes += size
        try:
            yield
        finally:
            self._give_back(size)

    async def _wait(self, size: int) -> None:
        if len(self._turns) >= self._max_waiting:
            raise OverloadedError(
                f"{len(self._turns)} large requests wait to be read; try again soon",
                reason="too_many_bodies",
            )
        turn = asyncio.get_running_loop().create_future()
        self._turns[turn] = size
        try:
            await turn
        except asyncio.CancelledError:
            if turn in self._turns:
                del self._turns[turn]
                self._let_in()  # those behind it may want less
            else:
                self._give_back(size)  # its turn had come already
            raise

    def _give_back(self, size: int) -> None:
        self.used_bytes -= size
        self._let_in()

    def _let_in(self) -> None:
        while self._turns:
            turn, size = next(iter(self._turns.items()))
            if self.used_bytes + size > self._most_bytes:
                return
            del self._turns[turn]
            self.used_bytes += size
            if not turn.done():  # a cancelled one gives back as soon as it resumes
                turn.set_result(None)
