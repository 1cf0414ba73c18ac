"""Where workers answer clients, as gateways name it: "IP:PORT". Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from ipaddress import IPv6Address, ip_address
from urllib.parse import urlsplit

from commutator import Candidate, WorkerRecord
from commutator.contract.routing import Decision

_LOCAL = "127.0.0.1"
FALL_BACKS = 2


def endpoint_of(record: WorkerRecord, ports: Mapping[str, int]) -> str | None:
    """Where the worker answers HTTP requests as clients send them; None: nowhere.

    ``ports``: by engine, that of the front door beside each of its workers. Without one, the worker
    itself must take such requests. Gateways resolve no names, so the host must be an address.
    """
    port = ports.get(record.engine)
    if port is None and not record.info.forwards:
        return None
    try:
        parts = urlsplit(record.address if "//" in record.address else f"//{record.address}")
        host, own = parts.hostname, parts.port
        if host is None or (port is None and own is None):
            return None
        address = ip_address(_LOCAL if host == "localhost" else host)
    except ValueError:
        return None
    shown = f"[{address}]" if isinstance(address, IPv6Address) else str(address)
    return f"{shown}:{own if port is None else port}"


def in_order_of_trial(
    decision: Decision,
    chosen: str,
    candidates: Sequence[Candidate],
    endpoints: Mapping[str, str],
) -> list[str]:
    """The endpoint ``chosen``, then those of the next best workers, each once.

    ``endpoints``: of the workers that may serve the request, by id. By the policy's cost, where it
    tells one; else the idlest first.
    """

    def cost(candidate: Candidate) -> tuple[float, int]:
        scores = decision.scores.get(candidate.worker_id, {})
        return scores.get("cost", 0.0), candidate.load.active_requests

    compared = [one for one in candidates if one.worker.worker_id in endpoints]
    if any("cost" in terms for terms in decision.scores.values()):
        compared = [one for one in compared if one.worker_id in decision.scores]
    others = (endpoints[one.worker.worker_id] for one in sorted(compared, key=cost))
    return list(dict.fromkeys([chosen, *others]))[: 1 + FALL_BACKS]
