"""A front door that starts asks one that runs what the workers' caches hold.

Each front door tells what it knows on a Unix socket of its own, beside those of the others: whoever
connects gets the format of each prefix index, a frame for each worker in it, and an end. So
nothing else waits for more than one worker's blocks at a time. Each worker's knowledge stands for
itself: what came whole counts, also when the rest does not come.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Any

import msgspec

from commutator.engine.wire import MAX_FRAME_BYTES, pack
from commutator.routing.cache_view import CacheView
from commutator.routing.index_snapshot import IndexFormat, WorkerSnapshot

__all__ = ["INDEX_SUFFIX", "IndexSharing", "index_frames"]

log = logging.getLogger(__name__)

INDEX_SUFFIX = ".index"
"""Of the sockets that front doors ask each other on."""
_LENGTH_BYTES = 4
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(WorkerSnapshot)
_SILENCE_S = 2.0
"""A front door that sends nothing for so long is asked no further."""


class IndexSharing:
    """One front door's side, for its ``views`` by name, at ``socket``; others are beside it."""

    def __init__(
        self, views: Mapping[str, CacheView], socket: Path, silence_s: float = _SILENCE_S
    ) -> None:
        self._views = views
        self._socket = socket
        self._silence_s = silence_s
        self._server: asyncio.Server | None = None

    async def start_warm(self) -> None:
        """Take over what the first that answers knows; to be called before any worker is added.

        Never fails: without an answer, what the workers can replay must do.
        """
        others = [path for path in sorted(self._socket.parent.glob(f"*{INDEX_SUFFIX}"))
                  if path != self._socket]  # fmt: skip
        if not self._views or not others:
            return
        for path in others:
            started_s = time.monotonic()
            taken: list[WorkerSnapshot] = []
            try:
                await self._ask(path, taken)
            except (OSError, EOFError, ValueError) as error:  # TimeoutError is an OSError
                log.warning("%s did not tell all it knows of the caches: %s",
                            path.stem, str(error) or "no answer")  # fmt: skip
            else:
                log.info(
                    "%s told of %d workers' caches, %d blocks, in %.3f s",
                    *(path.stem, len(taken), sum(worker.blocks for worker in taken)),
                    time.monotonic() - started_s,
                )
                return
        log.warning("no other front door told all it knows of the workers' caches: the rest is "
                    "what the workers can replay")  # fmt: skip

    async def _ask(self, path: Path, taken: list[WorkerSnapshot]) -> None:
        refused: set[str] = set()
        async with aclosing(index_frames(path, self._silence_s)) as frames:
            async for frame in frames:
                match frame:
                    case ["format", str(name), found]:
                        if (problem := self._unlike(name, found)) is not None:
                            log.warning("what %s knows of %s is left out: %s",
                                        path.stem, name, problem)  # fmt: skip
                            refused.add(name)
                    case ["worker", str(name), bytes(packed)]:
                        if name in self._views and name not in refused:
                            snapshot = _decoder.decode(packed)
                            self._views[name].restore(snapshot)
                            taken.append(snapshot)
                    case ["end"]:
                        return
                    case _:
                        raise ValueError(f"an unknown frame {str(frame)[:60]}")

    def _unlike(self, name: str, packed: Any) -> str | None:
        """Why an index of this format is of no use here."""
        view = self._views.get(name)
        if view is None:
            return "there is no such model here"
        found = msgspec.convert(packed, IndexFormat)
        if found != view.index.format:
            return f"it has {found}, and {view.index.format} is needed"
        return None

    async def serve(self) -> None:
        """Every worker that there is has been added: tell whoever asks, until ``close``."""
        for view in self._views.values():
            view.forget_snapshots()
        self._server = await asyncio.start_unix_server(self._tell, self._socket)

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
            with suppress(FileNotFoundError):
                self._socket.unlink()

    async def _tell(self, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            for name, view in self._views.items():
                writer.write(pack(["format", name, view.index.format]))
                for worker_id in view.publishing():
                    if (snapshot := view.snapshot(worker_id)) is None:
                        continue  # it went while another was told of
                    frame = pack(["worker", name, _encoder.encode(snapshot)])
                    if len(frame) > MAX_FRAME_BYTES:
                        log.warning("worker %s holds too much to tell of in one message: %d bytes",
                                    worker_id, len(frame))  # fmt: skip
                        continue
                    writer.write(frame)
                    async with asyncio.timeout(self._silence_s):
                        await writer.drain()
                    await asyncio.sleep(0)  # requests come first
            writer.write(pack(["end"]))
            async with asyncio.timeout(self._silence_s):
                await writer.drain()
        except OSError as error:
            log.info("a front door that asked what the caches hold went away: %s", error)
        finally:
            writer.close()


async def index_frames(path: Path, silence_s: float) -> AsyncGenerator[Any, None]:
    """What a front door tells there. Raises OSError, EOFError, or ValueError for no frames."""
    async with asyncio.timeout(silence_s):
        reader, writer = await asyncio.open_unix_connection(path)
    try:
        while True:
            async with asyncio.timeout(silence_s):
                size_bytes = int.from_bytes(await reader.readexactly(_LENGTH_BYTES), "big")
            if size_bytes > MAX_FRAME_BYTES:
                raise ValueError(f"a frame of {size_bytes} bytes")
            async with asyncio.timeout(silence_s):
                body = await reader.readexactly(size_bytes)
            yield msgspec.msgpack.decode(body)
    finally:
        writer.close()
