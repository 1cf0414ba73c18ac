"""Responses that are made in the background: their clients may leave, and come back by the id.

What is made is in the store, marked with who makes it and until when that is heard of again. Who
finds it after that time says that it has failed. Its events are in the memory of the front door
that makes it, and nowhere else.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from typing import Any

import msgspec
from attrs import define, evolve, field

from commutator.contract.answer import Failure
from commutator.contract.response_store import ResponseStore, StoredResponse
from commutator.frontend import Call, log_failure, to_failure
from commutator_openai.values import not_served
from commutator_responses.making import Making, make
from commutator_responses.writer import DONE, ResponseWriter, failed_response, new_response

log = logging.getLogger(__name__)

_RENEWALS = 3
"""Of a lease, before it ends."""
_MAX_LOG_BYTES = 64 << 20
"""Of the events of all responses of a front door; the oldest are given up."""
_RETRY_S = 0.5
_CLIENT_GONE = 499
_OK = 200
_ENDED = Failure(503, "the front door that made it ended; ask again", "background_door_lost")
_EVENTS = "text/event-stream; charset=utf-8"
_encode = msgspec.json.encode
_decode = msgspec.json.decode

Key = tuple[str, str]
"""(owner, id)."""


class _DetachedCall(Call):
    """A request whose client need not be there: what it is answered goes into ``events``."""

    def __init__(self, call: Call, events: _Events) -> None:
        super().__init__(
            call.services,
            call.request_id,
            f"{call.endpoint} (background)",
            call.method,
            call.path,
            call.headers,
        )
        self.protocol, self.principal = call.protocol, call.principal
        self.counts, call.counts = call.counts, False  # this one gives back what it does not use
        self._peer, self._forwarded = call.peer, call.forwarded
        self._events = events
        self.failed: Callable[[Failure], bytes] | None = None

    @property
    def peer(self) -> str | None:
        return self._peer

    @property
    def forwarded(self) -> Sequence[str]:
        return self._forwarded

    def room_for_body(self, *types: str) -> AbstractAsyncContextManager[None]:
        del types
        return nullcontext()

    async def read(self) -> bytes:
        return self.body

    async def reply(self, parts: list[bytes], content_type: str = "application/json") -> None:
        raise NotImplementedError("responses in the background are streamed")

    async def begin(
        self,
        content_type: str,
        status: int = _OK,
        *,
        failed: Callable[[Failure], bytes] | None = None,
    ) -> None:
        del content_type, status
        self.failed = failed

    async def write(self, data: bytes) -> None:
        self._events.add(data)

    async def end(self, last: bytes = b"") -> None:
        self._events.add(last)

    @property
    def begun(self) -> bool:
        return self.failed is not None


class _Events:
    """The events of a response by their sequence numbers, which begin at 0."""

    def __init__(self) -> None:
        self.said: list[bytes] = []
        self.size_bytes = 0
        self.is_over = False
        self.is_lost = False
        self._more = asyncio.Event()

    def add(self, data: bytes) -> None:
        if self.is_lost:
            return
        events = [b"%b\n\n" % one for one in data.split(b"\n\n") if one]
        self.said += [one for one in events if one != DONE]
        self.size_bytes += len(data)
        self._wake()

    def end(self) -> None:
        """Nothing follows."""
        self.is_over = True
        self._wake()

    def lose(self) -> None:
        """Give the memory back."""
        self.is_lost, self.said, self.size_bytes = True, [], 0
        self._wake()

    async def after(self, number: int) -> bytes:
        """What follows event ``number``, as soon as there is something; empty: nothing will."""
        while not self.is_lost and len(self.said) <= number + 1 and not self.is_over:
            await self._more.wait()
        return b"".join(self.said[number + 1 :])

    def _wake(self) -> None:
        self._more.set()
        self._more = asyncio.Event()


@define(eq=False)
class _Running:
    """A response that is being made here."""

    key: Key
    making: Making
    call: _DetachedCall
    events: _Events
    stored: StoredResponse
    """As the store has it."""
    writer: ResponseWriter | None = None
    """Once its turn has come."""
    task: asyncio.Task[None] | None = None
    began: asyncio.Event = field(factory=asyncio.Event)
    is_settled: bool = False
    """Its end is in the store, or nobody wants it: there is nothing more to say."""

    @property
    def maker(self) -> str:
        assert self.stored.maker is not None
        return self.stored.maker


class Background:
    """Those that one front door makes."""

    def __init__(
        self, store: ResponseStore | None, lease_s: float, clock: Callable[[], float] = time.time
    ) -> None:
        """``clock`` is one that all front doors agree on, to some seconds."""
        self._store = store
        self._lease_s = lease_s
        self._clock = clock
        self._running: dict[Key, _Running] = {}
        self._events: OrderedDict[Key, _Events] = OrderedDict()
        """Also of those that are over."""

    async def begin(self, call: Call, making: Making) -> None:
        """Answer with the response as it is queued, or with its events, and make it."""
        store = self._store
        if store is None or not making.keeps:
            raise not_served(
                "background",
                "it needs `store: true`, and a store that keeps responses: what is made could not "
                "be fetched",
            )
        generate = making.asked.generate
        model, _ = call.text_model(generate.model, generate.session_id)
        response = new_response(making.key, model, making.asked.echo, generate)
        first = _encode({**response, "status": "queued"})
        stored = evolve(
            making.stored(call.principal.name, first),
            maker=secrets.token_hex(16),
            until_unix_s=self._clock() + self._lease_s,
        )
        await store.put(stored)
        events = _Events()
        running = _Running(
            key=(stored.owner, stored.id),
            making=making.streamed(),
            call=_DetachedCall(call, events),
            events=events,
            stored=stored,
        )
        self._running[running.key] = running
        self._remember(running)
        running.task = asyncio.create_task(self._run(store, running))
        if generate.stream:
            await self._tell(call, events, -1)
        else:
            await call.reply([first])

    async def follow(self, call: Call, stored: StoredResponse, after: int) -> None:
        """GET with `stream`: the events after number ``after``."""
        events = self._events.get((stored.owner, stored.id))
        if events is None:
            raise not_served(
                "stream",
                "events are with the front door that makes a response in the background, for some "
                "time after its end, and not here; fetch the response without `stream`",
            )
        await self._tell(call, events, after)

    async def cancel(self, stored: StoredResponse) -> StoredResponse | None:
        """The response as it was cancelled; None: it has ended before."""
        store = self._store
        assert store is not None
        assert stored.maker is not None
        response = _encode({**_decode(stored.response), "status": "cancelled"})
        over = evolve(stored, response=response, maker=None)
        if not await store.replace(over, stored.maker):
            return None
        self.forget(stored.owner, stored.id)
        return over

    def forget(self, owner: str, response_id: str) -> None:
        """Nobody wants it any more: make it no further, if it is made here."""
        running = self._running.get((owner, response_id))
        if running is not None and running.task is not None:
            running.is_settled = True
            running.task.cancel()

    async def close(self) -> None:
        """The front door ends; what is not complete has failed."""
        tasks = [running.task for running in self._running.values() if running.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # ------------------------------------------------------------------------ making

    async def _run(self, store: ResponseStore, running: _Running) -> None:
        call, code = running.call, _CLIENT_GONE
        renewing = asyncio.create_task(self._renew(store, running, asyncio.current_task()))

        async def keep(writer: ResponseWriter) -> None:
            await self._settle(store, running, writer.final)

        def began(writer: ResponseWriter) -> None:
            running.writer = writer
            running.began.set()

        limit = call.time_limit()
        try:
            try:
                async with limit:
                    await make(call, running.making, limit, keep, on_writer=began)
                code = _OK
            finally:
                call.settle()
        except asyncio.CancelledError:
            if not running.is_settled:
                await self._fail(store, running, _ENDED)
        except Exception as error:  # noqa: BLE001 - who asks for it is told
            failure = to_failure(error, call.request_id)
            log_failure(error, failure, call.request_id)
            code, call.reason, call.param = failure.status, failure.code, failure.param
            await self._fail(store, running, failure)
        finally:
            renewing.cancel()
            await asyncio.gather(renewing, return_exceptions=True)
            del self._running[running.key]
            running.events.end()
            call.account(code, is_quiet=False)

    async def _renew(
        self, store: ResponseStore, running: _Running, making: asyncio.Task[Any] | None
    ) -> None:
        """Say again and again that it is being made; end that when others have ended it."""
        told = False
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._lease_s / _RENEWALS):
                    await (asyncio.Event() if told else running.began).wait()
            told = running.began.is_set()
            now_s = self._clock()
            renewed = evolve(running.stored, until_unix_s=now_s + self._lease_s)
            if running.writer is not None:
                renewed = evolve(renewed, response=running.writer.so_far())
            try:
                is_ours = await store.replace(renewed, running.maker)
            except Failure:
                is_ours = now_s <= running.stored.until_unix_s  # then others say that it failed
            else:
                running.stored = renewed
            if not is_ours:
                if not running.is_settled and making is not None:
                    running.is_settled = True
                    making.cancel()
                return

    async def _fail(self, store: ResponseStore, running: _Running, failure: Failure) -> None:
        failed, writer = running.call.failed, running.writer
        if failed is not None and writer is not None:
            running.events.add(failed(failure))
            response = writer.final
        else:
            response = _encode(failed_response(_decode(running.stored.response), failure))
        with suppress(Failure):  # then it has failed when its lease has ended
            await self._settle(store, running, response)

    async def _settle(self, store: ResponseStore, running: _Running, response: bytes) -> None:
        """Its end is in the store, which may be away for a while. Raises ``Failure``."""
        running.is_settled = True
        over = evolve(running.stored, response=response, maker=None)
        while True:
            try:
                await store.replace(over, running.maker)
            except Failure:
                if self._clock() > running.stored.until_unix_s:
                    raise
                await asyncio.sleep(_RETRY_S)
            else:
                return

    # ------------------------------------------------------------------------ events

    async def _tell(self, call: Call, events: _Events, after: int) -> None:
        async with call.time_limit():
            await call.begin(_EVENTS, failed=_stream_failed)
            while said := await events.after(after):
                after += said.count(b"\n\n")
                await call.write(said)
            if events.is_lost:
                raise Failure(500, "its events are not kept any more; fetch the response by GET")
            await call.end(DONE)

    def _remember(self, running: _Running) -> None:
        self._events[running.key] = running.events
        while sum(one.size_bytes for one in self._events.values()) > _MAX_LOG_BYTES:
            _, oldest = self._events.popitem(last=False)
            oldest.lose()


def _stream_failed(failure: Failure) -> bytes:
    said: Mapping[str, Any] = {
        "type": "error",
        "code": failure.code,
        "message": failure.message,
        "param": failure.param,
    }
    return b"event: error\ndata: %b\n\n" % _encode(said) + DONE
