"""The server side of the token API, for engines written against this project."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import threading
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
from attrs import evolve

from commutator.contract.request import GenerateRequest, TokenDelta
from commutator.contract.worker import EngineInfo, EngineLoad, TransferStatistics
from commutator.engine.protocol import INSTANCE, PROTOCOLS, SERVICE, Codec, codec_of
from commutator.errors import (
    CommutatorError,
    EngineError,
    EngineOverloadedError,
    EngineUnavailableError,
    EngineWithoutTiersError,
    RequestError,
)
from commutator.frames import FrameProtocol, kind_of
from commutator.trust import (
    Identity,
    Listener,
    Right,
    ServerGate,
    listen,
    network_of_this_process,
    refused_connections,
)
from commutator_engine_kit.kv.admin import KvAdmin

log = logging.getLogger(__name__)


Emit = Callable[[Sequence[tuple[int, TokenDelta]]], None]

_THREADS = 2
"""For requests that take long to submit."""
_MOST_SUBMITTING = 256
"""Such requests, waiting ones included."""


class TokenEngine(ABC):
    """An engine for ``TokenApiServer``, which calls these methods in its event loop."""

    @abstractmethod
    def start(self, emit: Emit) -> EngineInfo:
        """Begin to work. ``emit`` takes the deltas of one tick; call it from any thread."""

    @abstractmethod
    def submit(self, key: int, request: GenerateRequest) -> None:
        """Take a request; must not block, but where ``takes_long`` says so.

        Raises RequestError for one that can never be served, EngineOverloadedError for one that
        cannot be served now, and EngineUnavailableError when the engine is dead: that closes the
        connection, so that its client takes the worker for lost.
        """

    def takes_long(self, request: GenerateRequest) -> bool:
        """Whether ``submit`` takes long for this request, as where it compiles a grammar.

        Then a thread of the server calls it, and the event loop goes on. Meanwhile ``abort`` may
        be called, once more after it.
        """
        return False

    @abstractmethod
    def abort(self, key: int) -> None:
        """Stop a request and free what it holds; nothing more is emitted for it. Idempotent."""

    @abstractmethod
    def load(self) -> EngineLoad:
        """The current load. Raises EngineUnavailableError as ``submit`` does."""

    @abstractmethod
    def reset_prefix_cache(self) -> None:
        """Forget every cached block that no request needs."""

    @property
    def kv_admin(self) -> KvAdmin | None:
        """Answers questions about storage tiers, on the server's threads; None without tiers."""
        return None

    def transfer_statistics(self) -> TransferStatistics:
        """Counters of KV transfers with other workers; zero without transfers."""
        return TransferStatistics()

    @abstractmethod
    def stop(self) -> None:
        """Stop, and wait until everything has ended."""


