"""The operations of a front-door process: which are served, and what is said where one is not."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from commutator.contract.operations import (
    Operations,
    OperationsConfig,
    OperationsContext,
    OperationsDoor,
    OperationsRoute,
)
from commutator.errors import ConfigError
from commutator.frontend.services import FrontendServices
from commutator.plugins import PluginHost

__all__ = ["ABSENT", "make_operations", "operations_routes"]

_BY_DEFAULT = ("console",)
"""Kinds that are served where they are installed and `operations` is left out."""

_NO_CONSOLE = (
    "the deployment's page is not served: pip install commutator-console, and leave the section "
    "`operations` out or name `console` in it"
)
ABSENT = dict.fromkeys(("/", "/ui", "/admin/live"), _NO_CONSOLE)
"""What is said at a path that one of our packages has, where it is not served."""


def make_operations(
    host: PluginHost,
    chosen: Sequence[OperationsConfig] | None,
    services: FrontendServices,
    local_socket: str | None,
) -> list[Operations]:
    """Those of the section `operations`; None: those that are served by default."""
    kinds = host.operations.kinds
    if chosen is None:
        found = [kinds[name].config_class(kind=name) for name in _BY_DEFAULT if name in kinds]
    else:
        found = [*chosen]
    context = OperationsContext(services=services, local_socket=local_socket)
    return [kinds[one.kind].thing(one, context) for one in found]


def operations_routes(
    operations: Iterable[Operations], door: OperationsDoor, taken: Iterable[tuple[str, str]] = ()
) -> list[OperationsRoute]:
    """What all of them answer on ``door``; ``taken`` are methods and paths that are core's.

    Raises ConfigError when two answer the same, or one what core does.
    """
    owners: dict[tuple[str, str], Operations | None] = dict.fromkeys(taken)
    made = []
    for one in operations:
        for route in one.routes(door):
            other = owners.setdefault((route.method, route.path), one)
            if other is not one:
                first = "commutator itself" if other is None else type(other).__module__
                problem = f"operations: {route.method} {route.path} is claimed by {first} and by "
                raise ConfigError([f"{problem}{type(one).__module__}; leave one of the two out"])
            made.append(route)
    return made
