"""Names a prompt's blocks the same way at both workers, whatever their own names for them are."""

from __future__ import annotations

from commutator.kv.keys import BlockKey, CacheIdentity, block_keys
from commutator.types import GenerateRequest, HandoverInfo

__all__ = ["handover_keys"]


def handover_keys(prefill: HandoverInfo, request: GenerateRequest) -> list[BlockKey]:
    """The key of each full block of the prompt, as the prefill worker cuts it.

    Equal keys mean equal KV: they hold the workers' common identity, adapter, salt and every token.
    """
    identity = CacheIdentity(
        model=prefill.identity,
        weights="",
        tokenizer="",
        dtype="",
        layout=prefill.protocol,
        block_size=prefill.block_size,
        lora_name=request.lora_name,
        cache_salt=request.cache_salt,
    )
    return block_keys(identity, request.token_ids)
