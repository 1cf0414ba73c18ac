"""What the rights of a principal make of a request. Pure."""

from __future__ import annotations

from commutator.contract.principal import SALT_SEPARATOR, Permission, Principal
from commutator.errors import PermissionDeniedError, RequestError

_WHAT = {
    "explain": "ask why a worker was chosen (X-Commutator-Explain)",
    "pin": "keep KV blocks in the tiers (cache_control)",
    "metrics": "read the metrics and the state of the deployment",
    "admin": "watch or change the deployment",
}


def may_use(principal: Principal, model: str) -> bool:
    """Whether the model exists for the principal."""
    return principal.models is None or model in principal.models


def salted(principal: Principal, own: str | None) -> str | None:
    """The cache salt of a request whose client sent the salt ``own``.

    The principal's salt goes before it, so clients may part the cache of their principal further,
    but never reach another's.
    """
    if principal.cache_salt is None:
        return own
    return principal.cache_salt if own is None else principal.cache_salt + SALT_SEPARATOR + own


def allowed_priority(principal: Principal, asked: int | None) -> int:
    """The priority of a request; without one, what is nearest to 0.

    Raises RequestError when the principal may not have it. A value that is quietly changed would
    let its client believe that its urgent requests are urgent.
    """
    if principal.priority is None:
        return asked or 0
    lowest, highest = principal.priority
    if asked is None:
        return min(max(0, lowest), highest)
    if not lowest <= asked <= highest:
        raise RequestError(
            f"priority: expected {lowest} to {highest}, the range of {principal.name}, got {asked}",
            "priority",
            "priority_not_allowed",
        )
    return asked


def check_answers(principal: Principal, answers: int, param: str = "n") -> None:
    """Raises RequestError for more answers than the principal may have of one request."""
    most = principal.limits.answers
    if most is not None and answers > most:
        raise RequestError(
            f"{param}: expected at most {most} answers to one request, the limit of "
            f"{principal.name}, got {answers}",
            param,
            "too_many_answers",
        )


def longest(principal: Principal, max_model_len: int) -> int:
    """The longest prompt plus answer in tokens, for a model that allows ``max_model_len``."""
    most = principal.limits.max_model_len
    return max_model_len if most is None else min(most, max_model_len)


def require(principal: Principal, permission: Permission, param: str | None = None) -> None:
    """Raises PermissionDeniedError, which names ``param``, without the permission."""
    if not principal.may(permission):
        raise PermissionDeniedError(
            f'{principal.name} may not {_WHAT[permission]}: it needs the permission "{permission}"',
            param,
        )
