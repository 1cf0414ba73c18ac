"""The client of a registry server. It reconnects, then reports the changes that it missed."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any, TypeVar

import msgspec

from commutator.backoff import Backoff
from commutator.contract.registry import (
    CLAIM_TTLS,
    Change,
    Document,
    Registry,
    WorkerDown,
    WorkerUp,
    check_document,
)
from commutator.contract.worker import Role, WorkerRecord
from commutator.errors import NameTakenError, RegistryError
from commutator.frames import FrameProtocol, Questions, kind_of
from commutator.registry.changes import difference
from commutator.registry.server import SERVICE
from commutator.registry.unready import RunState
from commutator.trust import ClientGate, Right, RunSecret, TlsError, host_and_port
from commutator.trust import connect as connect_wire

log = logging.getLogger(__name__)

AnswerT = TypeVar("AnswerT")

_ANSWER_TIMEOUT_S = 5.0
RECONNECT = Backoff(first_s=0.05, longest_s=2.0)
"""Between connections to the registry's server, or the hub."""


async def connect(
    address: str,
    on_frame: Callable[[list[Any]], None],
    on_lost: Callable[[], None],
    secret: RunSecret | None = None,
) -> FrameProtocol:
    """A connection to the server at "host:port", of the run of ``secret``; by default our own.

    Raises RegistryError, also when the server does not belong to that run.
    """
    host, port = host_and_port(address)
    gate = ClientGate(SERVICE, secret, expects=Right.SERVE_REGISTRY)
    protocol = FrameProtocol(on_frame, lambda _: on_lost(), gate)
    try:
        async with asyncio.timeout(_ANSWER_TIMEOUT_S):
            await connect_wire(lambda: protocol, host, port)
            await protocol.proven()
    except (OSError, TlsError) as error:  # TimeoutError is an OSError
        protocol.close()
        what = getattr(error, "strerror", None) or str(error) or "no answer"
        raise RegistryError(f"registry at {address}: {what}") from error
    return protocol


