"""HiCache, SGLang's cache in host memory: plain memory instead of pinned, and copies that work."""

from __future__ import annotations

import functools
import inspect
from typing import Any

from commutator_sglang_cpu import copies

_RESERVE_BYTES = 1 << 30
"""Host memory left free; SGLang leaves 10 GB, which is more than a laptop has."""


def register() -> None:
    """Called by SGLang in each of its processes."""
    from sglang.srt.mem_cache.pool_host import base, common, mha

    common.ALLOC_MEMORY_FUNCS["cpu"] = _allocate
    base.HICACHE_HOST_MEMORY_RESERVE_BYTES = _RESERVE_BYTES
    base.HostKVCache.__init__ = _unpinned(base.HostKVCache.__init__)
    for name in copies.__all__:
        setattr(mha, name, getattr(copies, name))


def _allocate(
    dims: Any,
    dtype: Any,
    device: Any,
    pin_memory: Any,
    allocator: Any,
    registration_granularity_bytes: Any = None,
) -> Any:
    del pin_memory, registration_granularity_bytes
    return allocator.allocate(dims, dtype=dtype, device=device)


def _unpinned(init: Any) -> Any:
    """The same, unpinned: else each load from storage fails and is reported as a miss."""
    signature = inspect.signature(init)

    @functools.wraps(init)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.arguments["pin_memory"] = False
        return init(*bound.args, **bound.kwargs)

    return wrapped
