"""Operations: what operators see and do on the doors of a deployment, such as a live view."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable
from contextvars import ContextVar
from typing import Any, Literal, get_args

from attrs import Attribute, field, frozen

from commutator.contract.registry import Registry
from commutator.contract.service import Service
from commutator.contract.settings import setting

__all__ = [
    "OPERATIONS_PREFIX",
    "OPERATOR",
    "Operations",
    "OperationsConfig",
    "OperationsContext",
    "OperationsDoor",
    "OperationsNeed",
    "OperationsRoute",
    "SupervisedOperations",
    "SupervisorContext",
]

OPERATIONS_PREFIX = "/admin/"
"""Of the path of every route that asks who its caller is."""

OPERATOR: ContextVar[str] = ContextVar("operator", default="")
"""Who sent the request that ``OperationsRoute.handle`` answers, in words for a log."""

OperationsNeed = Literal["act", "watch", "nothing"]
"""What a caller needs. "act", to change the run: the permission `admin`, or to be the run's own
user on its Unix socket; without keys nobody else may. "watch", to look at it: the permission
`admin`; without keys, to be on the deployment's own machine. "nothing": for files without data."""


@frozen(kw_only=True)
class OperationsConfig:
    """Options of every entry of `operations`; each plugin adds its own."""

    kind: str = setting("The plugin that serves operators.")


def _is_guarded(route: OperationsRoute, _: Attribute[Any], path: str) -> None:
    if not path.startswith("/"):
        raise ValueError(f'a path begins with "/", not {path!r}')
    if route.needs not in get_args(OperationsNeed):
        raise ValueError(f"needs: expected one of {', '.join(get_args(OperationsNeed))}")
    if (route.needs != "nothing") != path.startswith(OPERATIONS_PREFIX):
        raise ValueError(
            f"{path} needs {route.needs}: a path begins with {OPERATIONS_PREFIX} if, and only if, "
            "its callers need a right; nobody is asked who they are elsewhere"
        )


@frozen(kw_only=True)
class OperationsRoute:
    """One request that operators can make. Raises ValueError for a path that is not guarded."""

    method: Literal["GET", "POST"]
    """HEAD is answered where "GET" needs nothing."""
    needs: OperationsNeed
    """The door checks it before ``handle``."""
    path: str = field(validator=_is_guarded)
    """Such as "/admin/live" or, for a page, "/ui"; names in braces, as aiohttp has them. A caller
    needs nothing if, and only if, it does not begin with ``OPERATIONS_PREFIX``."""
    handle: Callable[[Any], Awaitable[Any]]
    """Answers one ``aiohttp.web.Request`` by an ``aiohttp.web.StreamResponse``: a coroutine
    function. The door answers what it raises, also once a stream has begun."""


@frozen(kw_only=True)
class OperationsDoor:
    """What operations may say about the door on which they are served."""

    serves_clients: bool
    """Whether clients are served at the same address."""
    needs_key: bool
    """Whether callers need a key."""


@frozen(kw_only=True)
class OperationsContext:
    """What operations are made from, in one front-door process."""

    services: Any
    """The ``commutator.frontend.FrontendServices``: models, routing, limits and metrics."""
    local_socket: str | None
    """Path of the Unix socket on which this process serves its own user, beside those of the other
    front doors of the deployment in the same folder; None without one."""


@frozen(kw_only=True)
class SupervisorContext:
    """What a part of operations is made from that runs beside a supervisor."""

    supervisor: Any
    """The ``commutator.supervisor.supervisor.Supervisor``, whose workers are not started yet."""
    registry: Registry
    """The deployment's registry."""


@frozen
class SupervisedOperations:
    """Registered in place of a factory, for operations with a part beside the supervisor."""

    at_door: Callable[[Any, OperationsContext], Operations]
    """``factory(config, context)``, as for all operations."""
    beside: Callable[[Any, SupervisorContext], Awaitable[Service]]
    """Makes the part beside the supervisor, which may change what that is about to run."""

    def __call__(self, config: Any, context: OperationsContext) -> Operations:
        """Make the part at a door."""
        return self.at_door(config, context)


class Operations(ABC):
    """What one plugin serves operators. One for each front-door process, for all its doors."""

    @abstractmethod
    def routes(self, door: OperationsDoor) -> Iterable[OperationsRoute]:
        """What it answers on ``door``. Called once for each door of the process.

        On the Unix socket only those that need something are served.
        """
