"""Reads models with several kinds of KV out of Hugging Face directories.

Gemma 3, gpt-oss, Llama 4, Qwen3-Next, DeepSeek-V2 and Mixtral. An option of theirs that is not
computed raises ConfigError.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import gelu, linear, rms_norm

from commutator.errors import ConfigError
from commutator_engine_kit.kv import KvKind
from commutator_reference.decoder import (
    Attention,
    DecoderConfig,
    DecoderLayer,
    DecoderModel,
    DeltaNet,
    LatentAttention,
    Mixer,
    Rope,
)
from commutator_reference.experts import Experts, Gated, Mlp, Router
from commutator_reference.llama import MODEL_TYPES, eos_token_ids, read_json
from commutator_reference.pages import LayerKv
from commutator_reference.weights import Linear, TensorSource, hf_tensors

Raw = Mapping[str, Any]

FAMILIES = MODEL_TYPES
"""By ``model_type`` of config.json."""

_ONLY: dict[str, Raw] = {
    "gemma3_text": {
        "attention_bias": False,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "use_bidirectional_attention": False,
        "hidden_activation": "gelu_pytorch_tanh",
    },
    "gpt_oss": {"hidden_act": "silu", "attention_bias": True},
    "llama4_text": {"hidden_act": "silu", "attention_bias": False},
    "qwen3_next": {
        "hidden_act": "silu",
        "attention_bias": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    "deepseek_v2": {
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "norm_topk_prob": False,
    },
    "mixtral": {"hidden_act": "silu"},
}
"""What a family's options must be, where they are said."""


def model_type(folder: Path) -> str:
    """What config.json calls the model; that of the text where it is a part."""
    return str(_text(read_json(folder / "config.json")).get("model_type"))


def _text(raw: Raw) -> Raw:
    part = raw.get("text_config")
    return part if isinstance(part, Mapping) else raw


def decoder_config(folder: Path) -> DecoderConfig:
    """The configuration of one of ``FAMILIES``. Raises ConfigError."""
    raw = _text(read_json(folder / "config.json"))
    family = str(raw.get("model_type"))
    wrong = [
        f"{name} is {raw[name]!r}; the reference engine supports {right!r} only"
        for name, right in {**_ONLY[family], "quantization_config": None}.items()
        if name in raw and raw[name] != right
    ]
    if wrong:
        raise ConfigError(wrong, str(folder))
    try:
        return DecoderConfig(
            vocab_size=raw["vocab_size"],
            hidden_size=raw["hidden_size"],
            context_length=raw["max_position_embeddings"],
            norm_epsilon=raw["rms_norm_eps"],
            eos_token_ids=eos_token_ids(raw, folder),
            layers=tuple(_layers(raw)),
            embedding_scale=math.sqrt(raw["hidden_size"]) if family == "gemma3_text" else 1.0,
        )
    except KeyError as error:
        problem = f"config.json has no {error}, which {FAMILIES[family]} models need"
        raise ConfigError([problem], str(folder)) from None


def _layers(raw: Raw) -> Iterator[LayerKv]:
    count = raw["num_hidden_layers"]
    if raw["model_type"] == "deepseek_v2":
        row = (raw["kv_lora_rank"] + raw["qk_rope_head_dim"],)
        yield from [LayerKv(KvKind.LATENT, 0, row)] * count
        return
    pairs = (2, raw["num_key_value_heads"], _head_size(raw))
    for number in range(count):
        match _layer_type(raw, number):
            case "full_attention":
                yield LayerKv(KvKind.FULL, 0, pairs)
            case "sliding_attention":
                yield LayerKv(KvKind.SLIDING, raw["sliding_window"], pairs)
            case "chunked_attention":
                yield LayerKv(KvKind.CHUNKED, raw["attention_chunk_size"], pairs)
            case "linear_attention":
                keys = raw["linear_num_key_heads"] * raw["linear_key_head_dim"]
                heads, size = raw["linear_num_value_heads"], raw["linear_value_head_dim"]
                window = (raw["linear_conv_kernel_dim"] - 1) * (2 * keys + heads * size)
                state = heads * raw["linear_key_head_dim"] * size
                yield LayerKv(KvKind.RECURRENT, 0, (window + state,))
            case other:
                raise ConfigError([f"layers of the type {other!r} are unknown"], "config.json")


