"""The HiCache storage backend that brings our storage tiers into SGLang.

SGLang imports this module by name and creates one backend in each scheduler process. This module
only translates SGLang's calls; ``hicache_pages`` does the work. Written for SGLang 0.5.23.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sglang.version
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage
from sglang.srt.runtime_context import (
    get_memory,
    get_parallel,
    get_server_args,
    process_model_config,
)

from commutator.errors import ConfigError
from commutator_engine_kit.kv import KvConnector
from commutator_sglang.hicache_pages import TierPages, page_arena
from commutator_sglang.hicache_settings import cache_identity, problems, worker_of

_WHERE = "--hicache-storage-backend-extra-config of CommutatorHiCache"


class CommutatorHiCache(HiCacheStorage):  # type: ignore[misc]
    """Options: ``tiers``, a file with a `tiers:` section or the section itself; ``worker``, a name.

    The name must be unique among running servers. Raises ConfigError, which stops the server's
    start, for settings that are unsupported or would be ignored; no other errors.
    """

    def __init__(self, storage_config: Any, kwargs: dict[str, Any]) -> None:
        self._storage = storage_config
        self._options = dict(storage_config.extra_config or {})
        self._pool: Any = None
        self._connector: KvConnector | None = None
        self._pages: TierPages | None = None
        wrong = problems(storage_config, get_memory().hicache_host_memory_mode)
        if wrong:
            raise ConfigError(wrong, _WHERE)

    # While SGLang starts

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        self._pool = mem_pool_host

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        if host_pool is not self._pool:
            what = f"models that cache {host_pool_name} beside keys and values are not supported"
            raise ConfigError([what], _WHERE)

    def on_host_pools_registered(self) -> None:
        pool = self._pool
        if pool.shared_allocation_domain is not None:
            raise ConfigError(["a shared host pool is not supported: its pages move"], _WHERE)
        try:
            arena = page_arena(self._pieces, pool.page_num)
        except ValueError as error:
            what = f"--hicache-mem-layout={pool.layout} is not supported: {error}"
            raise ConfigError([what], _WHERE) from error
        identity = cache_identity(
            get_server_args(),
            process_model_config(),
            self._storage,
            pool,
            pieces=[size for _, size in self._pieces(0)],
            version=sglang.version.__version__,
        )
        worker = worker_of(str(self._options["worker"]), self._storage, get_parallel().dp_rank)
        self._connector = KvConnector(self._options["tiers"], arena, identity, worker_id=worker)
        self._connector.start()
        self._connector.poll_on_own_thread()  # SGLang's own events name its pages
        self._pages = TierPages(self._connector)

    # On its storage threads

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        return self._ready.found(keys)

    def batch_get_v1(
        self, keys: list[str], host_indices: Any, extra_info: Any = None
    ) -> list[bool]:
        return self._ready.load(keys, self._numbers(host_indices))

    def batch_set_v1(
        self, keys: list[str], host_indices: Any, extra_info: Any = None
    ) -> list[bool]:
        before = getattr(extra_info, "prefix_keys", None) or ()
        stored = self._ready.store(keys, self._numbers(host_indices), before)
        return [stored] * len(keys)

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    def _unused(self, *_: Any, **__: Any) -> None:
        """For a backend without `interface_v1`, which ``problems`` rejects."""

    get = batch_get = set = batch_set = _unused

    # Clearing and closing

    def clear(self) -> None:
        if self._connector is not None:
            self._connector.stores.evict(reason="reset")

    def close(self) -> None:
        if self._connector is not None:
            self._connector.close()

    @property
    def _ready(self) -> TierPages:
        assert self._pages is not None, "on_host_pools_registered comes first"
        return self._pages

    def _numbers(self, host_indices: Any) -> list[int]:
        """The numbers of the pages that have the tokens at ``host_indices``."""
        size = self._pool.page_size
        numbers: list[int] = (host_indices[::size] // size).tolist()
        return numbers

    def _pieces(self, page: int) -> Sequence[tuple[int, int]]:
        import torch

        size = self._pool.page_size
        addresses, sizes = self._pool.get_page_buffer_meta(
            torch.arange(page * size, (page + 1) * size)
        )
        return list(zip(addresses, sizes, strict=True))
