"""What decides the bytes of an SGLang server's pages, beside the tokens; and which rank's they are.

SGLang's own names of pages tell the tokens, the request's salt and `extra_key`, and no more.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from commutator.engine import weights_revision
from commutator.engine.model_identity import model_facts, model_words
from commutator.kv import CacheIdentity

__all__ = ["cache_identity", "rank_of", "worker_of"]

_RANKS = (("tp", "tp"), ("pp", "pp"), ("cp", "attn_cp"))


def cache_identity(
    args: Any, model: Any, storage: Any, pool: Any, *, pieces: Sequence[int], version: str
) -> CacheIdentity:
    """Of SGLang's ServerArgs, ModelConfig, HiCacheStorageConfig and host pool.

    ``pieces`` are the sizes of a page's pieces in bytes. Reads every byte of the weights, unless
    their directory's name is a commit; adapters and draft models included, as an adapter's name
    stays the same when it is trained on.
    """
    facts = {
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
    }
    words = json.dumps(facts, sort_keys=True, default=repr)
    seed = args.random_seed if str(args.load_format) == "dummy" else None
    served = model_words(args.model_path, args.revision, args.tokenizer_path, random_seed=seed)
    return CacheIdentity(
        model="sglang",
        weights=served.weights,
        tokenizer=served.tokenizer,
        dtype=f"{model.dtype} {args.kv_cache_dtype} {pool.dtype}",
        layout=hashlib.sha256(words.encode()).hexdigest(),
        block_size=pool.page_size,
        parallel_rank=rank_of(storage),
    )


def rank_of(storage: Any) -> str:
    """Which part of each page this process has."""
    return " ".join(
        f"{label} {getattr(storage, f'{name}_rank')}/{getattr(storage, f'{name}_size')}"
        for label, name in _RANKS
    )


def worker_of(name: str, storage: Any, replica: int | None) -> str:
    """Each process of a server has tiers of its own. ``replica``: of those with a copy each."""
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
