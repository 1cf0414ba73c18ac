"""LoRA adapters: read from PEFT's folders, kept in memory, and added to a model's projections.

An adapter changes a projection W to W + scale * B A, with A [rank, in] and B [out, rank] (Hu and
others, 2021). Rows of a batch that use different adapters, or none, are computed together: the
projection once for all of them, and what each adapter adds for its own rows.
"""

from __future__ import annotations

import math
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path

import torch
from attrs import frozen
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.nn.functional import linear

from commutator import AdapterIdentity
from commutator.errors import ConfigError, EngineError, EngineOverloadedError, RequestError
from commutator_engine_kit.model_identity import adapter_digest, changed_files
from commutator_reference.llama import LlamaConfig, read_json

_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_NAME = re.compile(
    r"base_model\.model\.model\.layers\.(\d+)\.(self_attn|mlp)\.([a-z]+)_proj\.lora_([AB])\.weight"
)
_NOT_SERVED = (
    *("use_dora", "modules_to_save", "rank_pattern", "alpha_pattern", "fan_in_fan_out"),
    *("lora_bias", "target_parameters", "trainable_token_indices", "use_qalora"),
    *("alora_invocation_tokens", "arrow_config", "layer_replication"),
)
"""Settings of an adapter that change what it computes, and that are not computed here."""
_FUSED = {
    "qkv": ("q", "k", "v"),
    "attention_output": ("o",),
    "gate_up": ("gate", "up"),
    "down": ("down",),
}
"""The projections of a layer as they are computed, and their parts in a folder."""


@frozen(eq=False)
class Delta:
    """What an adapter adds to one projection."""

    down: Tensor
    """[rank, in]"""
    up: Tensor
    """[out, rank], scaled."""

    def __call__(self, x: Tensor) -> Tensor:
        """[rows, in] to [rows, out]."""
        return linear(linear(x, self.down), self.up)


@frozen(eq=False)
class LoraAdapter:
    """An adapter's weights in memory."""

    digest: str
    layers: tuple[Mapping[str, Delta], ...]
    """For each layer, what is added to those of its projections that the adapter changes."""


Adapted = Sequence[tuple[Tensor, LoraAdapter]]
"""The rows of a batch that use an adapter, for each of its adapters."""


def rows_by_adapter(
    of: Iterable[tuple[int, LoraAdapter | None]], device: torch.device
) -> tuple[tuple[Tensor, LoraAdapter], ...]:
    """``of`` has for each chunk of a batch, in order, its number of tokens and its adapter."""
    rows: dict[LoraAdapter, list[int]] = {}
    at = 0
    for count, adapter in of:
        if adapter is not None:
            rows.setdefault(adapter, []).extend(range(at, at + count))
        at += count
    return tuple((torch.tensor(some, device=device), adapter) for adapter, some in rows.items())


def add_to(out: Tensor, x: Tensor, adapted: Adapted, layer: int, projection: str) -> Tensor:
    """``out``, the projection of ``x``, with what the adapters of its rows add; in place."""
    for rows, adapter in adapted:
        if (delta := adapter.layers[layer].get(projection)) is not None:
            out.index_add_(0, rows, delta(x.index_select(0, rows)))
    return out


def load_adapter(
    asked: AdapterIdentity,
    model: LlamaConfig,
    *,
    max_rank: int,
    device: torch.device,
    dtype: torch.dtype,
) -> LoraAdapter:
    """The adapter from its folder.

    Raises RequestError for one that this engine cannot serve, or not with such a model, EngineError
    for one whose files have changed.
    """
    if asked.source is None:
        raise RequestError(f"adapter {asked} is not loaded, and nobody says from where", "model")
    folder = Path(asked.source)
    try:
        layers = _read(folder, model, max_rank, device, dtype)
        # After it was read: so the digest is of what was read.
        digest = adapter_digest(folder)
    except (ConfigError, OSError) as error:
        raise RequestError(f"adapter {asked} from {folder}: {error}", "model") from error
    if digest != asked.digest:
        raise EngineError(changed_files(asked))
    return LoraAdapter(digest, layers)


