"""What SGLang's settings mean for the tiers: problems, cache identity, worker name. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from commutator.contract.block import CacheIdentity
from commutator_engine_kit.model_identity import model_facts, served_identity, weights_revision

_OURS = {"tiers", "worker"}
_SGLANGS = {"backend_name", "module_path", "class_name", "interface_v1", "file_storage_path"}
_RANKS = (("tp", "tp"), ("pp", "pp"), ("cp", "attn_cp"))


def problems(storage: Any, host_memory_mode: str) -> list[str]:
    """What is wrong with a HiCacheStorageConfig or `--hicache-host-memory-mode`."""
    options = storage.extra_config or {}
    found = [f"unknown option {name}" for name in sorted(options.keys() - _OURS - _SGLANGS)]
    found += [f"{name} is missing" for name in sorted(_OURS) if not options.get(name)]
    if not options.get("interface_v1"):
        found.append("interface_v1 must be 1: pages are copied from and to SGLang's own memory")
    if host_memory_mode != "cache":
        found.append(
            "--hicache-host-memory-mode must be cache: tiers may evict pages that were stored"
        )
    if storage.is_mla_model and storage.tp_size > 1:
        found.append(
            "tensor parallel ranks of this model share pages that only the first rank stores; "
            "use --enable-dp-attention"
        )
    return found


def cache_identity(
    args: Any, model: Any, storage: Any, pool: Any, *, pieces: Sequence[int], version: str
) -> CacheIdentity:
    """The identity for SGLang's ServerArgs, ModelConfig, HiCacheStorageConfig and host pool.

    SGLang's page names cover the tokens, the request's salt and `extra_key`; the identity covers
    all else that decides the bytes of a page. ``pieces`` are the sizes of a page's pieces in bytes.
    Hashes all weights, unless the name of their directory is a commit. This includes adapters and
    draft models, because an adapter keeps its name when it is trained further.
    """
    return served_identity(
        "sglang",
        model=args.model_path,
        revision=args.revision,
        tokenizer=args.tokenizer_path,
        random_seed=args.random_seed if str(args.load_format) == "dummy" else None,
        dtype=f"{model.dtype} {args.kv_cache_dtype} {pool.dtype}",
        facts={
            "model": model_facts(model.hf_config),
            "quantization": model.quantization,
            "scales": _digest(args.quantization_param_path),
            "adapters": sorted(
                (adapter.lora_id, weights_revision(adapter.lora_path))
                for adapter in args.lora_paths or ()
            ),
            "draft": args.speculative_draft_model_path
            and weights_revision(
                args.speculative_draft_model_path, args.speculative_draft_model_revision
            ),
            "layers": [pool.start_layer, pool.end_layer],
            "layout": [type(pool).__name__, pool.layout, pool.storage_format_tag, *pieces],
            "sglang": version,
        },
        block_size=pool.page_size,
        parallel_rank=rank_of(storage),
    )


def rank_of(storage: Any) -> str:
    """Names the part of each page that this process has."""
    return " ".join(
        f"{label} {getattr(storage, f'{name}_rank')}/{getattr(storage, f'{name}_size')}"
        for label, name in _RANKS
    )


def worker_of(name: str, storage: Any, replica: int | None) -> str:
    """The worker name ``name`` with the ranks added: each process has its own tiers.

    ``replica`` is the rank among processes that each have a copy of the model.
    """
    if replica is not None:
        name += f"-dp{replica}"
    if storage.dp_rank:
        name += f"-attn{storage.dp_rank}"
    for label, field in _RANKS:
        if getattr(storage, f"{field}_size") > 1:
            name += f"-{label}{getattr(storage, f'{field}_rank')}"
    return name


def _digest(file: str | None) -> str | None:
    return None if file is None else hashlib.sha256(Path(file).read_bytes()).hexdigest()
