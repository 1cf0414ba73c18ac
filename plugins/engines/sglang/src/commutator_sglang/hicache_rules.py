"""What our tiers cannot do behind HiCache, said when the server starts. Pure."""

from __future__ import annotations

from typing import Any

__all__ = ["problems"]

_OURS = {"tiers", "worker"}
_SGLANGS = {"backend_name", "module_path", "class_name", "interface_v1", "file_storage_path"}


def problems(storage: Any, host_memory_mode: str) -> list[str]:
    """Of SGLang's HiCacheStorageConfig and `--hicache-host-memory-mode`."""
    options = storage.extra_config or {}
    found = [f"{name} is not known" for name in sorted(options.keys() - _OURS - _SGLANGS)]
    found += [f"{name} is missing" for name in sorted(_OURS) if not options.get(name)]
    if not options.get("interface_v1"):
        found.append("interface_v1 must be 1: pages go from and to SGLang's own memory")
    if host_memory_mode != "cache":
        found.append(
            "--hicache-host-memory-mode must be cache: a tier may drop what SGLang takes for stored"
        )
    if storage.is_mla_model and storage.tp_size > 1:
        found.append(
            "tensor parallel ranks of this model share pages that only the first one stores; "
            "use --enable-dp-attention"
        )
    return found
