"""Where a request of a gateway meets routing: instead of being sent, it is told where to go.

To a protocol's handler the pick is a dispatch whose answer has no tokens: it ends when the gateway
says that the worker's has. So limits, deadlines, accounts and observers are those of every door.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import partial
from typing import Any, Self

import msgspec

from commutator.contract.principal import Principal
from commutator.contract.request import (
    UNKNOWN_CALLER,
    Caller,
    FinishReason,
    GenerateRequest,
    TokenDelta,
)
from commutator.contract.worker import WorkerRecord
from commutator.frontend import Forward, parse_object
from commutator_endpoint_picker.endpoints import endpoint_of, in_order_of_trial
from commutator_endpoint_picker.messages import MODEL_REWRITE, Decided
from commutator_endpoint_picker.named import WORKER_HEADER
from commutator_endpoint_picker.usage import UsageTail
from commutator_http.call import MessageCall

_LENGTHS = ("max_completion_tokens", "max_output_tokens", "max_tokens")
_OK = 200


class Endpoints:
    """Where the workers answer clients, as far as they were asked for."""

    def __init__(self, ports: Mapping[str, int]) -> None:
        """``ports``: as for ``endpoint_of``."""
        self._ports = ports
        self._known: dict[str, tuple[WorkerRecord, str | None]] = {}

    def of(self, record: WorkerRecord) -> str | None:
        """None: nowhere."""
        known = self._known.get(record.worker_id)
        if known is None or known[0] is not record:
            known = self._known[record.worker_id] = record, endpoint_of(record, self._ports)
        return known[1]

    def worker_at(self, endpoint: str) -> str | None:
        """The worker that answers there; None: none that was asked for, or several."""
        found = [name for name, (_, where) in self._known.items() if where == endpoint]
        return found[0] if len(found) == 1 else None

    def keep(self, worker_ids: set[str]) -> None:
        """Forget all other workers."""
        self._known = {name: one for name, one in self._known.items() if name in worker_ids}


class Pick:
    """One decision, and what the gateway tells of the answer."""

    def __init__(self, forward: Forward, decided: Decided) -> None:
        self.forward = forward
        self.decided = decided
        self.usage = UsageTail()
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def take(self, piece: bytes) -> None:
        """The next bytes of the answer."""
        self.forward.account(piece)
        self.usage.take(piece)

    def moved(self, worker_id: str, load: Any) -> None:
        """The gateway sent it to another worker, whose load in ``load`` it is from now on."""
        forward, ticket = self.forward, self.forward.ticket
        load.release(ticket)
        forward.worker_id = worker_id
        forward.ticket = load.dispatch(worker_id, ticket.prompt_tokens, ticket.block_size)
        forward.ticket.on_served = ticket.on_served

    def end(self) -> None:
        """The answer is whole. Idempotent."""
        if not self.ended.done():
            self.forward.complete = True
            self.ended.set_result(None)


class PickingDispatcher:
    """Stands for the dispatcher in the services of one call."""

    def __init__(
        self,
        dispatcher: Any,
        call: MessageCall,
        endpoints: Endpoints,
        subset: frozenset[str] | None,
        picked: asyncio.Future[Pick],
    ) -> None:
        """``subset``: the endpoints that may be picked; None: all. ``picked`` gets the pick."""
        self._dispatcher = dispatcher
        self._call = call
        self._endpoints = endpoints
        self._subset = subset
        self._picked = picked

    def __getattr__(self, name: str) -> Any:
        return getattr(self._dispatcher, name)

    def forwards(self, model: str) -> bool:
        """Every worker gets requests as clients send them."""
        del model
        return True

    async def dispatch(
        self,
        model: str,
        request: GenerateRequest,
        caller: Caller = UNKNOWN_CALLER,
        sequence_hashes: Sequence[int] | None = None,
        **_: Any,
    ) -> PickedAnswer:
        """Pick a worker for the request that the body was understood as.

        Further answers to it, and further prompts of it, are of the first one's worker: a body is
        sent once. Raises as ``Dispatcher.dispatch`` does.
        """
        if self._picked.done():
            return PickedAnswer(self._picked.result(), owns=False)
        if not request.is_plain:
            _check_can(self._dispatcher.infos(model), request)
        forward, known = await self._place(model, request, caller, sequence_hashes)
        answer = PickedAnswer(Pick(forward, _NOTHING), owns=True)
        await forward.__aenter__()
        try:
            call = self._call
            send = partial(_for_worker, call.body, forward.info.model, request, call.principal)
            answer.pick.decided = self._decided(
                forward, known, await call.off_loop(len(call.body), send)
            )
        except BaseException:
            await answer.aclose()
            raise
        self._picked.set_result(answer.pick)
        return answer

    async def forward(
        self, model: str, request: GenerateRequest, caller: Caller = UNKNOWN_CALLER
    ) -> PickedForward:
        """Pick a worker for a request that only its engine understands."""
        forward, known = await self._place(model, request, caller, None)
        return PickedForward(forward, partial(self._send, forward, known))

    async def _place(
        self,
        model: str,
        request: GenerateRequest,
        caller: Caller,
        sequence_hashes: Sequence[int] | None,
    ) -> tuple[Forward, dict[str, str]]:
        """The choice, and the endpoints of all that could have been chosen."""
        known: dict[str, str] = {}
        salted, plain = request.cache_salt is not None, request.is_plain

        def usable(worker: Any) -> bool:
            record: WorkerRecord = worker.record
            endpoint = self._endpoints.of(record)
            if endpoint is None or (self._subset is not None and endpoint not in self._subset):
                return False
            if salted and not record.info.keeps_salts_apart:
                return False
            if not plain and record.info.unmet(request) is not None:
                return False
            known[record.worker_id] = endpoint
            return True

        forward: Forward = await self._dispatcher.forward(
            model, request, caller, sequence_hashes, usable
        )
        return forward, known

    def _decided(self, forward: Forward, known: Mapping[str, str], body: bytes) -> Decided:
        call, route = self._call, forward.route
        call.note_routing((forward.worker_id,), lambda: [route.explain()])
        headers = {WORKER_HEADER: forward.worker_id, MODEL_REWRITE: forward.info.model}
        chosen = known[forward.worker_id]
        return Decided(
            endpoints=in_order_of_trial(route.decision, chosen, route.candidates, known),
            headers={**headers, "x-request-id": call.request_id, **forward.headers},
            body=body,
        )

    def _send(self, forward: Forward, known: Mapping[str, str], body: bytes) -> Pick:
        pick = Pick(forward, self._decided(forward, known, body))
        self._picked.set_result(pick)
        return pick


_NOTHING = Decided(endpoints=(), headers={}, body=b"")


class PickedAnswer:
    """A dispatch without tokens: its one delta comes when the gateway says that it ended."""

    def __init__(self, pick: Pick, *, owns: bool) -> None:
        """``owns``: the worker's load is released with it."""
        self.pick = pick
        self.route = pick.forward.route
        self.migrations: tuple[()] = ()
        self.generated_tokens = 0
        self._open = owns
        self._over = False

    @property
    def worker_id(self) -> str:
        return self.pick.forward.worker_id

    @property
    def worker_ids(self) -> tuple[str, ...]:
        return (self.worker_id,)

    def explain(self) -> dict[str, Any]:
        return self.route.explain()

    def __aiter__(self) -> AsyncIterator[TokenDelta]:
        return self

    async def __anext__(self) -> TokenDelta:
        if self._over:
            raise StopAsyncIteration
        await asyncio.shield(self.pick.ended)
        self._over = True
        await self.stop()
        tokens = self.pick.usage.tokens(self.pick.forward.ticket.prompt_tokens)
        return TokenDelta(cached_tokens=tokens.cached, finish_reason=FinishReason.STOP)

    async def stop(self) -> None:
        """The request is finished. Idempotent."""
        await self._leave(None)

    async def aclose(self) -> None:
        """The request is given up, if it is not finished. Idempotent."""
        self._over = True
        await self._leave(asyncio.CancelledError())

    async def _leave(self, error: BaseException | None) -> None:
        if self._open:
            self._open = False
            await self.pick.forward.__aexit__(type(error) if error else None, error, None)


