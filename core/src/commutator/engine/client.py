"""The client of the token API: every request to a worker shares one connection."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from types import NoneType
from typing import Any, TypeVar

import msgspec

from commutator.contract.engine import EngineClient
from commutator.contract.request import FinishReason, GenerateRequest, TokenDelta
from commutator.contract.worker import (
    EngineInfo,
    EngineLoad,
    KvPrompt,
    KvStatistics,
    PromptExplanation,
    TierContents,
    TierVerification,
    TransferStatistics,
    WorkerRecord,
)
from commutator.engine.protocol import (
    PROTOCOLS,
    SERVICE,
    Codec,
    DeltaStream,
    KvQuestion,
    codec_of,
    unpack_delta,
)
from commutator.errors import (
    EngineError,
    EngineHandoverError,
    EngineOverloadedError,
    EngineUnavailableError,
    EngineWithoutTiersError,
    RequestError,
)
from commutator.frames import FrameProtocol, Questions, Versions, kind_of, versions_in
from commutator.trust import (
    ClientGate,
    Right,
    RunSecret,
    TlsError,
    connect,
    host_and_port,
    is_loopback,
    unacknowledged_s,
)

log = logging.getLogger(__name__)

PING_EVERY_S = 0.5
"""Between pings of a worker that owes an answer to a request, and sends nothing."""
_IDLE_TURNS = 2
"""As many times as long for one without requests."""
_DOUBTFUL_PINGS = 2
"""Without an answer; the last one may have been sent just now."""
_LOST_PINGS = 6
_VANISHED_TURNS = 3
VANISHED_AFTER_S = (1 + _VANISHED_TURNS) * PING_EVERY_S
"""At most, until a worker whose host acknowledges nothing is taken for lost."""
LOST_AFTER_S = (1 + _LOST_PINGS) * PING_EVERY_S
"""At most, until a worker of another host that answers nothing is, as all of that host may stand. A
worker on a busy machine answers late, and one that hangs is ended by its agent before."""

AnswerT = TypeVar("AnswerT")


class TokenApiClient(EngineClient):
    """Talks to a ``TokenApiServer`` at "host:port", over one connection at a time.

    ``start`` and every question connect when there is no connection; those that come meanwhile wait
    for the same attempt. ``secret`` is that of the worker's run, by default that of this process:
    a server that does not know it gets no message.
    """

    def __init__(
        self,
        address: str,
        *,
        answer_timeout_s: float = 5.0,
        secret: RunSecret | None = None,
        ping_every_s: float = PING_EVERY_S,
    ) -> None:
        """A worker that owes answers to pings gets no new request while others answer theirs.

        After ``VANISHED_AFTER_S`` or ``LOST_AFTER_S`` it is taken for lost, and its streams fail:
        no packet tells that a host has vanished. That a process hangs, its agent notices.
        """
        self.address = address
        self._ping_every_s = ping_every_s
        self._lost_pings = None if is_loopback(host_and_port(address)[0]) else _LOST_PINGS
        self._on_answers: Callable[[], None] = lambda: None
        self._secret = secret
        self._answer_timeout_s = answer_timeout_s
        self._instance: str | None = None
        self._host = ""
        self._session: _Session | None = None
        self._connecting: asyncio.Task[_Session] | None = None

    def expect(self, record: WorkerRecord) -> None:
        self._instance = record.instance or None
        self._host = record.host

    async def start(self) -> EngineInfo:
        return (await self._connected()).info.result()

    async def _connected(self) -> _Session:
        session = self._session
        if session is not None and not session.lost:
            return session
        if self._connecting is None or self._connecting.done():
            self._connecting = asyncio.create_task(self._connect())
            # Marks its error as read, which it is not when all who waited were cancelled.
            self._connecting.add_done_callback(lambda task: task.cancelled() or task.exception())
        if session is not None and session.silent:
            # Connecting to a paused host takes long to fail; callers have other workers.
            raise EngineUnavailableError(f"worker at {self.address}: answers no pings")
        connecting = self._connecting
        try:
            return await asyncio.shield(connecting)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if connecting.cancelled() and not (task is not None and task.cancelling()):
                reason = f"worker at {self.address}: the client was closed"
                raise EngineUnavailableError(reason) from None
            raise

    async def _connect(self) -> _Session:
        gate = ClientGate(SERVICE, self._secret, expects=Right.SERVE_WORKER, host=self._host)
        session = _Session(self.address, gate, self._on_answers, self._lost_pings)
        host, port = host_and_port(self.address)
        try:
            async with asyncio.timeout(self._answer_timeout_s):
                await connect(lambda: session.frames, host, port)
                session.frames.send(["hello", PROTOCOLS.oldest, self._instance])
                await session.info
                session.ping(self._ping_every_s)
        except BaseException as error:
            session.info.cancel()
            session.frames.close()
            if isinstance(error, TlsError):
                raise EngineUnavailableError(f"worker at {self.address}: {error}") from error
            if not isinstance(error, OSError):  # TimeoutError is one, too
                raise
            what = "no answer" if isinstance(error, TimeoutError) else error.strerror or str(error)
            raise EngineUnavailableError(f"worker at {self.address}: {what}") from error
        self._session = session
        return session

    def generate(self, request: GenerateRequest) -> DeltaStream:
        if self._session is None or self._session.lost:
            stream = DeltaStream(lambda: None)
            stream.fail(EngineUnavailableError(f"worker at {self.address}: not connected"))
            return stream
        return self._session.generate(request)

    async def load(self) -> EngineLoad:
        return await self._ask(EngineLoad, "load")

    async def reset_prefix_cache(self) -> None:
        """Forget every cached block that no request needs."""
        await self._ask(NoneType, "reset_prefix_cache")

    @property
    def answers(self) -> bool:
        return self._session is None or not self._session.in_doubt

    def watch_answers(self, changed: Callable[[], None]) -> None:
        self._on_answers = changed

    @property
    def admin_address(self) -> str | None:
        return self.address

    async def kv_statistics(self, *, timeout_s: float = 5.0) -> KvStatistics:
        return await self._ask_kv("statistics", None, KvStatistics, timeout_s)

    async def kv_contents(self, *, timeout_s: float = 5.0) -> Sequence[TierContents]:
        return await self._ask_kv("contents", None, list[TierContents], timeout_s)

    async def kv_explain(self, prompt: KvPrompt, *, timeout_s: float = 5.0) -> PromptExplanation:
        return await self._ask_kv("explain", prompt, PromptExplanation, timeout_s)

    async def kv_prefetch(self, prompt: KvPrompt, *, timeout_s: float = 5.0) -> None:
        await self._ask_kv("prefetch", prompt, NoneType, timeout_s)

    async def kv_evict(
        self, tier: str | None = None, *, timeout_s: float = 5.0
    ) -> Mapping[str, int]:
        return await self._ask_kv("evict", tier, dict[str, int], timeout_s)

    async def kv_verify(
        self, tier: str | None = None, *, timeout_s: float = 3600.0
    ) -> Sequence[TierVerification]:
        return await self._ask_kv("verify", tier, list[TierVerification], timeout_s)

    async def set_peers(self, addresses: Sequence[str], *, timeout_s: float = 5.0) -> None:
        await self._ask_kv("set_peers", addresses, NoneType, timeout_s)

    async def _ask_kv(
        self, question: KvQuestion, argument: Any, answer_type: type[AnswerT], timeout_s: float
    ) -> AnswerT:
        if isinstance(argument, KvPrompt):
            argument = (await self._connected()).codec.pack_prompt(argument)
        return await self._ask(answer_type, "kv", question, argument, timeout_s=timeout_s)

    async def handover_statistics(self, *, timeout_s: float = 5.0) -> TransferStatistics:
        return await self._ask(TransferStatistics, "transfer_statistics", timeout_s=timeout_s)

    async def refused_connections(self, *, timeout_s: float = 5.0) -> Mapping[str, int]:
        return await self._ask(dict[str, int], "refused_connections", timeout_s=timeout_s)

    async def close(self) -> None:
        if self._connecting is not None:
            self._connecting.cancel()
        if self._session is not None:
            await self._session.close()

    async def _ask(
        self, answer_type: type[AnswerT], *question: Any, timeout_s: float | None = None
    ) -> AnswerT:
        limit_s = self._answer_timeout_s if timeout_s is None else timeout_s
        session = await self._connected()
        try:
            return msgspec.convert(await session.ask(question, limit_s), answer_type)
        except msgspec.ValidationError as error:
            what = question[1] if question[0] == "kv" else question[0]
            raise EngineError(f"worker at {self.address}: {what}: {error}") from error
        except TimeoutError:
            raise EngineUnavailableError(
                f"worker at {self.address}: no answer within {limit_s:g} s"
            ) from None


class _Session:
    """One connection to a worker. Its streams and questions end with it, and with no other."""

    def __init__(
        self,
        address: str,
        gate: ClientGate,
        on_answers: Callable[[], None],
        lost_pings: int | None = None,
    ) -> None:
        """``lost_pings``: so many unanswered ones mean that it is lost; None: none do."""
        self._address = address
        self._lost_pings = lost_pings
        self._on_answers = on_answers
        self._streams: dict[int, DeltaStream] = {}
        self._questions = Questions()
        self.frames = FrameProtocol(self._on_frame, self._on_lost, gate)
        self.info: asyncio.Future[EngineInfo] = asyncio.get_running_loop().create_future()
        self.codec = Codec()
        """Of the version that both ends speak, once the worker has said which it does."""
        self.lost = False
        self.silent = False
        """Whether it was lost because nothing came from the worker."""
        self.unanswered_pings = 0
        """Those since the worker last sent anything."""
        self._heard = False
        """Whether it sent anything since the last turn of ``ping``."""
        self._turns = 0
        self._vanished_turns = 0
        """In a row, at which the worker's system had acknowledged nothing since the last one."""
        self._next_ping: asyncio.TimerHandle | None = None

    def ping(self, every_s: float) -> None:
        """Ping the worker from now on while it is silent; end the connection with a lost host."""
        if self.lost or self.frames.transport is None:
            return
        heard, self._heard = self._heard, False
        waits = bool(self._streams or self.unanswered_pings)
        vanished = waits and not heard and unacknowledged_s(self.frames.transport) >= every_s
        self._vanished_turns = self._vanished_turns + 1 if vanished else 0
        if self._vanished_turns >= _VANISHED_TURNS or self.unanswered_pings == self._lost_pings:
            self.silent = True
            self.frames.abort("its host acknowledges nothing" if vanished else "answers no pings")
            return
        self._turns += 1
        if not heard and (waits or self._turns % _IDLE_TURNS == 0):
            # Late timers count pings, not time: who was paused itself blames no worker for it.
            self.unanswered_pings += 1
            if self.unanswered_pings == _DOUBTFUL_PINGS:
                self._on_answers()
            self.frames.send(["ping"])
        self._next_ping = asyncio.get_running_loop().call_later(every_s, self.ping, every_s)

    @property
    def in_doubt(self) -> bool:
        """Whether it owes an answer to a ping that was not sent just now."""
        return self.unanswered_pings >= _DOUBTFUL_PINGS

    def generate(self, request: GenerateRequest) -> DeltaStream:
        key = next(self._questions.numbers)

        def abort() -> None:
            if self._streams.pop(key, None) is not None:
                self.frames.send(["abort", key])

        stream = DeltaStream(abort)
        try:
            packed = self.codec.pack_request(request)
        except RequestError as error:
            stream.fail(error)
            return stream
        self._streams[key] = stream
        self.frames.send(["generate", key, packed])
        return stream

    async def ask(self, question: Sequence[Any], timeout_s: float) -> Any:
        return await self._questions.ask(
            lambda number: self.frames.send(["ask", number, *question]), timeout_s
        )

    async def close(self) -> None:
        for stream in list(self._streams.values()):
            await stream.aclose()
        self.lost = True
        self._end_pings()
        self.frames.close()

    def _end_pings(self) -> None:
        if self._next_ping is not None:
            self._next_ping.cancel()

    def _on_frame(self, frame: list[Any]) -> None:
        self._heard = True
        if self.unanswered_pings:
            doubted, self.unanswered_pings = self.in_doubt, 0
            if doubted:
                self._on_answers()
        try:
            self._take(frame)
        # To check the type of every delta before it is used would cost time for each token.
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            self.frames.abort(f"it sent a wrong {kind_of(frame)} frame: {error!r:.200}")

    def _take(self, frame: list[Any]) -> None:
        match frame:
            case ["deltas", deltas]:
                for key, token_ids, extras in deltas:
                    self._on_delta(key, unpack_delta(token_ids, extras))
            case ["refused", key, reason, kind]:
                if (stream := self._streams.pop(key, None)) is not None:
                    stream.fail(_refusal(str(reason), str(kind)))
            case ["answer", number, value]:
                self._questions.answer(number, value)
            case ["failed", number, reason, kind]:
                self._questions.answer(number, _failure(str(reason), str(kind)))
            case ["info" | "not_me" as answer, value] if not self.info.done():
                self._on_hello(answer == "info", value)
            case _ if frame != ["pong"]:
                log.warning("worker at %s sent an unknown frame %s", self._address, kind_of(frame))

    def _on_hello(self, is_meant: bool, value: Any) -> None:
        if is_meant:
            # Before version 6, servers did not say what they speak, and spoke that of the hello.
            theirs = value.pop("protocols", (PROTOCOLS.oldest, PROTOCOLS.oldest))
            self._use(versions_in(list(theirs)))
            if not self.info.done():
                self.info.set_result(msgspec.convert(value, EngineInfo))
            return
        reason = f"another worker listens there now (instance {value})"
        self.info.set_exception(EngineUnavailableError(f"worker at {self._address}: {reason}"))

    def _use(self, theirs: Versions) -> None:
        """Speak the highest version that the worker speaks, too."""
        version = PROTOCOLS.common(theirs)
        codec = None if version is None else codec_of(version)
        if codec is None:
            reason = f"it speaks {theirs} of the token API, and this process {PROTOCOLS}"
            text = f"worker at {self._address}: {reason}; update the older of the two"
            self.info.set_exception(EngineUnavailableError(text))
            return
        if codec.version != PROTOCOLS.oldest:
            self.frames.send(["use", codec.version])
        self.codec = codec

    def _on_delta(self, key: int, delta: TokenDelta) -> None:
        stream = self._streams.get(key)
        if stream is None:
            return  # it was aborted
        if delta.finish_reason is not None:
            del self._streams[key]
            if delta.finish_reason is FinishReason.ERROR:
                known = EngineHandoverError if delta.handover_failed else EngineError
                kind = RequestError if delta.refused else known
                stream.fail(kind(delta.error or "the engine failed the request"))
                return
        stream.feed(delta)

    def _on_lost(self, reason: str) -> None:
        self.lost = True
        self._end_pings()
        error = EngineUnavailableError(f"worker at {self._address}: connection lost ({reason})")
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.fail(error)
        if not self.info.done():
            self.info.set_exception(error)
        self._questions.fail(error)


def _refusal(reason: str, kind: str) -> Exception:
    if kind == "request":
        return RequestError(reason)
    return EngineOverloadedError(reason) if kind == "overloaded" else EngineError(reason)


def _failure(reason: str, kind: str) -> EngineError:
    return EngineWithoutTiersError(reason) if kind == "no_tiers" else EngineError(reason)
