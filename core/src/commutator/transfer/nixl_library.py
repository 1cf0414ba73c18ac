"""Imports NIXL, quietly and where it works best, and turns its exceptions into ours."""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
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
            f"NIXL, which moves all KV, cannot be imported ({error}): pip install nixl"
        ) from error
    finally:
        # NIXL's own set-up hides mistakes in everybody's log calls.
        logging.raiseExceptions = raise_exceptions


def _import() -> Any:
    detect = importlib.import_module("nixl_meta_utils").detect_cuda_major
    if detect() is None:
        # Where there is no CUDA, `nixl` takes its CUDA 13 build, and that build's OBJ backend needs
        # a library that only a CUDA 13 machine has.
        try:
            return importlib.import_module("nixl_cu12._api")
        except ModuleNotFoundError:
            pass
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
        config.pthrDelay = _PROGRESS_DELAY_US
        agent.agent = bindings.nixlAgent(name, config)
    return agent


@contextmanager
def nixl_errors(doing: str) -> Iterator[None]:
    """Whatever NIXL raises inside is raised as a TransferError that says what was being done."""
    try:
        yield
    except TransferError:
        raise
    except Exception as error:
        raise TransferError(f"NIXL could not {doing}: {error}") from error