class PickedForward:
    """A forwarded request whose answer the gateway has: to its sender it is empty."""

    status = _OK
    content_type = ""

    def __init__(self, forward: Forward, decide: Callable[[bytes], Pick]) -> None:
        """``decide`` makes the pick of a body."""
        self.route, self.info, self.worker_id = forward.route, forward.info, forward.worker_id
        self._forward = forward
        self._decide = decide
        self._pick: Pick | None = None

    async def __aenter__(self) -> Self:
        await self._forward.__aenter__()
        return self

    async def __aexit__(self, *raised: object) -> None:
        kind, error, trace = raised
        assert error is None or isinstance(error, BaseException)
        await self._forward.__aexit__(kind, error, trace)

    async def send(self, path: str, body: bytes, headers: Mapping[str, str]) -> Self:
        """Have the gateway send ``body``."""
        del path, headers  # they are the client's
        self._pick = self._decide(body)
        return self

    async def chunks(self) -> AsyncIterator[bytes]:
        """Nothing, once the worker's answer has ended."""
        assert self._pick is not None
        await asyncio.shield(self._pick.ended)
        nothing: tuple[bytes, ...] = ()
        for piece in nothing:
            yield piece


def _check_can(infos: Sequence[Any], request: GenerateRequest) -> None:
    """Raises RequestError when there are workers, and none can do what the request asks."""
    unmet = [info.unmet(request) for info in infos]
    if unmet and all(one is not None for one in unmet):
        raise unmet[0]


def _for_worker(body: bytes, model: str, request: GenerateRequest, principal: Principal) -> bytes:
    """The body as its worker gets it: what was checked is what is sent, by parsers that differ."""
    sent: dict[str, Any] = {**parse_object(body), "model": model}
    longest = request.sampling.max_tokens
    named = [name for name in _LENGTHS if isinstance(sent.get(name), int)]
    for name in named:
        sent[name] = min(sent[name], longest)
    if not named and principal.limits.max_model_len is not None:
        sent["max_tokens"] = longest
    if "priority" in sent:
        sent["priority"] = request.priority
    if request.cache_salt is not None:
        sent["cache_salt"] = request.cache_salt
    return msgspec.json.encode(sent)