class RegistryClient(Registry):
    """Talks to a ``RegistryServer`` at "host:port"."""

    def __init__(
        self,
        address: str,
        *,
        secret: RunSecret | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``secret`` is that of the registry's run; by default that of this process."""
        self.address = address
        self._clock = clock
        self._age: tuple[float, float | None] = (0.0, math.inf)
        """When the server last told the age of its view, and that age."""
        self._secret = secret
        self._questions = Questions()
        self._asking: FrameProtocol | None = None
        self._connecting = asyncio.Lock()

    async def register(self, record: WorkerRecord, ttl_s: float) -> int:
        timeout_s = _ANSWER_TIMEOUT_S + CLAIM_TTLS * ttl_s
        return self._as(int, await self._ask("register", record, ttl_s, timeout_s=timeout_s))

    async def keep_alive(self, lease_id: int) -> bool:
        return self._as(bool, await self._ask("keep_alive", lease_id))

    async def deregister(self, lease_id: int, reason: str) -> None:
        await self._ask("deregister", lease_id, reason)

    async def set_draining(self, worker_id: str, draining: bool) -> bool:
        return self._as(bool, await self._ask("set_draining", worker_id, draining))

    async def set_role(self, worker_id: str, role: Role) -> bool:
        return self._as(bool, await self._ask("set_role", worker_id, role.value))

    async def watch(self) -> AsyncIterator[Sequence[Change]]:
        first, told = True, self._told(["watch"], partial(self._changes, {}))
        async with aclosing(told):
            async for changes in told:
                if changes or (first and changes is not None):
                    first = False
                    yield changes

    async def _told(
        self, question: list[Any], read: Callable[[list[Any]], AnswerT]
    ) -> AsyncGenerator[AnswerT, None]:
        """What ``read`` makes of the frames for a question, on one connection after another.

        Readers keep the last state until the next connection brings a newer one.
        """
        backoff = RECONNECT
        while True:
            try:
                async with aclosing(self._frames(question)) as frames:
                    async for frame in frames:
                        answer = read(frame)
                        backoff = RECONNECT
                        yield answer
            except RegistryError as error:
                log.log(logging.DEBUG if backoff.failures else logging.WARNING, "%s", error)
            backoff, wait_s = backoff.after_failure(0.0)
            await asyncio.sleep(wait_s)

    def view_age_s(self) -> float | None:
        told_at_s, age_s = self._age
        return None if age_s is None else age_s + self._clock() - told_at_s

    async def read_document(self, name: str) -> Document | None:
        check_document(name)
        return self._document(name, await self._ask("read_document", name))

    async def write_document(self, name: str, value: bytes, *, expected: int) -> int | None:
        check_document(name, value)
        answer = await self._ask("write_document", name, value, expected)
        return None if answer is None else self._as(int, answer)

    async def delete_document(self, name: str, *, expected: int) -> bool:
        check_document(name)
        return self._as(bool, await self._ask("delete_document", name, expected))

    async def watch_document(self, name: str) -> AsyncIterator[Document | None]:
        check_document(name)
        known = math.nan
        told = self._told(["watch_document", name], partial(self._told_document, name))
        async with aclosing(told):
            async for document in told:
                version = 0 if document is None else document.version
                if version != known:
                    known = version
                    yield document

    def _told_document(self, name: str, frame: list[Any]) -> Document | None:
        """Raises RegistryError."""
        match frame:
            case ["document", packed]:
                return self._document(name, packed)
            case ["failed", _, str(message)]:
                raise RegistryError(message)
        raise RegistryError(f"registry at {self.address} sent a wrong {kind_of(frame)} frame")

    def _document(self, name: str, packed: Any) -> Document | None:
        """Raises RegistryError."""
        if packed is None:
            return None
        version, value = self._as(tuple[int, bytes], packed)
        return Document(name=name, version=version, value=value)

    async def run_state(self) -> RunState:
        """What only the registry's process knows of the run. Raises RegistryError."""
        return self._as(RunState, await self._ask("run"))

    def _changes(self, known: dict[str, WorkerRecord], frame: list[Any]) -> Sequence[Change] | None:
        """A frame's changes, applied to ``known``; None: it tells an age. Raises RegistryError."""
        try:
            match frame:
                case ["age", None | float() as age_s]:
                    self._age = self._clock(), age_s
                    return None
                case ["snapshot", records]:
                    changes = difference(known, msgspec.convert(records, list[WorkerRecord]))
                case ["changes", list(packed)]:
                    changes = [_unpacked(change) for change in packed]
                case _:
                    raise ValueError("unknown frame")  # noqa: TRY301 - handled with the others
        except (ValueError, TypeError) as error:
            raise RegistryError(
                f"registry at {self.address} sent a wrong {kind_of(frame)} frame: {error}"
            ) from error
        for change in changes:
            if isinstance(change, WorkerUp):
                known[change.record.worker_id] = change.record
            else:
                known.pop(change.worker_id, None)
        return changes

    def _as(self, kind: type[AnswerT], answer: Any) -> AnswerT:
        try:
            return msgspec.convert(answer, kind)
        except msgspec.ValidationError as error:
            raise RegistryError(f"registry at {self.address}: {error}") from error

    async def close(self) -> None:
        if self._asking is not None:
            self._asking.close()
            self._asking = None

    async def _frames(self, question: list[Any]) -> AsyncGenerator[list[Any], None]:
        """What a connection of its own gets for a question. Raises RegistryError when it ends."""
        frames: asyncio.Queue[list[Any] | None] = asyncio.Queue()
        lost = partial(frames.put_nowait, None)
        connection = await connect(self.address, frames.put_nowait, lost, self._secret)
        try:
            connection.send(question)
            while (frame := await frames.get()) is not None:
                yield frame
            raise self._lost()
        finally:
            connection.close()

    async def _ask(self, *question: Any, timeout_s: float = _ANSWER_TIMEOUT_S) -> Any:
        connection = await self._connected()
        name, *arguments = question
        try:
            return await self._questions.ask(
                lambda number: connection.send([name, number, *arguments]), timeout_s
            )
        except TimeoutError as error:
            raise RegistryError(f"registry at {self.address}: no answer") from error

    async def _connected(self) -> FrameProtocol:
        """The connection for questions, one for all of them. Raises RegistryError."""
        async with self._connecting:
            if self._asking is None:
                self._asking = await connect(
                    self.address, self._on_answer, self._on_lost, self._secret
                )
            return self._asking

    def _on_answer(self, frame: list[Any]) -> None:
        match frame:
            case ["answer", int(number), value]:
                self._questions.answer(number, value)
            case ["failed", int(number), str(message)]:
                self._questions.answer(number, RegistryError(message))
            case ["taken", int(number), str(worker_id), str(holder)]:
                self._questions.answer(number, NameTakenError(worker_id, holder))
            case _:
                log.warning("registry at %s sent an unknown frame %s", self.address, kind_of(frame))

    def _on_lost(self) -> None:
        self._asking = None
        self._questions.fail(self._lost())

    def _lost(self) -> RegistryError:
        return RegistryError(f"registry at {self.address}: connection lost")


def _unpacked(change: Any) -> Change:
    match change:
        case ["up", record]:
            return WorkerUp(record=msgspec.convert(record, WorkerRecord))
        case ["down", str(worker_id), str(reason)]:
            return WorkerDown(worker_id=worker_id, reason=reason)
        case _:
            raise ValueError("unknown change")