class _Connection:
    """The connection of one client; its loss aborts the client's requests."""

    def __init__(self, server: TokenApiServer) -> None:
        self.server = server
        self.engine_keys: dict[int, int] = {}
        self.codec: Codec | None = Codec()
        """Of the version that the client speaks; None: it speaks none that is spoken here."""
        self.frames = FrameProtocol(self._on_frame, self._on_lost, server.gate)

    def _on_frame(self, frame: list[Any]) -> None:
        try:
            # On one machine there is no certificate, and the run's secret is proof enough.
            if self.frames.identity is None or self._may(self.frames.identity, frame):
                self._handle(frame)
        except EngineUnavailableError as error:
            log.error("a client's connection is closed: %s", error)  # noqa: TRY400
            self.frames.close()
        except (ValueError, TypeError) as error:
            log.warning("a client sent a wrong %s frame: %s", kind_of(frame), error)
            self.frames.close()

    def _handle(self, frame: list[Any]) -> None:
        match frame:
            case ["generate", int(key), bytes(packed)]:
                self._generate(key, packed)
            case ["abort", int(key)]:
                self.server.abort(self, key)
            case ["ping"]:
                self.frames.send(["pong"])
            case ["ask", int(number), str(what)]:
                self.frames.send(["answer", number, self.server.answer(what)])
            case ["ask", int(number), "kv", str(question), argument]:
                self.server.answer_kv(self, number, question, argument)
            case ["hello", int(version), *meant]:
                self.codec = codec_of(version)
                self._greet(*meant)
            case ["use", int(version)] if codec_of(version) is not None:
                self.codec = codec_of(version)
            case _:
                raise ValueError("unknown frame")

    def _greet(self, meant: str | None = None) -> None:
        own = self.server.instance
        if meant is None or own is None or meant == own:
            assert self.server.info is not None, "it listens once the engine has started"
            info = msgspec.to_builtins(self.server.info)
            self.frames.send(["info", {**info, "protocols": PROTOCOLS}])
            return
        self._refuse(f"it means instance {str(meant)[:32]!r} of a worker; this is {own!r}")
        self.frames.send(["not_me", own])
        self.frames.close()

    def _may(self, peer: Identity, frame: list[Any]) -> bool:
        """Whether the peer's certificate allows what it asks. If not, it is told, and logged."""
        needed = _needed_rights(frame)
        own = network_of_this_process()
        of_this_host = own is not None and peer.name == own.host and peer.may(Right.SERVE_WORKER)
        if of_this_host or any(peer.may(right) for right in needed):
            return True
        reason = f"{peer} must not {needed[0]}"
        self._refuse(reason)
        match frame:
            case ["ask", int(number), *_]:
                self.frames.send(["failed", number, reason, "engine"])
            case _:
                self.frames.close()
        return False

    def _refuse(self, reason: str) -> None:
        assert self.frames.transport is not None
        self.server.gate.refuse(self.frames.transport, reason)

    def _generate(self, key: int, packed: bytes) -> None:
        """Raises ValueError for what is no request."""
        try:
            request = self.known_codec.unpack_request(packed)
        except (RequestError, EngineError) as error:
            self._refuse_request(key, error)
            return
        try:
            self.server.submit(self, key, request)
        except Exception as error:  # noqa: BLE001 - told to the client
            self.failed(key, request, error)

    def failed(self, key: int, request: GenerateRequest, error: Exception) -> None:
        """Tell the client that ``request`` was not taken."""
        if isinstance(error, EngineUnavailableError):
            log.error("a client's connection is closed: %s", error)
            self.frames.close()
        elif isinstance(error, RequestError | EngineOverloadedError):
            self._refuse_request(key, error)
        else:
            log.error("submitting %s failed", request.request_id, exc_info=error)
            self.frames.send(["refused", key, f"{type(error).__name__}: {error}", "engine"])

    def _refuse_request(self, key: int, error: CommutatorError) -> None:
        kinds = {RequestError: "request", EngineOverloadedError: "overloaded"}
        kind = next((kind for of, kind in kinds.items() if isinstance(error, of)), "engine")
        self.frames.send(["refused", key, str(error), kind])

    @property
    def known_codec(self) -> Codec:
        """Raises EngineError when the client speaks no version that is spoken here."""
        if self.codec is None:
            raise EngineError(
                f"this worker speaks {PROTOCOLS} of the token API, and the client an older one; "
                "update the client"
            )
        return self.codec

    def _on_lost(self, reason: str) -> None:
        self.server.connections.discard(self)
        if self.engine_keys:
            log.info("client disconnected (%s): %d requests aborted", reason, len(self.engine_keys))
        for key in list(self.engine_keys):
            self.server.abort(self, key)


def _needed_rights(frame: list[Any]) -> tuple[Right, ...]:
    """The rights of which a client from another host needs one."""
    match frame:
        case ["ask", _, "reset_prefix_cache"] | ["ask", _, "kv", "evict", _]:
            return (Right.OPERATE,)
        case ["hello" | "use" | "ask" | "ping", *_]:
            return Right.GENERATE, Right.OPERATE
        case _:
            return (Right.GENERATE,)


