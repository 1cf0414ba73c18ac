"""One request at a server: its deltas into a stream, and its abort by name."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress
from http import HTTPStatus

import aiohttp

from commutator.engine import DeltaStream
from commutator.engine.http import error_for, errors_told
from commutator.errors import (
    EngineError,
    EngineHandoverError,
    EngineIncompleteError,
    EngineNeedsPrefillError,
)
from commutator.types import GenerateRequest
from commutator_sglang.api import ServerInfo
from commutator_sglang.bodies import GENERATE, request_body
from commutator_sglang.deltas import DeltaReader, FailedInStreamError, message_of
from commutator_sglang.handover import ANSWER_WITHIN_S

__all__ = ["ALIVE", "Generation"]

log = logging.getLogger(__name__)

ALIVE = "/model_info"
"""Not /health, which takes a second and more, as it generates a token."""
ABORT = "/abort_request"
_ABORT_WITHIN_S = 2.0
_ABORT_AGAIN_S = 0.2
"""SGLang forgets the abort of a request that it has not quite begun with."""


class Generation:
    """``run`` fills the stream to its end; ``abort`` ends it at the server, then here."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        url: str,
        server: ServerInfo,
        request: GenerateRequest,
        request_id: str,
        stream: DeltaStream,
    ) -> None:
        """``request_id`` must begin no other one's: SGLang aborts all that begin with it."""
        self._session = session
        self._url = url
        self._where = f"SGLang at {url}"
        self._server = server
        self._request = request
        self._request_id = request_id
        self._stream = stream
        asked = request.sampling
        # With ignore_eos SGLang ignores these, too.
        cut_after = frozenset(asked.stop_token_ids) if asked.ignore_eos else ()
        self._reader = DeltaReader(asked.top_logprobs, cut_after)
        self._aborted = False

    async def run(self) -> None:
        """Raises what ``TokenStream`` says, and EngineIncompleteError."""
        handover = self._request.handover
        within_s = None if handover is None else handover.get(ANSWER_WITHIN_S)
        self._check_role()
        body = request_body(self._request, self._request_id, self._server)
        try:
            async with asyncio.timeout(within_s) as deadline:
                await self._read(body, deadline)
        except TimeoutError as error:
            await self._tell()
            raise EngineHandoverError(f"no KV came within {within_s:g} s") from error
        except FailedInStreamError as error:
            raise await self._error(error.code, str(error)) from error
        if not self._reader.ended:
            raise EngineIncompleteError(f"{self._where} ended the stream before the answer")

    async def abort(self, task: asyncio.Task[None]) -> None:
        """At the server first: it learns of a closed connection only seconds later."""
        self._aborted, begun_s = True, time.perf_counter()
        with suppress(TimeoutError, aiohttp.ClientError):
            async with asyncio.timeout(_ABORT_WITHIN_S):
                while not task.done():
                    await self._tell()
                    await asyncio.wait({task}, timeout=_ABORT_AGAIN_S)
        if self._request.handover is not None:
            what = "ended" if task.done() else "has not ended"
            took_ms = (time.perf_counter() - begun_s) * 1e3
            log.info(
                "%s: leg %s %s %.1f ms after its abort",
                self._where,
                self._request_id,
                what,
                took_ms,
            )
        task.cancel()

    async def _read(self, body: object, deadline: asyncio.Timeout) -> None:
        with errors_told(self._where):
            async with self._session.post(self._url + GENERATE, json=body) as response:
                if response.status != HTTPStatus.OK:
                    raise await self._error(response.status, message_of(await response.read()))
                async for data in response.content.iter_any():
                    for delta in self._reader.feed(data):
                        if not self._aborted:
                            self._stream.feed(delta)
                    if self._reader.begun:
                        deadline.reschedule(None)
                    if self._reader.cut:
                        await self._tell()
                        return

    async def _tell(self) -> None:
        with suppress(aiohttp.ClientError):
            body = {"rid": self._request_id}
            async with self._session.post(self._url + ABORT, json=body) as response:
                await response.read()

    async def _error(self, status: int, message: str) -> Exception:
        error = await error_for(
            self._session, self._where, self._url, status, message, alive_path=ALIVE
        )
        waits_for_kv = self._request.handover is not None and not self._reader.begun
        # A healthy server that fails a leg before its first token did not get the KV, or rid of it.
        failed_load = waits_for_kv and type(error) is EngineError
        return EngineHandoverError(message) if failed_load else error

    def _check_role(self) -> None:
        mode, handover = self._server.disaggregation_mode, self._request.handover
        if handover is None:
            if mode != "null":
                raise EngineNeedsPrefillError(
                    f"{self._where} runs with --disaggregation-mode {mode}, so it cannot serve a "
                    "request alone: it needs `disaggregation: {kind: always}` and a prefill "
                    "server that is ready"
                )
            return
        leg = "decode" if ANSWER_WITHIN_S in handover else "prefill"
        if mode != leg:
            raise EngineHandoverError(
                f"{self._where} runs with --disaggregation-mode {mode}, but its `role` is for {leg}"
            )
