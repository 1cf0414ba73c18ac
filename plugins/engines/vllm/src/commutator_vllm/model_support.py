"""What vLLM servers do with the KV of a model, with our tiers and hand-over."""

from __future__ import annotations

from collections.abc import Sequence

from commutator import ModelConfig
from commutator_engine_kit.kv import KvKind
from commutator_engine_kit.launching import argument_value
from commutator_engine_kit.model_kv import USUAL_BYTES, KvSupport, ModelKv, Verdict, model_at

_YES = Verdict("yes")
_TESTED = {"llama", "gemma3_text", "gpt_oss", "llama4_text", "mixtral", "qwen3_next"}
"""Families of which a test with real vLLM has run a model."""
_HANDED_OVER = {"gemma3_text", "gpt_oss"}
"""Families with several kinds of KV of which a test has handed a model over."""
_SIZES = {"float32": 4, "float": 4, "bfloat16": 2, "float16": 2, "half": 2}
_IN_GROUPS = {KvKind.FULL, KvKind.SLIDING, KvKind.CHUNKED, KvKind.RECURRENT}


def support(model: ModelKv) -> KvSupport:
    """As ``WithKvSupport.kv_support``."""
    tested = model.model_type in _TESTED
    untried = Verdict("untried", "no test of ours has run this family")
    recurrent = bool(model.of(KvKind.RECURRENT))
    return KvSupport(
        runs=_YES if tested else untried,
        tiers=tiers(model),
        handover=handover(model),
        migration=_YES if tested else untried,
        adapters=Verdict("untried", "LoRA beside recurrent layers") if recurrent else _YES,
        routing=_routing(model),
    )


def number_bytes(args: Sequence[str], model: ModelKv) -> tuple[int, int]:
    """As ``WithKvSupport.kv_number_bytes``, of a server with the arguments ``args``."""
    computed = _SIZES.get(argument_value(args, "--dtype") or "", model.number_bytes or USUAL_BYTES)
    cached = argument_value(args, "--kv-cache-dtype") or ""
    state = argument_value(args, "--mamba-ssm-cache-dtype") or ""
    kept = 1 if cached.startswith("fp8") else _SIZES.get(cached, computed)
    return kept, _SIZES.get(state, model.state_number_bytes or computed)


def tiers(model: ModelKv) -> Verdict:
    """Whether our connector keeps the model's blocks."""
    if model.of(KvKind.CROSS):
        return Verdict("no", "tokens do not say what cross attention keeps; remove `tiers`")
    if other := _other_kinds(model):
        return Verdict("untried", f"{other} has been met in no test")
    if model.model_type in _TESTED:
        return _YES
    if model.is_plain:
        return Verdict("untried", "its one kind of KV is that of tested families")
    return Verdict("untried", "each of its kinds of KV is that of a tested family")


def handover(model: ModelKv) -> Verdict:
    """Whether vLLM's NixlConnector hands the model's KV over, as far as is known."""
    if model.of(KvKind.CROSS):
        return Verdict("no", "cross attention is computed where the picture is; use role: both")
    if other := _other_kinds(model):
        return Verdict("untried", f"{other} has been met in no test")
    if model.of(KvKind.CHUNKED):
        return Verdict(
            "part",
            "chunked layers keep and hand over the whole context, as vLLM's NixlConnector does not "
            "know chunks; launched servers with a role get --disable-hybrid-kv-cache-manager, "
            "without which the server that decodes dies",
        )
    if model.model_type == "qwen3_next":
        return Verdict(
            "part",
            "equal where a prompt is cut after a state that vLLM keeps; elsewhere log "
            "probabilities differed by up to 0.27 in bfloat16, not told apart from rounding",
        )
    if model.is_plain or model.model_type in _HANDED_OVER:
        return _YES
    return Verdict("untried", "vLLM's NixlConnector decides as it starts")


def has_chunks(model: ModelConfig) -> bool:
    """Whether layers of the model have chunked attention; False where no config.json says so."""
    kept = model_at(model.source)
    return kept is not None and bool(kept.of(KvKind.CHUNKED))


def _routing(model: ModelKv) -> Verdict:
    if not model.of(KvKind.FULL, KvKind.LATENT):
        return Verdict("part", "no layer keeps whole prompts, so workers are chosen by load alone")
    if model.of(KvKind.RECURRENT, KvKind.SLIDING, KvKind.CHUNKED):
        return Verdict("part", "what windows and states lack is not seen")
    return _YES


def _other_kinds(model: ModelKv) -> str:
    """What it keeps that no test has met, for people."""
    compressed = any(each.tokens_per_row > 1 for each in model.layers)
    found = (model.beside(_IN_GROUPS), "compressed attention" if compressed else "")
    return " and ".join(filter(None, found))
