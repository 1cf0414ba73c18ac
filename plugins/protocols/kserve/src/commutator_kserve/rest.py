"""The protocol over HTTP: /v2, with Triton's generate and binary tensors."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

import msgspec

from commutator import Route
from commutator.contract.answer import AnswerWriter, Failure
from commutator.frontend import Call, Plan, parse_object
from commutator_kserve.inference import Inference, from_generate, from_json
from commutator_kserve.models import (
    index,
    model_config,
    model_is_ready,
    model_metadata,
    server_is_ready,
    server_metadata,
)
from commutator_kserve.serving import serve
from commutator_kserve.writers import HEADER_LENGTH, OCTETS, GenerateWriter, JsonForm, TensorWriter
from commutator_openai.values import optional, wrong

_PATH = re.compile(
    r"(?P<model>.+?)(/versions/(?P<version>[^/]+))?(/(?P<what>ready|config|infer|generate(_stream)?))?"
)
"""What follows /v2/models/; models may have slashes in their names."""
_TYPES = ("application/json", OCTETS, "none")
"""Of bodies; Triton's client names none. Pages of other origins are kept out by the door."""
_encode = msgspec.json.encode


def rest_routes() -> Sequence[Route]:
    """What is answered over HTTP."""
    return [
        Route(method="GET", path="/v2", handle=_server),
        Route(method="GET", path="/v2/health/live", handle=_live),
        Route(method="GET", path="/v2/health/ready", handle=_ready),
        Route(method="GET", path="/v2/models/{rest:.+}", handle=_look),
        Route(method="POST", path="/v2/models/{rest:.+}", handle=_ask),
        Route(method="POST", path="/v2/repository/index", handle=_index),
    ]


async def _server(call: Call) -> None:
    await call.reply([_encode(server_metadata())])


async def _live(call: Call) -> None:
    await call.reply([_encode({"live": True})])


async def _ready(call: Call) -> None:
    if not server_is_ready(call.services):
        raise Failure(503, "not every model has a ready worker", "no_worker")
    await call.reply([_encode({"ready": True})])


async def _index(call: Call) -> None:
    async with call.room_for_body(*_TYPES):
        body = await call.read()
        asked = parse_object(body) if body else {}
    ready = optional(asked, "ready", bool, "true or false")
    await call.reply([_encode(index(call, ready=bool(ready)))])


def _asked_of(call: Call) -> tuple[str, str, str]:
    """(model, version, what is asked); names the route for the metrics."""
    found = _PATH.fullmatch(call.parts["rest"].rstrip("/"))
    if found is None:
        raise Failure(404, "no such path", "not_found")
    model, version, what = found["model"], found["version"] or "", found["what"] or ""
    call.endpoint = f"/v2/models/{{model}}{what and '/' + what}"
    return model, version, what


async def _look(call: Call) -> None:
    model, version, what = _asked_of(call)
    match what:
        case "":
            said = model_metadata(call, model, version)
        case "config":
            said = model_config(call, model, version)
        case "ready":
            if not model_is_ready(call, model, version):
                raise Failure(503, f"{model[:100]} has no ready worker", "no_worker")
            said = {"name": model, "ready": True}
        case _:
            raise Failure(405, f"{what} is asked by POST", "method_not_allowed")
    await call.reply([_encode(said)])


async def _ask(call: Call) -> None:
    model, version, what = _asked_of(call)
    asked: dict[str, Callable[[Call, str, str], Awaitable[None]]] = {
        "infer": _infer,
        "generate": partial(_generate, streams=False),
        "generate_stream": partial(_generate, streams=True),
    }
    if what not in asked:
        raise Failure(404, "expected infer, generate or generate_stream", "not_found")
    work = asked[what](call, model, version)
    await call.traced("infer", work)


async def _infer(call: Call, model: str, version: str) -> None:
    limit = call.time_limit()
    async with limit:
        async with call.room_for_body(*_TYPES):
            body = await call.read()
            read = partial(_read, body, call.headers.get(HEADER_LENGTH), model, version)
            inference = await call.off_loop(len(body), read)

        def writer(plan: Plan, inference: Inference) -> AnswerWriter:
            form = JsonForm(inference, plan.name)
            answers, echoes = len(plan.requests), plan.echoes or ()
            return TensorWriter(form, answers, echoes, call.answer_headers)

        await serve(call, inference, limit, JsonForm, writer, streams=False)


def _read(body: bytes, length: str | None, model: str, version: str) -> Inference:
    binary = None
    if length is not None:
        if not (length.isascii() and length.isdigit()) or int(length[:12]) > len(body):
            raise wrong(HEADER_LENGTH, f"expected at most the body's {len(body)} bytes")
        size = int(length[:12])
        body, binary = body[:size], body[size:]
    return from_json(parse_object(body), model, version, binary)


async def _generate(call: Call, model: str, version: str, *, streams: bool) -> None:
    limit = call.time_limit()
    async with limit:
        async with call.room_for_body():
            body = await call.read()
            inference = await call.off_loop(
                len(body), lambda: from_generate(parse_object(body), model, version)
            )

        def writer(plan: Plan, inference: Inference) -> AnswerWriter:
            answers, echoes = len(plan.requests), plan.echoes or ()
            return GenerateWriter(inference, plan.name, answers, echoes)

        await serve(call, inference, limit, None, writer, streams=streams)