def _layer_type(raw: Raw, number: int) -> str:
    if said := raw.get("layer_types"):
        return str(said[number])
    match raw["model_type"]:
        case "gemma3_text":
            every = raw.get("sliding_window_pattern", raw.get("_sliding_window_pattern", 6))
            return "full_attention" if (number + 1) % every == 0 else "sliding_attention"
        case "gpt_oss":
            return "full_attention" if number % 2 else "sliding_attention"
        case "llama4_text":
            return "chunked_attention" if _uses_rope(raw, number) else "full_attention"
        case "qwen3_next":
            every = raw.get("full_attention_interval", 4)
            return "full_attention" if (number + 1) % every == 0 else "linear_attention"
        case _:
            return "sliding_attention" if raw.get("sliding_window") else "full_attention"


def _uses_rope(raw: Raw, number: int) -> bool:
    said = raw.get("no_rope_layers")
    every = raw.get("no_rope_layer_interval", 4)
    return bool(said[number]) if said else (number + 1) % every != 0


def _head_size(raw: Raw) -> int:
    return int(raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"])


def load_decoder(folder: Path, *, device: torch.device, dtype: torch.dtype) -> DecoderModel:
    """The model in a Hugging Face directory. Raises ConfigError."""
    config = decoder_config(folder)
    loader = _Loader(folder, config, hf_tensors(folder), device, dtype)
    return loader.model()


class _Loader:
    """Reads the tensors of one model by their Hugging Face names."""

    def __init__(
        self,
        folder: Path,
        config: DecoderConfig,
        source: TensorSource,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self._raw = _text(read_json(folder / "config.json"))
        self._family = str(self._raw["model_type"])
        self._folder = folder
        self._config = config
        self._source = source
        self._device = device
        self._dtype = dtype
        self._ropes: dict[tuple[str, int], Rope] = {}
        self._prefix = "model."
        try:
            source("model.embed_tokens.weight")
        except KeyError:  # the text's part of a model that sees pictures
            self._prefix = "language_model.model."

    def model(self) -> DecoderModel:
        raw = self._raw
        table = self._get(f"{self._prefix}embed_tokens.weight")
        head = self._prefix.removesuffix("model.") + "lm_head.weight"
        tied = raw.get("tie_word_embeddings", self._family == "gemma3_text")
        return DecoderModel(
            self._config,
            [self._layer(number) for number in range(len(self._config.layers))],
            embedding_weights=table,
            norm=self._norm(f"{self._prefix}norm.weight"),
            output=Linear(table if tied else self._get(head)),
        )

    def _layer(self, number: int) -> DecoderLayer:
        name = f"{self._prefix}layers.{number}."
        mixer: Mixer
        match self._config.layers[number].kind:
            case KvKind.LATENT:
                mixer = self._latent(number, f"{name}self_attn.")
            case KvKind.RECURRENT:
                mixer = self._delta_net(number, f"{name}linear_attn.")
            case _:
                mixer = self._attention(number, f"{name}self_attn.")
        after = self._family == "gemma3_text"
        before = "pre_feedforward_layernorm" if after else "post_attention_layernorm"
        return DecoderLayer(
            mixer=mixer,
            mlp=self._mlp(number, name),
            norm=self._norm(f"{name}input_layernorm.weight"),
            mlp_norm=self._norm(f"{name}{before}.weight"),
            norm_after=self._norm(f"{name}post_attention_layernorm.weight") if after else None,
            mlp_norm_after=(
                self._norm(f"{name}post_feedforward_layernorm.weight") if after else None
            ),
        )

    def _attention(self, number: int, name: str) -> Attention:
        raw, family = self._raw, self._family
        size, epsilon = _head_size(raw), self._config.norm_epsilon
        query = self._get(f"{name}q_proj.weight")
        key = self._get(f"{name}k_proj.weight")
        rope: Rope | None = self._rope(number, int(size * self._rotated_part()))
        if family == "llama4_text":
            query, key = _half_split(query, size), _half_split(key, size)
            rope = rope if _uses_rope(raw, number) else None
        gates: tuple[Tensor, ...] = ()
        if gated := family == "qwen3_next":  # each head's gate follows its query
            query, gate = query.unflatten(0, (-1, 2, size)).unbind(1)
            query, gates = query.flatten(0, 1), (gate.flatten(0, 1),)
        norm: Tensor | None = None
        if family in {"gemma3_text", "qwen3_next"}:
            heads = {"q": raw["num_attention_heads"], "k": raw["num_key_value_heads"]}
            norm = torch.cat(
                [
                    self._norm(f"{name}{each}_norm.weight").expand(count, -1)
                    for each, count in heads.items()
                ]
            )
        biased = family == "gpt_oss"
        scale = raw["query_pre_attn_scalar"] if family == "gemma3_text" else size
        tuned = family == "llama4_text" and rope is None and raw.get("attn_temperature_tuning")
        return Attention(
            layer=number,
            heads=raw["num_attention_heads"],
            kv_heads=raw["num_key_value_heads"],
            head_size=size,
            scale=scale**-0.5,
            projection=Linear(torch.cat((query, key, self._get(f"{name}v_proj.weight"), *gates))),
            output=Linear(self._get(f"{name}o_proj.weight")),
            rope=rope,
            bias=torch.cat([self._get(f"{name}{each}_proj.bias") for each in "qkv"])
            if biased
            else None,
            output_bias=self._get(f"{name}o_proj.bias") if biased else None,
            norm=norm,
            norm_epsilon=epsilon,
            norm_after_rope=family == "llama4_text"
            and rope is not None
            and bool(raw.get("use_qk_norm", True)),
            gated=gated,
            sinks=self._get(f"{name}sinks") if biased else None,
            temperature=(raw["floor_scale"], raw["attn_scale"]) if tuned else None,
        )

    def _latent(self, number: int, name: str) -> LatentAttention:
        raw, heads = self._raw, self._raw["num_attention_heads"]
        rank, turned, plain = raw["kv_lora_rank"], raw["qk_rope_head_dim"], raw["qk_nope_head_dim"]
        compress = self._get(f"{name}kv_a_proj_with_mqa.weight")
        compress = torch.cat((compress[:rank], _half_split(compress[rank:], turned)))
        up = self._get(f"{name}kv_b_proj.weight").view(heads, -1, rank)
        last = "q_b_proj" if raw["q_lora_rank"] else "q_proj"
        rows = self._get(f"{name}{last}.weight").unflatten(0, (heads, -1)).clone()
        rows[:, plain:] = _half_split(rows[:, plain:].flatten(0, 1), turned).view_as(
            rows[:, plain:]
        )
        query: Callable[[Tensor], Tensor] = Linear(rows.flatten(0, 1))
        if raw["q_lora_rank"]:
            down = Linear(self._get(f"{name}q_a_proj.weight"))
            norm = self._get(f"{name}q_a_layernorm.weight")
            query = partial(_two_steps, down, norm, query)
        rope = self._rope(number, turned)
        return LatentAttention(
            layer=number,
            heads=heads,
            rank=rank,
            plain_size=plain,
            rope_size=turned,
            scale=(plain + turned) ** -0.5 * self._latent_scale(),
            query=query,
            compress=Linear(compress),
            compress_norm=self._get(f"{name}kv_a_layernorm.weight"),
            norm_epsilon=1e-6,
            key_up=up[:, :plain],
            value_up=up[:, plain:],
            output=Linear(self._get(f"{name}o_proj.weight")),
            rope=rope,
        )

    def _latent_scale(self) -> float:
        """What YaRN multiplies latent attention's logits by."""
        said = self._rope_options(0)
        if said.get("rope_type", "default") == "default" or not said.get("mscale_all_dim"):
            return 1.0
        return _mscale(said["factor"], said["mscale_all_dim"]) ** 2

    def _delta_net(self, number: int, name: str) -> DeltaNet:
        raw = self._raw
        return DeltaNet(
            layer=number,
            key_heads=raw["linear_num_key_heads"],
            value_heads=raw["linear_num_value_heads"],
            key_size=raw["linear_key_head_dim"],
            value_size=raw["linear_value_head_dim"],
            mixed=Linear(self._get(f"{name}in_proj_qkvz.weight")),
            controls=Linear(self._get(f"{name}in_proj_ba.weight")),
            convolution=self._get(f"{name}conv1d.weight")[:, 0].float(),
            decay=-self._get(f"{name}A_log").float().exp(),
            decay_bias=self._get(f"{name}dt_bias"),
            norm=self._get(f"{name}norm.weight"),
            norm_epsilon=self._config.norm_epsilon,
            output=Linear(self._get(f"{name}out_proj.weight")),
        )

    def _mlp(self, number: int, name: str) -> Mlp:
        raw = self._raw
        match self._family:
            case "gemma3_text":
                return self._gated(f"{name}mlp.", activation=partial(gelu, approximate="tanh"))
            case "gpt_oss":
                return self._oss_experts(f"{name}mlp.")
            case "llama4_text":
                step = raw.get("interleave_moe_layer_step", 1)
                sparse = raw.get("moe_layers") or range(step - 1, raw["num_hidden_layers"], step)
                name = f"{name}feed_forward."
                return self._llama4_experts(name) if number in sparse else self._gated(name)
            case "qwen3_next":
                name = f"{name}mlp."
                shared = self._gated(f"{name}shared_expert.")
                gate = self._get(f"{name}shared_expert_gate.weight")
                return Experts(
                    router=partial(
                        _softmax_first,
                        self._get(f"{name}gate.weight"),
                        raw["num_experts_per_tok"],
                        renormed=raw.get("norm_topk_prob", True),
                    ),
                    experts=self._experts(f"{name}experts.", raw["num_experts"]),
                    shared=lambda x: linear(x, gate).sigmoid() * shared(x),
                )
            case "deepseek_v2":
                name = f"{name}mlp."
                if number < raw["first_k_dense_replace"]:
                    return self._gated(name)
                return Experts(
                    router=self._deepseek_router(f"{name}gate.weight"),
                    experts=self._experts(f"{name}experts.", raw["n_routed_experts"]),
                    shared=self._gated(f"{name}shared_experts."),
                )
            case _:
                name = f"{name}block_sparse_moe."
                return Experts(
                    router=partial(
                        _softmax_first,
                        self._get(f"{name}gate.weight"),
                        raw["num_experts_per_tok"],
                        renormed=True,
                    ),
                    experts=self._experts(
                        f"{name}experts.", raw["num_local_experts"], ("w1", "w3", "w2")
                    ),
                )

    def _gated(
        self,
        name: str,
        names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
        **options: Any,
    ) -> Gated:
        gate, up, down = (self._get(f"{name}{each}.weight") for each in names)
        return Gated(Linear(torch.cat((gate, up))), Linear(down), **options)

    def _experts(
        self,
        name: str,
        count: int,
        names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    ) -> list[Mlp]:
        return [self._gated(f"{name}{number}.", names) for number in range(count)]

    def _oss_experts(self, name: str) -> Experts:
        raw = self._raw
        gate_up, up_bias = (self._get(f"{name}experts.gate_up_proj{end}") for end in ("", "_bias"))
        down, down_bias = (self._get(f"{name}experts.down_proj{end}") for end in ("", "_bias"))
        alpha, limit = raw.get("swiglu_alpha", 1.702), raw.get("swiglu_limit", 7.0)
        return Experts(
            router=partial(
                _softmax_last,
                self._get(f"{name}router.weight"),
                self._get(f"{name}router.bias"),
                raw["num_experts_per_tok"],
            ),
            experts=[
                partial(
                    _clamped,
                    Linear(gate_up[each].T.contiguous()),
                    up_bias[each],
                    Linear(down[each].T.contiguous()),
                    down_bias[each],
                    alpha,
                    limit,
                )
                for each in range(raw["num_local_experts"])
            ],
        )

    def _llama4_experts(self, name: str) -> Experts:
        raw = self._raw
        gate_up, down = (
            self._get(f"{name}experts.{each}") for each in ("gate_up_proj", "down_proj")
        )
        return Experts(
            router=partial(_sigmoid, self._get(f"{name}router.weight"), raw["num_experts_per_tok"]),
            experts=[
                Gated(Linear(gate_up[each].T.contiguous()), Linear(down[each].T.contiguous()))
                for each in range(raw["num_local_experts"])
            ],
            shared=self._gated(f"{name}shared_expert."),
            weighs_input=True,
        )

    def _deepseek_router(self, name: str) -> Router:
        raw = self._raw
        method = raw.get("topk_method", "greedy")
        if method not in {"greedy", "group_limited_greedy"}:
            raise ConfigError([f"topk_method is {method!r}, which is unknown"], str(self._folder))
        limited = method == "group_limited_greedy"
        return partial(
            _softmax_first,
            self._get(name),
            raw["num_experts_per_tok"],
            renormed=False,
            groups=(raw["n_group"], raw["topk_group"]) if limited else None,
            scale=raw.get("routed_scaling_factor", 1.0),
        )

    def _rope_options(self, number: int) -> Raw:
        """The layer's, as transformers 5 writes them, and as earlier ones do."""
        raw, kind = self._raw, _layer_type(self._raw, number)
        said = raw.get("rope_parameters") or {}
        if kind in said:
            return said[kind]  # type: ignore[no-any-return]
        theta = raw.get("rope_theta", 10_000.0)
        if self._family == "gemma3_text" and kind == "sliding_attention":
            return {"rope_theta": raw.get("rope_local_base_freq", theta)}
        return {"rope_theta": theta, **(said or raw.get("rope_scaling") or {})}

    def _rotated_part(self) -> float:
        part = self._raw.get("partial_rotary_factor", 1.0)
        return float(self._rope_options(0).get("partial_rotary_factor", part))

    def _rope(self, number: int, size: int) -> Rope:
        """One for all layers of a type, so that a batch's positions are turned to angles once."""
        kind = _layer_type(self._raw, number), size
        if kind not in self._ropes:
            frequencies, scale = _frequencies(
                self._rope_options(number), size, self._config.context_length
            )
            self._ropes[kind] = Rope(frequencies.to(self._device), scale)
        return self._ropes[kind]

    def _norm(self, name: str) -> Tensor:
        """A norm's weights; Gemma and Qwen3-Next say by how much they differ from one."""
        weight = self._get(name)
        return weight + 1.0 if self._family in {"gemma3_text", "qwen3_next"} else weight

    def _get(self, name: str) -> Tensor:
        try:
            return self._source(name).to(device=self._device, dtype=self._dtype)
        except KeyError:
            raise ConfigError([f'the tensor "{name}" is missing'], str(self._folder)) from None


def _half_split(weight: Tensor, size: int) -> Tensor:
    """Rows in the order that ``rotate_`` needs, of heads whose rotary partners are neighbours."""
    pairs = weight.unflatten(0, (-1, size // 2, 2))
    split: Tensor = pairs.transpose(1, 2).flatten(0, 2)
    return split


def _two_steps(down: Linear, norm: Tensor, up: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return up(rms_norm(down(x), norm.shape, norm, 1e-6))


def _softmax_first(
    weight: Tensor,
    count: int,
    x: Tensor,
    *,
    renormed: bool,
    groups: tuple[int, int] | None = None,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Probabilities over all experts; ``groups``: only experts of the best few groups."""
    scores = linear(x.float(), weight.float()).softmax(-1)
    if groups is not None:
        all_groups, best = groups
        each = scores.unflatten(-1, (all_groups, -1))
        kept = each.amax(-1).topk(best, -1).indices
        open_ = torch.zeros_like(each[..., 0], dtype=torch.bool).scatter_(1, kept, True)
        scores = each.masked_fill(~open_[..., None], 0.0).flatten(-2)
    weights, chosen = scores.topk(count, -1)
    if renormed:
        weights = weights / weights.sum(-1, keepdim=True)
    return chosen, weights * scale


def _softmax_last(weight: Tensor, bias: Tensor, count: int, x: Tensor) -> tuple[Tensor, Tensor]:
    """Probabilities over the chosen experts."""
    logits, chosen = linear(x, weight, bias).topk(count, -1)
    return chosen, logits.softmax(-1)


def _sigmoid(weight: Tensor, count: int, x: Tensor) -> tuple[Tensor, Tensor]:
    logits, chosen = linear(x, weight).topk(count, -1)
    return chosen, logits.float().sigmoid()


def _clamped(
    gate_up: Linear,
    up_bias: Tensor,
    down: Linear,
    down_bias: Tensor,
    alpha: float,
    limit: float,
    x: Tensor,
) -> Tensor:
    """gpt-oss's expert: gate and up alternate, both are bounded, and up is counted from one."""
    both = gate_up(x) + up_bias
    gate, up = both[..., ::2].clamp(max=limit), both[..., 1::2].clamp(-limit, limit)
    return down((up + 1.0) * gate * (gate * alpha).sigmoid()) + down_bias


def _mscale(factor: float, scale: float = 1.0) -> float:
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def _frequencies(said: Raw, size: int, context: int) -> tuple[Tensor, float]:
    """Radians a position, [size / 2], and the factor of cosines and sines."""
    base = said["rope_theta"]
    steps = torch.arange(0, size, 2, dtype=torch.float32) / size
    plain = 1.0 / base**steps
    match said.get("rope_type", said.get("type", "default")):
        case "default":
            return plain, 1.0
        case "linear":
            return plain / said["factor"], 1.0
        case "llama3":
            low, high = said["low_freq_factor"], said["high_freq_factor"]
            turns = said["original_max_position_embeddings"] * plain / (2 * math.pi)
            kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
            return kept * plain + (1.0 - kept) * plain / said["factor"], 1.0
        case "yarn":
            return _yarn(said, plain, size, context)
        case other:
            raise ConfigError([f"the rotary scaling {other!r} is unknown"], "config.json")


def _yarn(said: Raw, plain: Tensor, size: int, context: int) -> tuple[Tensor, float]:
    """YaRN (Peng et al., 2023): slow frequencies are divided, fast ones kept, a ramp between."""
    original = said["original_max_position_embeddings"]
    factor = said.get("factor") or context / original
    scale = said.get("attention_factor")
    if scale is None:
        first, everywhere = said.get("mscale"), said.get("mscale_all_dim")
        scale = _mscale(factor)
        if first and everywhere:
            scale = _mscale(factor, first) / _mscale(factor, everywhere)

    def dimension(turns: float) -> float:
        at = original / (turns * 2 * math.pi)
        return size * math.log(at) / (2 * math.log(said["rope_theta"]))

    low, high = dimension(said.get("beta_fast") or 32), dimension(said.get("beta_slow") or 1)
    if said.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(size // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return plain / factor * ramp + plain * (1.0 - ramp), float(scale)
