"""The service ``inference.GRPCInferenceService``."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

from commutator import Route
from commutator.contract.answer import AnswerWriter
from commutator.errors import RequestError
from commutator.frontend import Call, Plan
from commutator_kserve.inference import Inference, from_message
from commutator_kserve.messages import SERVICE, message, parsed
from commutator_kserve.models import (
    index,
    model_config,
    model_is_ready,
    model_metadata,
    server_is_ready,
    server_metadata,
)
from commutator_kserve.serving import serve
from commutator_kserve.writers import MessageForm, StreamForm, TensorWriter

_ModelInferRequest = message("ModelInferRequest")
_RUNNING = "kserve.running"


def rpc_routes() -> Sequence[Route]:
    """What is answered on a door of RPCs."""
    looks: dict[str, Callable[[Call, Any], dict[str, Any]]] = {
        "ServerLive": lambda _, __: {"live": True},
        "ServerReady": lambda call, _: {"ready": server_is_ready(call.services)},
        "ServerMetadata": lambda _, __: server_metadata(),
        "ModelReady": lambda call, of: {"ready": model_is_ready(call, of.name, of.version)},
        "ModelMetadata": lambda call, of: model_metadata(call, of.name, of.version),
        "ModelConfig": lambda call, of: {"config": model_config(call, of.name, of.version)},
        "RepositoryIndex": lambda call, of: {"models": index(call, ready=of.ready)},
    }
    return [
        *(_route("RPC_GET", name, _look(name, answer)) for name, answer in looks.items()),
        _route("RPC", "ModelInfer", _infer),
        _route("RPC_STREAM", "ModelStreamInfer", _stream_infer),
    ]


def _route(method: str, name: str, handle: Callable[[Call], Awaitable[None]]) -> Route:
    return Route(method=method, path=f"/{SERVICE}/{name}", handle=handle)


def _look(
    name: str, answer: Callable[[Call, Any], dict[str, Any]]
) -> Callable[[Call], Awaitable[None]]:
    sent, said = message(f"{name}Request"), message(f"{name}Response")

    async def handle(call: Call) -> None:
        async with call.room_for_body():
            asked = parsed(sent, await call.read())
        await call.reply([said(**answer(call, asked)).SerializeToString()])

    return handle


async def _read(call: Call) -> Inference:
    async with call.room_for_body():
        body = await call.read()
        return await call.off_loop(
            len(body), lambda: from_message(parsed(_ModelInferRequest, body))
        )


async def _infer(call: Call) -> None:
    async def serving() -> None:
        limit = call.time_limit()
        async with limit:
            inference = await _read(call)
            writer = partial(_writer, call, MessageForm)
            await serve(call, inference, limit, MessageForm, writer, streams=False)

    await call.traced("infer", serving())


async def _stream_infer(call: Call) -> None:
    async def serving() -> None:
        limit = call.time_limit()
        async with limit:
            inference = await _read(call)
            await call.begin("", failed=StreamForm(inference, inference.model).failed)
            running = _running(call, inference.id)
            if inference.parameters.get("cancel") is True:
                _cancel(call, inference)
                return
            task = asyncio.current_task()
            assert task is not None
            running.add(task)
            try:
                writer = partial(_writer, call, StreamForm)
                await serve(call, inference, limit, StreamForm, writer, streams=None)
            finally:
                running.discard(task)
                if not running:
                    _all_running(call).pop(inference.id, None)

    await call.traced("infer", serving())


def _writer(call: Call, form: type[MessageForm], plan: Plan, inference: Inference) -> AnswerWriter:
    return TensorWriter(
        form(inference, plan.name),
        len(plan.requests),
        plan.echoes or (),
        call.answer_headers,
    )


_Tasks = set[asyncio.Task[Any]]


def _all_running(call: Call) -> dict[str, _Tasks]:
    """The requests of the stream that are being answered, by the client's id."""
    assert call.connection is not None
    found: dict[str, _Tasks] = call.connection.setdefault(_RUNNING, {})
    return found


def _running(call: Call, request_id: str) -> _Tasks:
    return _all_running(call).setdefault(request_id, set())


def _cancel(call: Call, inference: Inference) -> None:
    """End the requests of an id; each ends with a message that says so.

    One that has ended just before is cancelled for nothing. Raises RequestError.
    """
    if not inference.id:
        raise RequestError("id: `cancel` needs the id of a request of this stream", "id")
    if inference.inputs:
        raise RequestError("cancel: expected no inputs with it", "cancel")
    for task in _all_running(call).pop(inference.id, ()):
        task.cancel()
