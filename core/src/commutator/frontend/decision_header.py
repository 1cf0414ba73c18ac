"""The header that tells a client why its request went where it went."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from aiohttp import web

from commutator.frontend.exchange import EXCHANGE

__all__ = ["tell_decision"]

Explanations = list[dict[str, Any]]

# Proxies and clients refuse longer headers.
_MAX_HEADER_CHARACTERS = 6_000
_MAX_REASON_CHARACTERS = 200


def tell_decision(request: web.Request, explain: Callable[[], Explanations]) -> None:
    """Answer with ``X-Commutator-Decision`` if the client asked for it."""
    if request.headers.get("X-Commutator-Explain") == "1":
        request[EXCHANGE].headers["X-Commutator-Decision"] = _in_one_header(explain())


def _in_one_header(explanations: Explanations) -> str:
    """Compact JSON: an object, or for several answers a list of them, cut to what fits."""
    text = _compact(explanations)
    if len(text) > _MAX_HEADER_CHARACTERS:
        # Of many workers the chosen one matters most, so the others go.
        for one in explanations:
            chosen = [c for c in one["candidates"] if c["worker_id"] == one["worker_id"]]
            one["left_out"] = len(one["candidates"]) - len(chosen)
            one["candidates"] = chosen
            one["reason"] = one["reason"][:_MAX_REASON_CHARACTERS]
        while len(text := _compact(explanations)) > _MAX_HEADER_CHARACTERS:
            explanations = explanations[: len(explanations) // 2]
    return text


def _compact(shown: Explanations) -> str:
    return json.dumps(shown[0] if len(shown) == 1 else shown, separators=(",", ":"))
