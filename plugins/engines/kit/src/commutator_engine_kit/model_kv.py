"""What a model keeps of a prompt, read from its config.json alone; and what an engine does with it.

Reading guesses nothing: what the file does not say, or says in words that are not known here, is
in ``ModelKv.unknown``, and sizes that depend on it are None.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

from attrs import Factory, define, evolve, field, frozen

from commutator.contract.engine import ModelConfig
from commutator.errors import ConfigError
from commutator_engine_kit.kv.groups import KvKind

__all__ = [
    "SUPPORT_NAMES",
    "USUAL_BYTES",
    "KvLayers",
    "KvSupport",
    "ModelKv",
    "Verdict",
    "WithKvSupport",
    "model_at",
    "model_lines",
    "read_model_kv",
    "refused",
    "support_lines",
]

_MOST_LAYERS = 10_000
"""A file that says more is not believed."""
_MOST_BYTES = 1 << 26
_WINDOWED = {KvKind.SLIDING, KvKind.CHUNKED}


@frozen(kw_only=True)
class KvLayers:
    """Layers that keep the same of a prompt."""

    kind: KvKind
    count: int
    """How many layers."""
    window: int | None = None
    """Tokens in the window or chunk; None for other kinds, or where config.json does not say it."""
    row: int | None = None
    """Numbers in a row of one layer, as keys and values of a token, or a latent row; None: not
    known. Of recurrent layers: numbers of the state."""
    tokens_per_row: int = 1
    """Tokens for which a compressed row stands."""
    convolution: int = 0
    """Recurrent layers: numbers of the inputs that their convolution still reads."""

    def token_bytes(self, number_bytes: int) -> Fraction | None:
        """Bytes of one token in all these layers; None where that is not known."""
        if self.kind in {KvKind.RECURRENT, KvKind.CROSS} or self.row is None:
            return None
        return Fraction(self.count * self.row * number_bytes, self.tokens_per_row)

    def state_bytes(self, number_bytes: int, state_number_bytes: int) -> int | None:
        """Bytes of one state of all these recurrent layers; None where that is not known."""
        if self.kind is not KvKind.RECURRENT or self.row is None:
            return None
        return self.count * (self.convolution * number_bytes + self.row * state_number_bytes)


@frozen(kw_only=True)
class ModelKv:
    """What a model keeps of a prompt."""

    model_type: str
    """As config.json names the model, or the text's part of it."""
    layers: tuple[KvLayers, ...]
    """By kind and size, in the order in which they occur."""
    context_tokens: int | None
    """Tokens that the model is made for; None where config.json does not say it, or needs none."""
    context_limit: str
    """What says so, for people."""
    number_bytes: int | None
    """Bytes of a number in the format that config.json names; None: it names none."""
    state_number_bytes: int | None
    """Bytes of a number of a recurrent state where config.json has a format for it."""
    unknown: tuple[str, ...] = ()
    """What is not known, each as "NAME: why"; sizes that depend on it are None."""

    @property
    def kinds(self) -> tuple[KvKind, ...]:
        """The kinds of its layers, without draft layers, each once."""
        return tuple(dict.fromkeys(e.kind for e in self.layers if e.kind is not KvKind.DRAFT))

    def of(self, *kinds: KvKind) -> tuple[KvLayers, ...]:
        """The layers of these kinds."""
        return tuple(each for each in self.layers if each.kind in kinds)

    def beside(self, known: Collection[KvKind]) -> str:
        """The kinds of its layers that are not among ``known``, for people; empty: none."""
        return " and ".join(kind.replace("_", " ") for kind in self.kinds if kind not in known)

    @property
    def is_plain(self) -> bool:
        """Whether all layers read every token, and keep what belongs to tokens."""
        return self.kinds in {(KvKind.FULL,), (KvKind.LATENT,)} and not self.unknown

    def prefix_token_bytes(self, number_bytes: int) -> Fraction | None:
        """What one more token of a long prompt adds; None where that is not known."""
        whole = self.of(KvKind.FULL, KvKind.LATENT, KvKind.LATENT_INDEX)
        return self._sum(each.token_bytes(number_bytes) for each in whole)

    def window_bytes(self, number_bytes: int) -> Fraction | None:
        """What full windows and chunks hold, whatever the prompt's length; None: not known."""
        return self._sum(
            None if size is None or each.window is None else size * each.window
            for each in self.of(*_WINDOWED)
            for size in (each.token_bytes(number_bytes),)
        )

    def state_bytes(self, number_bytes: int, state_number_bytes: int) -> int | None:
        """One state of all recurrent layers; None where that is not known."""
        found = self._sum(
            each.state_bytes(number_bytes, state_number_bytes) for each in self.of(KvKind.RECURRENT)
        )
        return None if found is None else int(found)

    def request_bytes(
        self, tokens: int, number_bytes: int, state_number_bytes: int
    ) -> Fraction | None:
        """What a request of that many tokens needs, without the rounding to blocks."""
        parts = [
            None if size is None else size * self._kept(each, tokens)
            for each in self.layers
            if each.kind not in {KvKind.RECURRENT, KvKind.DRAFT}
            for size in (each.token_bytes(number_bytes),)
        ]
        return self._sum([*parts, self.state_bytes(number_bytes, state_number_bytes)])

    def _kept(self, layers: KvLayers, tokens: int) -> int:
        return tokens if layers.window is None else min(tokens, layers.window)

    def _sum(self, sizes: Iterator[Any] | Sequence[Any]) -> Fraction | None:
        found = list(sizes)
        if self.unknown or any(size is None for size in found):
            return None
        return sum(found, start=Fraction(0))


