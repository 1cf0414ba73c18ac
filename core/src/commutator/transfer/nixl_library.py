"""Imports NIXL, quietly and where it works best, and turns its exceptions into ours."""

from __future__ import annotations

import importlib
import logging
import os
import sys
from importlib.util import find_spec
from types import TracebackType
from typing import Any

from commutator.errors import TransferError

__all__ = ["load_nixl", "make_agent", "nixl_errors"]

_PROGRESS_DELAY_US = 1000
"""What NIXL's progress thread may sleep where nothing wakes it. NIXL's Python API sets 0, with
which an idle UCX agent keeps a core busy and takes it from the transfers: with this, an idle agent
needs 3 % of a core, and two processes on two cores moved up to twice as much."""


def load_nixl() -> Any:
    """The module of NIXL's Python API. Raises TransferError when it cannot be imported.

    NIXL logs errors only, unless NIXL_LOG_LEVEL says otherwise.
    """
    os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")
    raise_exceptions = logging.raiseExceptions
    try:
        return _import()
    except ImportError as error:
        raise TransferError(
            f"NIXL, which moves all KV, cannot be imported ({error}): pip install 'nixl[cu12]'"
        ) from error
    finally:
        # NIXL's own set-up hides mistakes in everybody's log calls.
        logging.raiseExceptions = raise_exceptions


def _import() -> Any:
    detect = importlib.import_module("nixl_meta_utils").detect_cuda_major
    if detect() is None and "nixl" not in sys.modules and find_spec("nixl_cu12") is not None:
        # Where there is no CUDA, `nixl` takes its CUDA 13 build, and that build's OBJ backend needs
        # a library that only a CUDA 13 machine has. Only one build can be in a process: whoever
        # imports `nixl` later, such as an engine, must not get the other.
        sys.modules.setdefault("nixl_cu13", None)  # type: ignore[arg-type]
    return importlib.import_module("nixl._api")


def make_agent(name: str) -> Any:
    """A NIXL agent without backends. Raises TransferError when NIXL cannot be imported."""
    api = load_nixl()
    bindings = api.nixlBind
    with nixl_errors(f"make the agent {name}"):
        agent = api.nixl_agent(name, api.nixl_agent_config(enable_prog_thread=False, backends=[]))
        config = bindings.nixlAgentConfig()
        config.useProgThread = True
        config.useListenThread = False
        config.syncMode = bindings.NIXL_THREAD_SYNC_NONE
        config.captureTelemetry = True  # a microsecond a transfer
        config.pthrDelay = _PROGRESS_DELAY_US
        agent.agent = bindings.nixlAgent(name, config)
    return agent


class nixl_errors:  # noqa: N801  used like a function
    """Whatever NIXL raises inside is raised as a TransferError that says what was being done."""

    __slots__ = ("_doing",)

    def __init__(self, doing: object) -> None:
        """``doing`` is made text only for an error: every transfer passes here."""
        self._doing = doing

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if isinstance(error, Exception) and not isinstance(error, TransferError):
            raise TransferError(f"NIXL could not {self._doing}: {error}") from error
