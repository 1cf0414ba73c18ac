"""The load of a model's workers in the answer's headers, for proxies that ask for it (ORCA)."""

from __future__ import annotations

import msgspec
from multidict import istr

from commutator.frontend import Call

ASKED_BY = istr("endpoint-load-metrics-format")
"""The client's header that asks for it."""
_TOLD = "endpoint-load-metrics"


def note_load(call: Call, model: str | None, session_id: str | None) -> None:
    """Add the header if its form is known; the other two are as the client named them.

    It counts the requests that the model's workers have in hand, and those that wait for one.
    """
    form = call.headers[ASKED_BY].upper()
    if form not in {"TEXT", "JSON"}:
        return
    services = call.services
    name, _ = call.text_model(model, session_id)
    workers = (one for some in services.dispatcher.statuses() for one in some)
    metrics = {
        "num_requests_running": float(
            sum(one.active_requests_of_all for one in workers if one.model == name)
        ),
        "num_requests_waiting": float(services.dispatcher.waiting(name)),
    }
    if form == "JSON":
        told = msgspec.json.encode({"named_metrics": metrics}).decode()
    else:
        told = ", ".join(f"named_metrics.{key}={value:g}" for key, value in metrics.items())
    call.answer_headers[_TOLD] = f"{form} {told}"