@frozen
class Verdict:
    """Whether an engine does something with a model's KV."""

    word: Literal["yes", "part", "no", "untried"]
    """``part``: with limits; ``untried``: nothing forbids it, and no test of ours shows it."""
    why: str = ""
    """The limit or the reason, and what to do."""


@frozen(kw_only=True)
class KvSupport:
    """What an engine does with the KV of one model."""

    runs: Verdict
    """Whether it computes the model."""
    tiers: Verdict
    """Whether its blocks can be kept in storage tiers."""
    handover: Verdict
    """Whether prefill and decode can be on different workers."""
    migration: Verdict
    """Whether another worker continues an answer."""
    adapters: Verdict
    """Whether requests can name LoRA adapters."""
    routing: Verdict
    """Whether routers know which prompts a worker can resume."""


def refused(model: ModelConfig, judged: Callable[[ModelKv], Verdict]) -> Iterator[str]:
    """Why an engine cannot start with what ``judged`` says "no" to, if it does.

    Nothing for a model without a config.json.
    """
    if (kept := model_at(model.source)) is not None and (verdict := judged(kept)).word == "no":
        yield f"{model.name}: {verdict.why}"


class WithKvSupport(ABC):
    """A part of an engine's connector: says what its engines do with a model's KV."""

    @abstractmethod
    def kv_support(self, model: ModelKv) -> KvSupport:
        """What they do with the model; from its configuration alone."""

    def kv_number_bytes(self, config: Any, model: ModelKv) -> tuple[int, int]:
        """Bytes of a number of keys and values, and of a recurrent state, under ``config``."""
        del config
        number_bytes = model.number_bytes or USUAL_BYTES
        return number_bytes, model.state_number_bytes or number_bytes

    def model_notes(self, config: Any, model: ModelConfig) -> Iterable[str]:
        """As ``EngineConnector.model_notes``; none for GGUF files."""
        if (read := model_at(model.source)) is None:
            return ()
        sizes = self.kv_number_bytes(config, read)
        return [*model_lines(read, *sizes), *support_lines(self.kv_support(read))]


def model_at(source: str) -> ModelKv | None:
    """What the model of a configuration keeps; None without a config.json, as of GGUF files."""
    from commutator.tokenizer import locate_model  # heavy, and connectors import this module

    try:
        return read_model_kv(locate_model(source) / "config.json")
    except ConfigError:
        return None  # other checks report it


