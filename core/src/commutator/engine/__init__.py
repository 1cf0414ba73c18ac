"""Building blocks for engine plugins: serving requests and starting processes.

An engine written in Python serves the token API: implement ``TokenEngine``, start it with
``run_engine_process`` in its ``__main__``, and return ``engine_command`` and ``TokenApiClient``
from its connector. Connectors to HTTP servers also use ``commutator.engine.http``,
``.completions``, ``.launching``, ``.model_files``, ``.model_identity`` and ``.preflight``; KV
connectors whose workers are other processes than their scheduler use ``.connector_worker``.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from commutator.engine.client import TokenApiClient
    from commutator.engine.process import EngineStart, engine_command, run_engine_process
    from commutator.engine.protocol import DeltaStream
    from commutator.engine.server import Emit, TokenApiServer, TokenEngine
    from commutator.launcher.ports import free_ports

__all__ = [
    "DeltaStream",
    "Emit",
    "EngineStart",
    "TokenApiClient",
    "TokenApiServer",
    "TokenEngine",
    "engine_command",
    "free_ports",
    "run_engine_process",
]

_HOMES = (
    "commutator.engine.protocol",
    "commutator.engine.server",
    "commutator.engine.client",
    "commutator.engine.process",
    "commutator.launcher.ports",
)


def __getattr__(name: str) -> Any:
    if name in __all__:
        for home in map(import_module, _HOMES):
            if name in home.__all__:
                return getattr(home, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
