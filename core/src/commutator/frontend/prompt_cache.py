"""Makes a model's cache of tokenized and hashed prompts, watched by metrics."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from commutator.kv.hashing import sequence_hashes
from commutator.observe.metrics import FrontendMetrics
from commutator.text.model import TextModel
from commutator.text.prefix_cache import BlockHashing, PrefixCache

__all__ = ["prompt_cache"]

log = logging.getLogger(__name__)


def prompt_cache(
    name: str, text: TextModel, max_bytes: int, block_size: int | None, metrics: FrontendMetrics
) -> PrefixCache:
    """``block_size`` is that of the sequence hashes to be made, in tokens; None for no hashes."""
    hashing = None
    if block_size is not None:
        size = block_size

        def hashes(token_ids: Sequence[int], known: Sequence[int]) -> list[int]:
            return sequence_hashes(token_ids, size, known=known)

        hashing = BlockHashing(size, hashes)
    cache = PrefixCache(
        text.tokenizer,
        max_bytes,
        hashing=hashing,
        on_hit=metrics.prompt_cache_hits.labels(name).inc,
    )
    metrics.prompt_cache_bytes.labels(name).set_function(lambda: cache.size_bytes)
    if max_bytes and cache.cuts.problem:
        where = "only before special tokens" if cache.cuts.any else "nowhere"
        log.info(
            "model %s: prompts are cut for the prompt cache %s, because %s (its tokenizer)",
            name,
            where,
            cache.cuts.problem,
        )
    return cache