def read_model_kv(source: Path | Mapping[str, Any]) -> ModelKv:
    """Read a config.json, the folder that has one, or its content.

    Raises ConfigError for a file that is no configuration of a model.
    """
    raw = _content(source) if isinstance(source, Path) else dict(source)
    if raw.get("is_encoder_decoder"):
        return _encoder_decoder(raw)
    text = next((part for name in _TEXT_PARTS if isinstance(part := raw.get(name), Mapping)), raw)
    return _Reader(text, said_outside=raw).model()


_TEXT_PARTS = ("text_config", "llm_config", "language_config")


def _content(path: Path) -> dict[str, Any]:
    file = path / "config.json" if path.is_dir() else path
    try:
        if file.stat().st_size > _MOST_BYTES:
            raise ConfigError([f"more than {_MOST_BYTES >> 20} MiB"], str(file))
        raw = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError([f"cannot be read: {error}"], str(file)) from error
    if not isinstance(raw, dict):
        raise ConfigError(["not a JSON object"], str(file))
    return raw


def _encoder_decoder(raw: Mapping[str, Any]) -> ModelKv:
    reader = _Reader(raw, said_outside=raw)
    count = reader.size("num_decoder_layers", "decoder_layers", "num_hidden_layers", "num_layers")
    heads = reader.size("decoder_attention_heads", "num_attention_heads", "num_heads")
    width = reader.size("d_model", "hidden_size")
    each = reader.size("d_kv", "head_dim") or (width // heads if width and heads else None)
    row = None if heads is None or each is None else 2 * heads * each
    if count is None:
        reader.unknown["num_hidden_layers"] = "the number of layers is not said"
    kinds = (KvKind.FULL, KvKind.CROSS)
    return reader.result([KvLayers(kind=kind, count=count or 0, row=row) for kind in kinds])


@define
class _Layer:
    """One layer: its kinds of KV, by config.json's word for it, and the options that it has."""

    word: str
    raw: Mapping[str, Any]


_KIND_WORDS: Mapping[str, tuple[KvKind, ...]] = {
    "full_attention": (KvKind.FULL,),
    "attention": (KvKind.FULL,),
    "full": (KvKind.FULL,),
    "*": (KvKind.FULL,),
    "indexed_attention": (KvKind.FULL, KvKind.LATENT_INDEX),
    "sliding_attention": (KvKind.SLIDING,),
    "chunked_attention": (KvKind.CHUNKED,),
    "linear_attention": (KvKind.RECURRENT,),
    "mamba": (KvKind.RECURRENT,),
    "mamba2": (KvKind.RECURRENT,),
    "recurrent": (KvKind.RECURRENT,),
    "conv": (KvKind.RECURRENT,),
    "M": (KvKind.RECURRENT,),
    "hybrid": (KvKind.FULL, KvKind.RECURRENT),
    "cross_attention": (KvKind.CROSS,),
    "heavily_compressed_attention": (KvKind.SLIDING, KvKind.LATENT),
    "compressed_sparse_attention": (KvKind.SLIDING, KvKind.LATENT, KvKind.LATENT_INDEX),
    "shared": (),
    "mlp": (),
    "moe": (),
    "-": (),
    "E": (),
}
"""What a layer keeps, by the words of ``layer_types`` and its like; nothing where it is only an
MLP, or reads what another layer keeps."""

_SIGNS = re.compile(
    r"mamba|ssm|linear_|conv|window|chunk|sparse|index|compress|recurr|lru|shared|_source|cross_att"
    r"|block_type|layer_type|layers_type|swa|state_size|kpool|nextn|mtp|kv_|attn_type|pattern"
)
_HARMLESS = re.compile(
    r"bias|_act$|factor|norm|mlp_layer|moe|expert|sparse_step|_dt_|a_log|neg_eigval|topk|index_n_h"
    r"|kernels|expand$|feed_forward|mamba_chunk|^chunk_size$|always_select|shared_inter|shared_att"
    r"|max_window|wide_mlp|lower_bound|safe_gate|mamba_scan|mamba_dt|loss|kv_channels|vision|audio"
    r"|rope_theta|multiplier|activation_sparsity"
)
"""Names that say nothing of sizes, though they contain a sign."""
_OF_WINDOWS = re.compile(r"window|pattern|attn_idxs|full_attention_interval")
_OF_STATES = re.compile(r"mamba|ssm|conv|linear_|state_size|lru|n_groups")
_ONLY_STATES = {"mamba", "mamba2", "falcon_mamba"}
_EXPANDED = {"minicpm3"}
"""Families with latent rows that engines keep as the keys and values made of them."""

_NUMBER_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "float64": 8}

