"""Creates NIXL backends, refusing what NIXL would ignore or get wrong without a word."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from commutator.errors import TransferError
from commutator.transfer.nixl_library import nixl_errors

__all__ = ["create_backend"]

# What the plugins take beyond the parameters that they list themselves.
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

# UCX by default spins where NIXL's progress thread waits for a copy within this process, and so
# keeps a second core busy as long as the copy takes.
_DEFAULTS: Mapping[str, Mapping[str, str]] = {"UCX": {"engine_config": "USE_MT_MUTEX=y"}}

_REFUSED = {
    ("POSIX", "use_posix_aio"): (
        "it reports one failed read while the others of the same transfer still write to memory; "
        "leave it out (Linux AIO), or set use_uring"
    )
}


def create_backend(agent: Any, backend: str, parameters: Mapping[str, str]) -> None:
    """Create a backend of a NIXL agent.

    Raises TransferError when the backend is not there, does not load, or does not know a parameter.
    Messages hold no values: some are secrets.
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
        agent.create_backend(backend, {**_DEFAULTS.get(backend, {}), **parameters})
