"""Imports NIXL with fitting settings, and turns its exceptions into TransferError."""

from __future__ import annotations

import ctypes
import importlib
import logging
import os
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from types import TracebackType
from typing import Any

from commutator.errors import TransferError

log = logging.getLogger(__name__)

_PROGRESS_DELAY_US = 1000
"""The longest sleep of NIXL's progress thread when nothing wakes it. NIXL's Python API sets 0, with
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
        # Importing NIXL switches off error reports of all log calls.
        logging.raiseExceptions = raise_exceptions


def _import() -> Any:
    detect = importlib.import_module("nixl_meta_utils").detect_cuda_major
    if detect() is None and "nixl" not in sys.modules and find_spec("nixl_cu12") is not None:
        # Without CUDA, `nixl` loads its CUDA 13 build, whose OBJ backend needs a library that only
        # a CUDA 13 machine has. A process can hold only one build, so an engine that imports
        # `nixl` later must not get the other.
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
    """Context manager that turns NIXL's exceptions into a TransferError naming the operation."""

    __slots__ = ("_doing",)

    def __init__(self, doing: object) -> None:
        """``doing`` becomes text only for an error, because every transfer passes here."""
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


# Parameters that the plugins accept but do not list.
_UNLISTED = {
    "UCX": frozenset({"num_threads", "split_batch_size", "engine_config", "device_list"}),
    "OBJ": frozenset(
        {
            "accelerated", "access_key", "bucket", "ca_bundle", "crtMinLimit", "endpoint_override",
            "num_threads", "region", "req_checksum", "resp_checksum", "scheme", "secret_key",
            "session_token", "throughput_target_gbps", "type", "use_virtual_addressing",
        }
    ),
}  # fmt: skip


def _with_defaults(backend: str, parameters: Mapping[str, str]) -> dict[str, str]:
    if backend != "UCX":
        return dict(parameters)
    options = [
        # By default UCX spins while NIXL's progress thread waits for a copy within this process,
        # which keeps a second core busy during the copy.
        "USE_MT_MUTEX=y",
        # By default UCX reads another process's GPU memory by TCP, at 0.5 GB/s on an H100, unless
        # NVLink joins GPUs, also where both processes use one GPU.
        "CUDA_IPC_ENABLE_GET_ZCOPY=on",
    ]
    if not os.environ.get("UCX_NET_DEVICES"):
        # UCX listens on every interface by default, and over TCP it writes to whatever address a
        # packet names, without a check of who sent it.
        options.append("NET_DEVICES=lo")
    # UCX takes the last of several values, so that the given ones win, one by one.
    options.append(parameters.get("engine_config", ""))
    return {**parameters, "engine_config": ",".join(filter(None, options))}


def make_gpu_current(device: int) -> None:
    """Give the calling thread this GPU's primary context, PyTorch's, if it has none.

    UCX reads a peer's GPU memory directly if the thread that adds the peer has a context, and by
    TCP otherwise. Does nothing without NVIDIA's driver.
    """
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return
    context, number = ctypes.c_void_p(), ctypes.c_int()
    if cuda.cuCtxGetCurrent(ctypes.byref(context)) == 0 and context.value:
        return
    if (
        cuda.cuInit(0)
        or cuda.cuDeviceGet(ctypes.byref(number), device)
        or cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), number)
        or cuda.cuCtxSetCurrent(context)
    ):
        log.warning("GPU %d has no context for this thread: KV may be read by TCP", device)


_REFUSED = {
    ("POSIX", "use_posix_aio"): (
        "it reports one failed read while the others of the same transfer still write to memory; "
        "leave it out (Linux AIO), or set use_uring"
    )
}


def create_backend(agent: Any, backend: str, parameters: Mapping[str, str]) -> None:
    """Create a backend of a NIXL agent.

    UCX stays on the loopback interface unless ``UCX_NET_DEVICES`` names others.
    Raises TransferError when the backend is missing, does not load, or does not have a parameter.
    Messages contain no values, as some are secret.
    """
    available = agent.get_plugin_list()
    if backend not in available:
        raise TransferError(
            f"this NIXL has no backend {backend!r}; it has: {', '.join(sorted(available))}"
        )
    for name in parameters:
        if (backend, name) in _REFUSED:
            raise TransferError(f"backend {backend}: {name} is refused: {_REFUSED[backend, name]}")
    known = set(agent.get_plugin_params(backend)) | _UNLISTED.get(backend, frozenset())
    unknown = sorted(set(parameters) - known)
    if unknown and known:
        raise TransferError(
            f"backend {backend} has no parameter {unknown[0]!r}; it has: {', '.join(sorted(known))}"
        )
    doing = f"create its backend {backend} (set NIXL_LOG_LEVEL=INFO to see why)"
    with nixl_errors(doing):
        agent.create_backend(backend, _with_defaults(backend, parameters))