_STATE_FORMATS = ("mamba_ssm_cache_dtype", "mamba_ssm_dtype")

_CONTEXT_NAMES = (
    *("max_position_embeddings", "model_max_length", "max_sequence_length", "n_positions"),
    *("max_seq_len", "max_target_positions"),
)


@define
class _Reader:
    """Reads one configuration, and notes which of its names were understood."""

    raw: Mapping[str, Any]
    said_outside: Mapping[str, Any]
    unknown: dict[str, str] = Factory(dict)
    _used: set[str] = field(factory=set, init=False)
    _lists_layers: bool = field(default=False, init=False)
    """Whether it names the kind of each layer."""

    def model(self) -> ModelKv:
        layers = self._layers()
        found: dict[KvLayers, int] = {}
        for layer in layers:
            for one in self._kept(layer):
                found[one] = found.get(one, 0) + 1
        kept = [evolve(one, count=count) for one, count in found.items()]
        drafts = self.size("num_nextn_predict_layers", "mtp_num_hidden_layers")
        self._used.add("mtp_layers_block_type")  # of these
        if drafts and layers:
            attention = [one for one in found if one.kind in {KvKind.FULL, KvKind.LATENT}]
            row = attention[-1].row if attention else None
            kept.append(KvLayers(kind=KvKind.DRAFT, count=drafts, row=row))
        self._note_signs(has_states=any(one.kind is KvKind.RECURRENT for one in found))
        return self.result(kept)

    def result(self, layers: Sequence[KvLayers]) -> ModelKv:
        if not layers:
            self.unknown.setdefault("layers", "none that keeps anything is said")
        for each in layers:
            if each.row is None and each.kind not in {KvKind.CROSS, KvKind.DRAFT}:
                self.unknown.setdefault(
                    f"{each.kind} layers", "their sizes are not said in words that are known"
                )
            if each.kind in _WINDOWED and each.window is None:
                self.unknown.setdefault(f"{each.kind} layers", "their window is not said")
        context, limit = self._context()
        if any(each.kind is KvKind.CROSS for each in layers):
            limit += "; and what an encoder made of pictures or sounds, whose size is the input's"
        dtype = self._said("dtype") or self._said("torch_dtype")
        state = next((said for name in _STATE_FORMATS if (said := self._said(name))), None)
        return ModelKv(
            model_type=str(self.raw.get("model_type")),
            layers=tuple(layers),
            context_tokens=context,
            context_limit=limit,
            number_bytes=_NUMBER_BYTES.get(str(dtype).removeprefix("torch.")),
            state_number_bytes=_NUMBER_BYTES.get(str(state)),
            unknown=tuple(f"{name}: {why}" for name, why in self.unknown.items()),
        )

    def _said(self, name: str) -> Any:
        value = self.raw.get(name)
        return self.said_outside.get(name) if value is None else value

    def _get(self, name: str, raw: Mapping[str, Any] | None = None) -> Any:
        self._used.add(name)
        return (self.raw if raw is None else raw).get(name)

    def size(self, *names: str, raw: Mapping[str, Any] | None = None) -> int | None:
        """The first of these options that is a number above 0."""
        self._used.update(names)
        for name in names:
            value = (self.raw if raw is None else raw).get(name)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
        return None

    # Which layers there are

    def _layers(self) -> list[_Layer]:
        words = self._words()
        if words is None:
            return []
        own = self._get("per_layer_config")
        own = own if isinstance(own, Mapping) else {}
        shared = self.size("num_kv_shared_layers") or 0
        sources = self._list("kv_source_layers")
        indexers = self._list("indexer_types")
        layers = []
        for number, word in enumerate(words):
            more = own.get(f"{number:02}", own.get(str(number), {}))
            raw = {**self.raw, **(more if isinstance(more, Mapping) else {})}
            if number >= len(words) - shared or (
                sources and sources[number : number + 1] != [number]
            ):
                word = "shared"  # noqa: PLW2901 - it reads what another layer keeps
            elif word == "indexed_attention" and indexers[number : number + 1] == ["shared"]:
                word = "full_attention"  # noqa: PLW2901 - with the index of another layer
            layers.append(_Layer(word, raw))
        return layers

    def _list(self, name: str) -> list[Any]:
        value = self._get(name)
        return list(value) if isinstance(value, list) else []

    def _words(self) -> list[str] | None:
        """A word of ``_KIND_WORDS`` for each layer, or one that is not known; None: no layers."""
        for name in ("layer_types", "layers_block_type"):
            if said := self._list(name):
                self._lists_layers = True
                return [str(word) for word in said]
        if isinstance(pattern := self._get("hybrid_override_pattern"), str) and pattern:
            self._lists_layers = True
            return list(pattern)
        count = self.size("num_hidden_layers", "num_layers", "n_layer", "n_layers")
        if count is None or count > _MOST_LAYERS:
            self.unknown["num_hidden_layers"] = (
                "the number of layers is not said, or not believable"
            )
            return None
        words = self._by_pattern(count)
        if self.raw.get("model_type") == "longcat_flash":
            words = [word for word in words for _ in range(2)]  # two attentions in each layer
        for number in self._list("cross_attention_layers"):
            if isinstance(number, int) and 0 <= number < count:
                words[number] = "cross_attention"
        return words

    def _by_pattern(self, count: int) -> list[str]:
        family = str(self.raw.get("model_type"))
        if said := self._list("block_types"):
            local = "sliding_attention" if self.size("attention_window_size") else "attention"
            said = [local if word == "attention" else str(word) for word in said]
            return [said[number % len(said)] for number in range(count)]
        if said := self._list("attn_type_list"):
            return ["full_attention" if each == 1 else "linear_attention" for each in said]
        if family == "falcon_h1":
            return ["hybrid"] * count
        if (full := self._full_beside_states(count, family)) is not None:
            return _chosen(count, full, "full_attention", "linear_attention")
        if self.size("attention_chunk_size"):
            rope = self._list("no_rope_layers")
            every = self.size("no_rope_layer_interval") or 4
            rope = rope or [(number + 1) % every for number in range(count)]
            full = {number for number, each in enumerate(rope) if not each}
            return _chosen(count, full, "full_attention", "chunked_attention")
        return self._with_windows(count, family)

    def _full_beside_states(self, count: int, family: str) -> set[int] | None:
        """The layers with full attention, where all others are recurrent."""
        if isinstance(kda := self._get("linear_attn_config"), Mapping):
            return {int(each) - 1 for each in kda.get("full_attn_layers", ())}
        for name in ("full_attn_idxs", "attn_layer_indices"):
            if (said := self._list(name)) or family == "bamba":
                return set(said)
        if period := self.size("attn_layer_period"):
            offset = self._get("attn_layer_offset") or 0
            return {number for number in range(count) if number % period == offset}
        if every := self.size("full_attention_interval"):
            return {number for number in range(count) if (number + 1) % every == 0}
        return set() if family in _ONLY_STATES else None

    def _with_windows(self, count: int, family: str) -> list[str]:
        every = self.size("sliding_window_pattern", "_sliding_window_pattern")
        if family == "gpt_oss":
            every = 2
        if not self.size("sliding_window") or self._get("use_sliding_window") is False:
            return ["full_attention"] * count
        if every:
            full = {number for number in range(count) if (number + 1) % every == 0}
            return _chosen(count, full, "full_attention", "sliding_attention")
        if first := self.size("max_window_layers"):
            return _chosen(count, set(range(first)), "full_attention", "sliding_attention")
        return ["sliding_attention"] * count

    # What a layer keeps

    def _kept(self, layer: _Layer) -> Iterator[KvLayers]:
        kinds = _KIND_WORDS.get(layer.word)
        if kinds is None:
            self.unknown[f"layers of type {layer.word!r}"] = "what they keep is not known"
            return
        raw = layer.raw
        for kind in kinds:
            match kind:
                case KvKind.RECURRENT:
                    convolution, state = self._state(raw) or (0, None)
                    yield KvLayers(kind=kind, count=1, row=state, convolution=convolution)
                case KvKind.LATENT_INDEX:
                    yield KvLayers(
                        kind=kind,
                        count=1,
                        row=self.size("index_head_dim", raw=raw),
                        tokens_per_row=self._rate(layer) * (self.size("index_kpool", raw=raw) or 1),
                    )
                case KvKind.LATENT:
                    yield KvLayers(
                        kind=kind,
                        count=1,
                        row=self.size("head_dim", raw=raw),
                        tokens_per_row=self._rate(layer),
                    )
                case KvKind.FULL if (rank := self.size("kv_lora_rank", raw=raw)) is not None:
                    turned = self._get("qk_rope_head_dim", raw)
                    row = rank + turned if isinstance(turned, int) and turned >= 0 else None
                    if str(raw.get("model_type")) in _EXPANDED:
                        self.unknown["kv_lora_rank"] = "engines keep more than its latent rows"
                        row = None
                    yield KvLayers(kind=KvKind.LATENT, count=1, row=row)
                case _:
                    yield self._pairs(kind, layer)

    def _rate(self, layer: _Layer) -> int:
        """Tokens that a row of compressed attention stands for."""
        rates = self._get("compress_rates")
        rate = rates.get(layer.word) if isinstance(rates, Mapping) else None
        if layer.word.endswith(("compressed_attention", "compressed_sparse_attention")):
            if not isinstance(rate, int) or rate < 1:
                self.unknown["compress_rates"] = f"no rate for {layer.word}"
                return 1
            self.unknown.setdefault(
                "compressed attention", "what its unfinished rows hold is not in config.json"
            )
            return rate
        return 1

    def _pairs(self, kind: KvKind, layer: _Layer) -> KvLayers:
        raw = layer.raw
        window = None
        if kind is KvKind.SLIDING:
            window = self.size("sliding_window", "attention_window_size", raw=raw)
        elif kind is KvKind.CHUNKED:
            window = self.size("attention_chunk_size", raw=raw)
        if layer.word.endswith(("compressed_attention", "compressed_sparse_attention")):
            return KvLayers(kind=kind, count=1, window=window, row=self.size("head_dim", raw=raw))
        swa = ("swa_",) if kind is KvKind.SLIDING else ()
        wide = ("global_",) if kind is KvKind.FULL else ()

        def one(*names: str) -> int | None:
            prefixed = [prefix + name for name in names for prefix in (*swa, *wide)]
            return self.size(*prefixed, *names, raw=raw)

        queries = one("num_attention_heads", "n_head", "num_heads")
        heads = self.size("num_global_key_value_heads", raw=raw) if wide else None
        heads = heads or one("num_key_value_heads", "num_kv_heads", "num_query_groups") or queries
        keys = one("head_dim", "attention_head_dim")
        hidden = self.size("hidden_size", "n_embd", "d_model", raw=raw)
        if keys is None and hidden and queries and hidden % queries == 0:
            keys = hidden // queries
        values = one("v_head_dim") or keys
        row = heads * (keys + values) if heads and keys and values else None
        return KvLayers(kind=kind, count=1, window=window, row=row)

    def _state(self, raw: Mapping[str, Any]) -> tuple[int, int] | None:
        """Numbers of the convolution's inputs and of the state; None: not known."""
        for formula in (_delta_net, _kimi_delta, _mamba2, _mamba, _short, _gated_lru, _lightning):
            if (found := formula(self, raw)) is not None:
                return found
        return None

    def _context(self) -> tuple[int | None, str]:
        name = next((each for each in _CONTEXT_NAMES if self.size(each)), None)
        if name is None:
            grows = str(self.raw.get("model_type")) not in _ONLY_STATES
            return None, "config.json has none" if grows else "no limit: states do not grow"
        tokens = self.size(name)
        rope = self.raw.get("rope_parameters") or self.raw.get("rope_scaling")
        limit = name
        for one in (rope, *(rope.values() if isinstance(rope, Mapping) else ())):
            if isinstance(one, Mapping) and (factor := one.get("factor")):
                kind = one.get("rope_type", one.get("type"))
                limit = f"{name}, with the rotary scaling {kind} of factor {factor:g}"
        return tokens, limit

    def _note_signs(self, *, has_states: bool) -> None:
        """Note options that may say something of the KV and were not read."""
        self._used.update(_STATE_FORMATS)
        for name, value in self.raw.items():
            if name in self._used or not value or not _SIGNS.search(name):
                continue
            if _HARMLESS.search(name) or (self._lists_layers and _OF_WINDOWS.search(name)):
                continue
            if self._lists_layers and not has_states and _OF_STATES.search(name):
                continue
            self.unknown[name] = "it may change what layers keep, and is not known"


