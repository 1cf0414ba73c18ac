"""The prefix index of one front door handed to another that starts.

Engines replay recent event messages, by default 10,000, so a front door that starts after that has
lost the events of the oldest blocks, which are the prompts that most requests share. Their later
blocks cannot be placed without them. Measured with one worker of 14,000 blocks, four shared
prompts and one message a request: up to 10,000 messages a replay brings every block back (1,500
messages in 0.6 s, 9,000 in 2.4 s); after 12,000 messages it takes 4.2 s and brings back none,
while a snapshot brings all 14,000 in less than 0.1 s. A block that is in constant use causes no
further events, so no length of buffer is enough.

A front door may be of the version before or after. One that writes several versions of a snapshot
says so in its first frame, a "format" with ``newest``; one that asks answers with those that it
reads, ["versions", oldest, newest], and gets the highest common one. One that says nothing, as
those before there was a choice, or behind a hub, which only passes parts on, gets the oldest.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Any

import msgspec
from attrs import frozen

from commutator.frames import MAX_FRAME_BYTES, Versions, pack, versions_in
from commutator.routing.prefix_index.hashing import sequence_hashes
from commutator.routing.prefix_index.indexer import KvIndexer, WorkerSnapshot

log = logging.getLogger(__name__)

INDEX_SUFFIX = ".index"
"""Of the sockets on which front doors ask each other."""

_LENGTH_BYTES = 4
_MOST_BYTES = MAX_FRAME_BYTES - 4096
"""Of a snapshot; the rest is for what frames say beside it."""
_SILENCE_S = 2.0
"""Seconds without a frame after which the next front door is asked."""

_ASK_S = 0.2
"""For which one that asks is waited for, to say what it reads."""


@frozen
class SnapshotCodec:
    """One version of a snapshot."""

    encode: Callable[[WorkerSnapshot], bytes]
    decode: Callable[[bytes], WorkerSnapshot]
    """Raises ValueError for what is no snapshot of this version."""


CODECS: Mapping[int, SnapshotCodec] = {
    2: SnapshotCodec(
        msgspec.msgpack.Encoder().encode, msgspec.msgpack.Decoder(WorkerSnapshot).decode
    )
}
"""By version, without a gap: the newest, and the one before it."""


@frozen
class IndexFormat:
    """Snapshots can be exchanged between indexes that name blocks alike."""

    block_size: int
    hash_check: int
    """The sequence hash of one fixed block; differs where blocks are hashed differently."""
    version: int

    @classmethod
    def of(cls, block_size: int, version: int) -> IndexFormat:
        return cls(block_size, sequence_hashes(range(block_size), block_size)[0], version)


class IndexSharing:
    """Takes snapshots from another front door at the start, and serves them afterwards.

    The sockets of all front doors of one deployment are in one folder.
    """

    def __init__(
        self,
        indexers: Mapping[str, KvIndexer],
        socket: Path,
        silence_s: float = _SILENCE_S,
        codecs: Mapping[int, SnapshotCodec] = CODECS,
    ) -> None:
        """``indexers`` by a name that is the same in all front doors; ``socket`` is our own."""
        self._codecs = codecs
        self._versions = Versions(min(codecs), max(codecs))
        self._indexers = indexers
        self._socket = socket
        self._silence_s = silence_s
        self._server: asyncio.Server | None = None

    async def start_warm(self) -> bool:
        """Take the snapshots of the first front door that answers; before any worker is added.

        Never fails: without an answer, which it returns, the index begins with what the workers
        can replay, or with that of a front door elsewhere.
        """
        others = [path for path in sorted(self._socket.parent.glob(f"*{INDEX_SUFFIX}"))
                  if path != self._socket]  # fmt: skip
        if not self._indexers or not others:
            return False
        for path in others:
            frames_of = index_frames(path, self._silence_s, self._versions)
            async with aclosing(frames_of) as frames:
                if await self.take(path.stem, frames):
                    return True
        log.warning("no other front door sent its complete prefix index: the rest is what the "
                    "workers can replay")  # fmt: skip
        return False

    async def take(self, door: str, frames: AsyncIterator[Any]) -> bool:
        """Take the snapshots that a front door sends. False when they are not complete."""
        started_s = time.monotonic()
        taken: list[WorkerSnapshot] = []
        try:
            await self._take(door, frames, taken)
        except (OSError, EOFError, ValueError) as error:  # TimeoutError is an OSError
            log.warning("%s sent no complete prefix index: %s", door, str(error) or "no answer")
            return False
        log.info(
            "%s sent the prefix index of %d workers, %d blocks, in %.3f s",
            *(door, len(taken), sum(worker.blocks for worker in taken)),
            time.monotonic() - started_s,
        )
        return True

    async def serve(self) -> None:
        """Answer other front doors until ``close``; once every worker has been added."""
        for indexer in self._indexers.values():
            indexer.forget_snapshots()
        self._server = await asyncio.start_unix_server(self._answer, self._socket)

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
            with suppress(FileNotFoundError):
                self._socket.unlink()

    async def _take(
        self, door: str, frames: AsyncIterator[Any], taken: list[WorkerSnapshot]
    ) -> None:
        codecs: dict[str, SnapshotCodec] = {}
        async for frame in frames:
            match frame:
                case ["format", str(name), found]:
                    format_ = msgspec.convert(found, IndexFormat)
                    if (problem := self._incompatible(name, format_)) is None:
                        codecs[name] = self._codecs[format_.version]
                        continue
                    log.warning("the prefix index of %s for %s is ignored: %s",
                                door, name, problem)  # fmt: skip
                case ["worker", str(name), bytes(packed)]:
                    if name in codecs:
                        snapshot = codecs[name].decode(packed)
                        self._indexers[name].restore(snapshot)
                        taken.append(snapshot)
                case ["end"]:
                    return
                case _:
                    raise ValueError(f"unknown frame {str(frame)[:60]}")
        raise EOFError("it ended before the end")

    def _incompatible(self, name: str, found: IndexFormat) -> str | None:
        """Why an index of this format cannot be used; None if it can."""
        indexer = self._indexers.get(name)
        if indexer is None:
            return "there is no such model here"
        if found.version not in self._codecs:
            return f"it is of version {found.version}, and {self._versions} is read here"
        needed = IndexFormat.of(indexer.index.block_size, found.version)
        return None if found == needed else f"it has {found}, and {needed} is needed"

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            version = self._versions.oldest
            if version != self._versions.newest and self._indexers:
                kind, name, found = next(self.parts())
                writer.write(pack([kind, name, {**found, "newest": self._versions.newest}]))
                version = await self._asked(reader)
            for part in self.parts(version):
                writer.write(pack(part))
                async with asyncio.timeout(self._silence_s):
                    await writer.drain()
                await asyncio.sleep(0)  # requests come first
        except OSError as error:
            log.info("a front door that asked for the prefix index disconnected: %s", error)
        finally:
            writer.close()

    async def _asked(self, reader: asyncio.StreamReader) -> int:
        """The highest version that the other end reads; the oldest when it does not say so."""
        theirs = None
        with suppress(OSError, EOFError, ValueError):  # TimeoutError is an OSError
            match await _frame(reader, _ASK_S):
                case ["versions", *versions]:
                    theirs = self._versions.common(versions_in(versions))
        return self._versions.oldest if theirs is None else theirs

    def parts(self, version: int | None = None) -> Iterator[list[Any]]:
        """The frames of our own index, each of the moment in which it is taken.

        ``version`` is by default the oldest, which every neighbour reads.
        """
        version = self._versions.oldest if version is None else version
        encode = self._codecs[version].encode
        for name, indexer in self._indexers.items():
            format_ = IndexFormat.of(indexer.index.block_size, version)
            yield ["format", name, msgspec.to_builtins(format_)]
            for worker_id in sorted(indexer.exact):
                if (snapshot := indexer.snapshot(worker_id)) is None:
                    continue  # it was removed while another one was sent
                packed = encode(snapshot)
                if len(packed) > _MOST_BYTES:
                    log.warning("worker %s: its index is too large to send, %d bytes",
                                worker_id, len(packed))  # fmt: skip
                    continue
                yield ["worker", name, packed]
        yield ["end"]


async def index_frames(
    path: Path, silence_s: float, versions: Versions
) -> AsyncGenerator[Any, None]:
    """The frames that the front door at ``path`` sends to one that reads ``versions``.

    Raises OSError or EOFError when the connection fails, and ValueError for what is no frame.
    """
    async with asyncio.timeout(silence_s):
        reader, writer = await asyncio.open_unix_connection(path)
    try:
        while True:
            match frame := await _frame(reader, silence_s):
                case ["format", _, {"newest": int()}]:  # it comes again, of the version chosen
                    writer.write(pack(["versions", *versions]))
                case _:
                    yield frame
    finally:
        writer.close()


async def _frame(reader: asyncio.StreamReader, silence_s: float) -> Any:
    """The next frame. Raises OSError, EOFError and ValueError as ``index_frames``."""
    async with asyncio.timeout(silence_s):
        size_bytes = int.from_bytes(await reader.readexactly(_LENGTH_BYTES), "big")
    if size_bytes > MAX_FRAME_BYTES:
        raise ValueError(f"a frame of {size_bytes} bytes")
    async with asyncio.timeout(silence_s):
        body = await reader.readexactly(size_bytes)
    return msgspec.msgpack.decode(body)
