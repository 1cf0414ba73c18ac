"""What SGLang servers do with the KV of a model, with our tiers and hand-over."""

from __future__ import annotations

from commutator_engine_kit.kv import KvKind
from commutator_engine_kit.model_kv import KvSupport, ModelKv, Verdict

_UNTRIED = Verdict("untried", "no test of ours has run this family")
_TESTED = {"llama"}
"""Families of which a test with real SGLang has run a model."""


def support(model: ModelKv) -> KvSupport:
    """As ``WithKvSupport.kv_support``."""
    tested = Verdict("yes") if model.model_type in _TESTED else _UNTRIED
    other = Verdict("untried", "SGLang's own transfer, with more than keys and values")
    return KvSupport(
        runs=tested,
        tiers=tiers(model),
        handover=tested if model.is_plain else other,
        migration=tested,
        adapters=_UNTRIED if tested is _UNTRIED else tested,
        routing=tested if model.is_plain else Verdict("part", "by the pages that SGLang reports"),
    )


def tiers(model: ModelKv) -> Verdict:
    """Whether SGLang's HiCache stores its pages through our backend."""
    if kept := model.beside({KvKind.FULL, KvKind.LATENT}):
        return Verdict(
            "no", f"its storage interface has no pages for {kept} layers; use vllm or no `tiers`"
        )
    if model.kinds == (KvKind.LATENT,):
        return Verdict("part", "several tensor-parallel ranks need --enable-dp-attention")
    return Verdict("yes") if model.model_type in _TESTED else _UNTRIED