def _chosen(count: int, which: set[int], word: str, other: str) -> list[str]:
    return [word if number in which else other for number in range(count)]


# Sizes of states. Each returns the numbers of the convolution's inputs and of the state, as vLLM
# 0.32 (model_executor/layers/mamba/mamba_utils.py) and transformers 5 allocate them; None where
# the configuration is of another kind.


def _delta_net(reader: _Reader, raw: Mapping[str, Any]) -> tuple[int, int] | None:
    """Gated delta net: Qwen3-Next, Qwen3.5, Olmo Hybrid."""
    names = ("linear_num_key_heads", "linear_num_value_heads")
    sizes = ("linear_key_head_dim", "linear_value_head_dim", "linear_conv_kernel_dim")
    found = [reader.size(name, raw=raw) for name in (*names, *sizes)]
    if any(each is None for each in found):
        return None
    key_heads, heads, key, value, kernel = (int(each or 0) for each in found)
    return (kernel - 1) * (2 * key_heads * key + heads * value), heads * key * value


def _kimi_delta(reader: _Reader, raw: Mapping[str, Any]) -> tuple[int, int] | None:
    """Kimi Delta Attention: Kimi Linear, Ling hybrids, GLM-5 Next."""
    said = reader._get("linear_attn_config", raw)  # noqa: SLF001 - the reader's own formulas
    if isinstance(said, Mapping):
        found = [reader.size(name, raw=said) for name in ("num_heads", "head_dim")]
        kernel = reader.size("short_conv_kernel_size", raw=said)
    else:
        found = [reader.size(f"linear_{name}", raw=raw) for name in ("num_heads", "head_dim")]
        kernel = reader.size("linear_conv_kernel_dim", "short_conv_kernel_size", raw=raw)
    heads, size = found
    if heads is None or size is None or kernel is None:
        return None
    return (kernel - 1) * 3 * heads * size, heads * size * size


