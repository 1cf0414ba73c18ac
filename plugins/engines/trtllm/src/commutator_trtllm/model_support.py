"""What TensorRT-LLM servers do with the KV of a model, with our tiers and hand-over."""

from __future__ import annotations

from commutator_engine_kit.kv import KvKind
from commutator_engine_kit.model_kv import KvSupport, ModelKv, Verdict

_UNTRIED = Verdict("untried", "TensorRT-LLM was met only as a stand-in")


def support(model: ModelKv) -> KvSupport:
    """As ``WithKvSupport.kv_support``."""
    windows = bool(model.of(KvKind.SLIDING, KvKind.CHUNKED))
    widest = Verdict("part", "routing follows the widest attention window")
    return KvSupport(
        runs=_UNTRIED,
        tiers=tiers(model),
        handover=_UNTRIED,
        migration=_UNTRIED,
        adapters=Verdict("no", "its completions do not take them"),
        routing=widest if windows else _UNTRIED,
    )


def tiers(model: ModelKv) -> Verdict:
    """Whether our connector keeps the model's blocks."""
    if kept := model.beside({KvKind.FULL, KvKind.LATENT}):
        return Verdict("no", f"its KV connectors do not take {kept} layers; remove `tiers`")
    return _UNTRIED
