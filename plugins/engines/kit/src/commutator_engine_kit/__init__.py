"""What runs in or beside an engine: serving the token API, KV blocks, starting processes.

An engine written in Python serves the token API: implement ``TokenEngine``, start it with
``run_engine_process`` in its ``__main__``, and return ``engine_command`` and
``commutator.engine.TokenApiClient`` from its connector. Connectors to HTTP servers also use
``.http``, ``.completions``, ``.launching``, ``.model_files``, ``.model_identity`` and
``.preflight``; KV connectors whose workers are other processes than their scheduler use
``.connector_worker``; engines in PyTorch ``.pytorch``. ``.constraints`` has what answers follow,
``.kv`` the KV blocks, ``.nixl`` what moves them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from commutator.faces import face

if TYPE_CHECKING:
    from commutator.launcher.child import log_to_stderr, told_to_stop
    from commutator.launcher.ports import free_ports
    from commutator_engine_kit.events import EventPublisher
    from commutator_engine_kit.process import EngineStart, engine_command, run_engine_process
    from commutator_engine_kit.server import Emit, TokenApiServer, TokenEngine

__all__ = [
    "Emit",
    "EngineStart",
    "EventPublisher",
    "TokenApiServer",
    "TokenEngine",
    "engine_command",
    "free_ports",
    "log_to_stderr",
    "run_engine_process",
    "told_to_stop",
]

__getattr__ = face(__name__, __file__)
