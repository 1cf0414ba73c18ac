"""How a worker is reached, and what an engine of one's own needs to be one."""

from commutator.engine.client import TokenApiClient
from commutator.engine.process import engine_command, run_engine_process
from commutator.engine.server import Emit, TokenApiServer, TokenEngine

__all__ = [
    "Emit",
    "TokenApiClient",
    "TokenApiServer",
    "TokenEngine",
    "engine_command",
    "run_engine_process",
]