class TokenApiServer:
    """Serves one ``TokenEngine`` to any number of connections.

    They come from processes of this process's run; all others are refused. A process of no run
    serves everyone who can connect.
    """

    def __init__(self, engine: TokenEngine, *, instance: str | None = None) -> None:
        """``instance`` is by default what the supervisor gave this process; None: it gave none."""
        self.gate = ServerGate(SERVICE)
        self.instance = os.environ.get(INSTANCE) if instance is None else instance
        self._engine = engine
        self._keys = itertools.count(1)
        self._owner: dict[int, tuple[_Connection, int]] = {}
        """Engine key to the connection and its own key for the request."""
        self.connections: set[_Connection] = set()
        self._answering: set[asyncio.Task[None]] = set()
        self._submitting: set[asyncio.Task[None]] = set()
        self._threads = ThreadPoolExecutor(_THREADS, "submit")
        self._listener: Listener | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loop_thread = 0
        self.info: EngineInfo | None = None

    async def start(self, host: str, port: int) -> int:
        """Start the engine and listen. Returns the port, which port 0 lets the system choose."""
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        self.info = self._engine.start(self._emit_threadsafe)
        self._listener = await listen(self._connect, SERVICE, host, port)
        return self._listener.port

    async def stop(self) -> None:
        """Close every connection and stop the engine."""
        if self._listener is not None:
            self._listener.close()
            for connection in list(self.connections):
                connection.frames.close()
        self._threads.shutdown(wait=False, cancel_futures=True)
        await asyncio.to_thread(self._engine.stop)

    def _connect(self) -> FrameProtocol:
        connection = _Connection(self)
        self.connections.add(connection)
        return connection.frames

    def _emit_threadsafe(self, deltas: Sequence[tuple[int, TokenDelta]]) -> None:
        assert self._loop is not None
        if threading.get_ident() == self._loop_thread:
            self._emit(deltas)
            return
        try:
            self._loop.call_soon_threadsafe(self._emit, deltas)
        except RuntimeError:
            log.debug("the server has stopped; %d deltas dropped", len(deltas))

    def _emit(self, deltas: Sequence[tuple[int, TokenDelta]]) -> None:
        frames: defaultdict[_Connection, list[Any]] = defaultdict(list)
        for engine_key, delta in deltas:
            owner = self._owner.get(engine_key)
            if owner is None:
                continue  # it was aborted
            connection, key = owner
            frames[connection].append(connection.known_codec.pack_delta(key, delta))
            if delta.finish_reason is not None:
                del self._owner[engine_key]
                connection.engine_keys.pop(key, None)
        for connection, packed in frames.items():
            connection.frames.send(["deltas", packed])

    def submit(self, connection: _Connection, key: int, request: GenerateRequest) -> None:
        assert self.info is not None, "it listens once the engine has started"
        if (unmet := self.info.unmet(request)) is not None:
            raise unmet
        takes_long = self._engine.takes_long(request)
        if takes_long and len(self._submitting) >= _MOST_SUBMITTING:
            raise EngineOverloadedError(f"{_MOST_SUBMITTING} requests are prepared here already")
        engine_key = next(self._keys)
        self._owner[engine_key] = (connection, key)
        connection.engine_keys[key] = engine_key
        if takes_long:
            assert self._loop is not None
            task = self._loop.create_task(self._submit_later(engine_key, request))
            self._submitting.add(task)
            task.add_done_callback(self._submitting.discard)
            return
        try:
            self._engine.submit(engine_key, request)
        except BaseException:
            del self._owner[engine_key], connection.engine_keys[key]
            raise

    async def _submit_later(self, engine_key: int, request: GenerateRequest) -> None:
        """Submit it on a thread, and tell its client if that fails."""
        assert self._loop is not None
        try:
            await self._loop.run_in_executor(
                self._threads, self._engine.submit, engine_key, request
            )
        except Exception as error:  # noqa: BLE001 - told to the client
            if (owner := self._owner.pop(engine_key, None)) is not None:
                connection, key = owner
                connection.engine_keys.pop(key, None)
                connection.failed(key, request, error)
        else:
            if engine_key not in self._owner:  # aborted, or complete already
                self._engine.abort(engine_key)

    def abort(self, connection: _Connection, key: int) -> None:
        engine_key = connection.engine_keys.pop(key, None)
        if engine_key is not None:
            self._owner.pop(engine_key, None)
            self._engine.abort(engine_key)

    def answer(self, what: str) -> Any:
        """The answer to an "ask" frame. Raises ValueError for an unknown question."""
        if what == "load":
            load = self._engine.load()
            return evolve(load, waiting=load.waiting + len(self._submitting))
        if what == "transfer_statistics":
            return self._engine.transfer_statistics()
        if what == "refused_connections":
            return refused_connections()
        if what == "reset_prefix_cache":
            self._engine.reset_prefix_cache()
            return None
        raise ValueError(f"unknown question {what!r}")

    def answer_kv(self, connection: _Connection, number: int, question: str, argument: Any) -> None:
        """Answer a "kv" frame from a thread; this may take minutes."""
        assert self._loop is not None
        admin = self._engine.kv_admin
        answer = asyncio.to_thread(_answer_kv, admin, connection, question, argument)
        task = self._loop.create_task(self._answer_later(connection, number, question, answer))
        self._answering.add(task)
        task.add_done_callback(self._answering.discard)

    async def _answer_later(
        self, connection: _Connection, number: int, what: str, answer: Awaitable[Any]
    ) -> None:
        try:
            connection.frames.send(["answer", number, await answer])
        except EngineWithoutTiersError as error:
            connection.frames.send(["failed", number, str(error), "no_tiers"])
        except CommutatorError as error:
            connection.frames.send(["failed", number, str(error), "engine"])
        except Exception as error:
            log.exception("the question %r failed", what)
            reason = f"{type(error).__name__}: {error}"
            connection.frames.send(["failed", number, reason, "engine"])


def _answer_kv(admin: KvAdmin | None, connection: _Connection, question: str, argument: Any) -> Any:
    """Raises EngineError for an unknown question or a wrong argument."""
    if admin is None:
        raise EngineWithoutTiersError
    try:
        match question:
            case "statistics":
                return admin.statistics()
            case "contents":
                return admin.contents()
            case "explain":
                return admin.explain(connection.known_codec.unpack_prompt(argument))
            case "prefetch":
                return admin.prefetch(connection.known_codec.unpack_prompt(argument))
            case "evict":
                return admin.evict(msgspec.convert(argument, str | None))
            case "verify":
                return admin.verify(msgspec.convert(argument, str | None))
            case "set_peers":
                return admin.set_peers(msgspec.convert(argument, list[str]))
    except msgspec.ValidationError as error:
        raise EngineError(f"the argument of {question!r} is wrong: {error}") from error
    raise EngineError(f"unknown question {question!r} about storage tiers")
