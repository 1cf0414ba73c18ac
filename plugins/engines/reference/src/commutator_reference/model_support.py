"""What the reference engine does with the KV of a model."""

from __future__ import annotations

from commutator_engine_kit.model_kv import KvSupport, ModelKv, Verdict
from commutator_reference.llama import MODEL_TYPES

_YES = Verdict("yes")


def support(model: ModelKv) -> KvSupport:
    """As ``WithKvSupport.kv_support``."""
    if model.model_type not in {"llama", *MODEL_TYPES}:
        known = ", ".join(["Llama", *MODEL_TYPES.values()])
        cannot = Verdict("no", "it does not run the model")
        return KvSupport(
            runs=Verdict("no", f"it computes {known}"),
            tiers=cannot,
            handover=cannot,
            migration=cannot,
            adapters=cannot,
            routing=cannot,
        )
    one_size = Verdict("yes", "between workers whose blocks have one size")
    return KvSupport(
        runs=_YES,
        tiers=_YES,
        handover=_YES if model.model_type == "llama" else one_size,
        migration=_YES,
        adapters=_YES if model.model_type == "llama" else Verdict("no", "it adapts Llama only"),
        routing=_YES
        if model.is_plain
        else Verdict("part", "what windows and states lack is not seen"),
    )