def _read(
    folder: Path, model: LlamaConfig, max_rank: int, device: torch.device, dtype: torch.dtype
) -> tuple[Mapping[str, Delta], ...]:
    """What is added in each layer. Raises ConfigError, OSError."""
    scale = _scale(folder, max_rank)
    found: dict[tuple[int, str, str], Tensor] = {}
    try:
        with safe_open(folder / _WEIGHTS, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - it is no mapping
                place = _NAME.fullmatch(name)
                if place is None or int(place[1]) >= model.num_layers:
                    raise _refused(f'the tensor "{name}" changes what is not adapted here')
                shape = opened.get_slice(name).get_shape()
                if min(shape) > max_rank:
                    raise _refused(f'the tensor "{name}" has the shape {shape}')
                tensor = opened.get_tensor(name).to(device=device, dtype=dtype)
                found[int(place[1]), place[3], place[4]] = tensor
    except SafetensorError as error:
        raise _refused(f"{_WEIGHTS}: {error}") from error
    return tuple(_layer(found, index, model, scale) for index in range(model.num_layers))


def _scale(folder: Path, max_rank: int) -> float:
    """By how much B A is multiplied: alpha / rank, or alpha / sqrt(rank) if it is rank-stabilized.

    Raises ConfigError for settings that are not served.
    """
    settings = read_json(folder / _CONFIG)
    if settings.get("peft_type") != "LORA":
        raise _refused(f"{_CONFIG}: peft_type is {settings.get('peft_type')!r}, expected LORA")
    if settings.get("bias", "none") != "none":
        raise _refused(f"{_CONFIG}: biases are not adapted here")
    for name in _NOT_SERVED:
        if settings.get(name):
            raise _refused(f"{_CONFIG}: {name} is not served here")
    rank, alpha = settings.get("r"), settings.get("lora_alpha")
    if not isinstance(rank, int) or not 0 < rank <= max_rank:
        raise _refused(f"{_CONFIG}: r is {rank!r}, expected 1 to {max_rank} (max_adapter_rank)")
    if not isinstance(alpha, int | float) or not math.isfinite(alpha):
        raise _refused(f"{_CONFIG}: lora_alpha is {alpha!r}, expected a number")
    return alpha / math.sqrt(rank) if settings.get("use_rslora") else alpha / rank


def _layer(
    found: Mapping[tuple[int, str, str], Tensor], index: int, model: LlamaConfig, scale: float
) -> dict[str, Delta]:
    made = {}
    for projection, parts in _FUSED.items():
        downs, ups, used = [], [], False
        for part in parts:
            size_in, size_out = _sizes(model, part)
            down, up = found.get((index, part, "A")), found.get((index, part, "B"))
            if (down is None) != (up is None):
                raise _refused(f"layer {index}: {part}_proj has only one of lora_A and lora_B")
            if down is None or up is None:
                some = next(iter(found.values()))
                down, up = some.new_zeros(0, size_in), some.new_zeros(size_out, 0)
            elif (*down.shape, *up.shape) != (len(down), size_in, size_out, len(down)):
                shapes = f"{tuple(down.shape)} and {tuple(up.shape)}"
                raise _refused(f"layer {index}: {part}_proj has {shapes}; is it of another model?")
            used = used or bool(len(down))
            downs.append(down)
            ups.append(up * scale)
        if used:
            made[projection] = Delta(torch.cat(downs), torch.block_diag(*ups))
    return made


def _sizes(model: LlamaConfig, part: str) -> tuple[int, int]:
    hidden, wide = model.hidden_size, model.intermediate_size
    queries, others = model.num_heads * model.head_size, model.num_kv_heads * model.head_size
    return {
        "q": (hidden, queries),
        "k": (hidden, others),
        "v": (hidden, others),
        "o": (queries, hidden),
        "gate": (hidden, wide),
        "up": (hidden, wide),
        "down": (wide, hidden),
    }[part]


def _refused(why: str) -> ConfigError:
    return ConfigError([why], "adapter")


class Adapters:
    """The adapters of one model that are in memory; may be called from any thread.

    At most ``places`` of them. One that is needed takes the place of the one that was needed
    longest ago, and that no request uses.
    """

    def __init__(self, load: Callable[[AdapterIdentity], LoraAdapter], places: int) -> None:
        self._load = load
        self._places = places
        self._lock = threading.Lock()
        self._loaded: OrderedDict[str, LoraAdapter] = OrderedDict()

    def has(self, digest: str) -> bool:
        """Whether it is in memory."""
        return digest in self._loaded

    def get(self, asked: AdapterIdentity, used: Callable[[], Collection[str]]) -> LoraAdapter:
        """The adapter, loaded if need be. ``used`` are the digests of those that requests use.

        Raises EngineOverloadedError when every place is used, and what loading it raises.
        """
        with self._lock:
            if (found := self._loaded.get(asked.digest)) is not None:
                self._loaded.move_to_end(asked.digest)
                return found
            self._make_room(used())
            found = self._loaded[asked.digest] = self._load(asked)
            return found

    def _make_room(self, used: Collection[str]) -> None:
        while len(self._loaded) >= self._places:
            idle = next((digest for digest in self._loaded if digest not in used), None)
            if idle is None:
                raise EngineOverloadedError(
                    f"requests use {len(used)} adapters here, and there is room for "
                    f"{self._places} (adapter_places)"
                )
            del self._loaded[idle]