def _mamba2(reader: _Reader, raw: Mapping[str, Any]) -> tuple[int, int] | None:
    """Mamba 2: Nemotron-H, Granite 4, Bamba, Falcon-H1, Zamba 2."""
    own = raw.get("model_type") == "mamba2"
    heads = reader.size(
        *("mamba_n_heads", "mamba_num_heads", "n_mamba_heads"),
        *(("num_heads",) if own else ()),
        raw=raw,
    )
    if heads is None:
        return None
    size = reader.size(
        *("mamba_d_head", "mamba_head_dim", "mamba_headdim"),
        *(("head_dim",) if own else ()),
        raw=raw,
    )
    expand, hidden = reader.size("mamba_expand", "expand", raw=raw), reader.size("hidden_size")
    if size is None and expand and hidden:
        size = expand * hidden // heads
    groups = reader.size("mamba_n_groups", "mamba_ngroups", "n_groups", raw=raw)
    state = reader.size("mamba_d_state", "ssm_state_size", "state_size", raw=raw)
    kernel = reader.size("mamba_d_conv", "conv_kernel", raw=raw)
    reader.size("mamba_d_ssm", raw=raw)  # heads times their size
    if size is None or groups is None or state is None or kernel is None:
        return None
    inner = heads * size
    return (kernel - 1) * (inner + 2 * groups * state), inner * state


