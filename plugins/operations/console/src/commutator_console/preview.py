"""Where a prompt would be routed now, for `commutator route explain`; nothing is sent."""

from __future__ import annotations

from typing import TYPE_CHECKING
from uuid import uuid4

import msgspec
from aiohttp import web

from commutator.contract.operations import OperationsRoute
from commutator.contract.request import GenerateRequest, SamplingParams
from commutator.errors import RequestError

if TYPE_CHECKING:
    from commutator.frontend import FrontendServices

PREVIEW_PATH = "/admin/route/explain"


class _Question(msgspec.Struct, forbid_unknown_fields=True):
    model: str
    token_ids: list[int]
    """The whole prompt."""


def preview_route(services: FrontendServices) -> OperationsRoute:
    """POST a model and a prompt's tokens; the answer is the decision as JSON."""

    async def preview(request: web.Request) -> web.Response:
        try:
            asked = msgspec.json.decode(await request.read(), type=_Question)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise RequestError(f"body: {error}") from error
        if asked.model not in services.models:
            raise RequestError(
                f"there is no model {asked.model[:80]!r}", "model", "model_not_found"
            )
        if not asked.token_ids:
            raise RequestError("token_ids: expected at least one token", "token_ids")
        would_be = GenerateRequest(
            request_id=f"preview-{uuid4().hex}",
            token_ids=tuple(asked.token_ids),
            sampling=SamplingParams(max_tokens=1),
        )
        decision = services.dispatcher.preview(asked.model, would_be)
        return web.json_response(decision)

    return OperationsRoute(method="POST", path=PREVIEW_PATH, needs="watch", handle=preview)
