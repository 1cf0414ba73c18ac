"""An event loop on its own thread, for code that runs without one."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

ResultT = TypeVar("ResultT")


class EventLoopThread:
    """Runs from creation until ``close``. Any thread except its own may call any method."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, ResultT]) -> ResultT:
        """Run a coroutine in the loop and wait for its result. Raises its errors."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def soon(self, call: Callable[[], object]) -> None:
        """Run ``call`` in the loop, without waiting. Does nothing after ``close``."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(call)

    def close(self) -> None:
        """Cancel the tasks in the loop, and end the thread."""
        self.soon(self._loop.stop)
        self._thread.join()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.get_loop().run_forever()