def _mamba(reader: _Reader, raw: Mapping[str, Any]) -> tuple[int, int] | None:
    """Mamba 1: Falcon Mamba, Jamba."""
    state = reader.size("mamba_d_state", "state_size", raw=raw)
    kernel = reader.size("mamba_d_conv", "conv_kernel", raw=raw)
    expand, hidden = reader.size("mamba_expand", "expand", raw=raw), reader.size("hidden_size")
    if state is None or kernel is None or expand is None or hidden is None:
        return None
    inner = expand * hidden
    return (kernel - 1) * inner, inner * state


def _short(reader: _Reader, raw: Mapping[str, Any]) -> tuple[int, int] | None:
    """Short convolutions alone: LFM2."""
    kernel, hidden = reader.size("conv_L_cache", raw=raw), reader.size("hidden_size")
    if kernel is None or hidden is None:
        return None
    return (kernel - 1) * hidden, 0


def _gated_lru(reader: _Reader, raw: Mapping[str, Any]) -> tuple[int, int] | None:
    """Linear recurrent units: RecurrentGemma."""
    width, kernel = reader.size("lru_width", raw=raw), reader.size("conv1d_width", raw=raw)
    if width is None or kernel is None:
        return None
    return (kernel - 1) * width, width


def _lightning(reader: _Reader, raw: Mapping[str, Any]) -> tuple[int, int] | None:
    """Lightning attention: MiniMax-01."""
    if not str(raw.get("model_type")).startswith("minimax"):
        return None
    heads, hidden = reader.size("num_attention_heads", raw=raw), reader.size("hidden_size")
    size = reader.size("head_dim", raw=raw) or (hidden // heads if hidden and heads else None)
    if heads is None or size is None:
        return None
    return 0, heads * size * size


def model_lines(model: ModelKv, number_bytes: int, state_number_bytes: int) -> Iterator[str]:
    """What the model keeps, for people, a line each; with numbers of these sizes in bytes."""
    from commutator_engine_kit.preflight import size_text

    layers = ", ".join(_layers_text(each) for each in model.layers) or "no layers that are known"
    token = model.prefix_token_bytes(number_bytes)
    yield f"{model.model_type}: {layers}"
    if token is not None:
        parts = [f"{float(token):,.6g} bytes for each further token"]
        if window := model.window_bytes(number_bytes):
            parts.append(f"windows of at most {size_text(int(window))}")
        if state := model.state_bytes(number_bytes, state_number_bytes):
            parts.append(f"states of {size_text(state)}")
        yield f"KV: {', '.join(parts)}; at {number_bytes} bytes a number" + (
            f", {state_number_bytes} in a state" if model.of(KvKind.RECURRENT) else ""
        )
    tokens = "no limit" if model.context_tokens is None else f"{model.context_tokens:,} tokens"
    needs = ""
    if model.context_tokens is not None:
        size = model.request_bytes(model.context_tokens, number_bytes, state_number_bytes)
        needs = "" if size is None else f", which take {size_text(int(size))}"
    yield f"context: {tokens} ({model.context_limit}){needs}"
    for each in model.unknown:
        yield f"not known: {each}"


def support_lines(support: KvSupport) -> Iterator[str]:
    """What an engine does with a model's KV, for people: a line for each verdict."""
    alike: dict[Verdict, list[str]] = {}
    for name in SUPPORT_NAMES:
        alike.setdefault(getattr(support, name), []).append(_title(name))
    for verdict, names in alike.items():
        yield f"{', '.join(names)}: {verdict.word}" + (f", {verdict.why}" if verdict.why else "")


SUPPORT_NAMES = ("runs", "tiers", "handover", "migration", "adapters", "routing")
"""The fields of ``KvSupport`` that are verdicts, in the order of a table."""
USUAL_BYTES = 2
"""Of a number, where nothing says it: bfloat16."""


def _title(name: str) -> str:
    return "hand-over" if name == "handover" else name


def _layers_text(layers: KvLayers) -> str:
    kind = layers.kind.replace("_", " ")
    window = "" if layers.window is None else f" of {layers.window:,}"
    rate = "" if layers.tokens_per_row == 1 else f", a row for {layers.tokens_per_row} tokens"
    return f"{layers.count} {kind}{window}{rate}"
