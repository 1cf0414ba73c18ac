"""What a model's files say about it, without its weights.

Read are config.json of transformers, and modules.json with the files that it names, as
sentence-transformers writes them. What is not supported is an error, not a different vector.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from attrs import evolve, frozen

from commutator import Operation
from commutator.errors import ConfigError

PoolingMode = Literal["mean", "cls", "max", "mean_sqrt_len"]
Squash = Literal["sigmoid", "softmax", "none"]
"""What makes logits scores or probabilities."""

_FAMILIES = ("bert", "roberta", "xlm-roberta")
_ACTIVATIONS = ("gelu", "gelu_new", "gelu_pytorch_tanh", "relu")
_POOLING: tuple[tuple[str, PoolingMode], ...] = (
    ("pooling_mode_mean_tokens", "mean"),
    ("pooling_mode_cls_token", "cls"),
    ("pooling_mode_max_tokens", "max"),
    ("pooling_mode_mean_sqrt_len_tokens", "mean_sqrt_len"),
)


@frozen(kw_only=True)
class ModelFacts:
    """The shape of one model, and what its own pipeline makes of the last layer."""

    family: str
    hidden_size: int
    layers: int
    heads: int
    activation: str
    norm_epsilon: float
    max_tokens: int
    """Longest input, special tokens included."""
    first_position: int
    """The position of the first token: RoBERTa counts from the padding's id plus one."""
    pooling: PoolingMode = "mean"
    normalized: bool = False
    """Whether the pipeline ends with a normalization."""
    matryoshka: Sequence[int] = ()
    """Lengths that vectors may be cut to, least first."""
    labels: tuple[str, ...] | None = None
    """Classes of a classifier, or the one score of a cross-encoder; None: it makes vectors."""
    squash: Squash = "none"

    @property
    def operations(self) -> tuple[str, ...]:
        """In words of ``Operation``."""
        if self.labels is None:
            return Operation.EMBED, Operation.TOKEN_EMBED
        if len(self.labels) == 1:
            return Operation.SCORE, Operation.CLASSIFY
        return (Operation.CLASSIFY,)


def read_facts(path: Path, matryoshka: Sequence[int] = ()) -> ModelFacts:
    """The facts of the model in a directory. Raises ConfigError.

    ``matryoshka``: lengths that vectors may be cut to, whatever config.json says.
    """
    if path.is_file():
        raise ConfigError(["expected a Hugging Face directory, not a GGUF file"], str(path))
    config = _read(path / "config.json")
    family = config.get("model_type", "")
    if family not in _FAMILIES:
        known = ", ".join(_FAMILIES)
        problem = f"model_type {family!r} is not supported: expected one of {known}; try kind: vllm"
        raise ConfigError([problem], str(path / "config.json"))
    try:
        facts = _of_config(config, family, path)
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError([f"wrong or missing: {error}"], str(path / "config.json")) from error
    if facts.labels is None:
        facts = _with_modules(facts, path)
        declared = config.get("matryoshka_dimensions") or ()
        cut = sorted({*matryoshka, *declared})
        if cut and cut[-1] > facts.hidden_size:
            problem = f"matryoshka_dimensions: {cut[-1]} is more than the {facts.hidden_size} of it"
            raise ConfigError([problem], str(path))
        facts = evolve(facts, matryoshka=tuple(cut))
    return facts


def _of_config(config: dict[str, Any], family: str, path: Path) -> ModelFacts:
    """Raises KeyError, TypeError and ValueError for wrong values."""
    if config.get("position_embedding_type", "absolute") != "absolute":
        raise ValueError(f"position_embedding_type: only absolute, got {config!r:.60}")
    if config.get("is_decoder"):
        raise ValueError("is_decoder: a decoder is no encoder")
    activation = config["hidden_act"]
    if activation not in _ACTIVATIONS:
        raise ValueError(f"hidden_act: expected one of {', '.join(_ACTIVATIONS)}")
    first = 0 if family == "bert" else int(config["pad_token_id"]) + 1
    longest = int(config["max_position_embeddings"]) - first
    short = _read(path / "sentence_bert_config.json", optional=True).get("max_seq_length")
    names = config.get("architectures") or [""]
    labels: tuple[str, ...] | None = None
    squash: Squash = "none"
    if names[0].endswith("ForSequenceClassification"):
        by_id = {int(one): str(name) for one, name in config.get("id2label", {}).items()}
        count = len(by_id) or int(config.get("num_labels", 2))
        labels = tuple(by_id.get(one, f"LABEL_{one}") for one in range(count))
        squash = _squash(config, count)
    return ModelFacts(
        family=family,
        hidden_size=int(config["hidden_size"]),
        layers=int(config["num_hidden_layers"]),
        heads=int(config["num_attention_heads"]),
        activation=activation,
        norm_epsilon=float(config["layer_norm_eps"]),
        max_tokens=min(longest, int(short)) if short else longest,
        first_position=first,
        labels=labels,
        squash=squash,
    )


def _squash(config: dict[str, Any], labels: int) -> Squash:
    """As sentence-transformers and transformers do: what the file names, else by the kind."""
    named = config.get("sentence_transformers", {}).get("activation_fn")
    named = named or config.get("sbert_ce_default_activation_function")
    if named is not None:
        for end, squash in _NAMED_SQUASHES:
            if str(named).endswith(end):
                return squash
        raise ValueError(f"activation_fn {named!r:.80} is not supported")
    if labels == 1 or config.get("problem_type") == "multi_label_classification":
        return "sigmoid"
    return "softmax"


_NAMED_SQUASHES: tuple[tuple[str, Squash], ...] = (
    (".Identity", "none"),
    (".Sigmoid", "sigmoid"),
    (".Softmax", "softmax"),
)


def _with_modules(facts: ModelFacts, path: Path) -> ModelFacts:
    """``facts`` with the pooling of modules.json; without that file, the mean of the tokens."""
    for module in _read(path / "modules.json", optional=True, kind=list) or ():
        folder, kind = path / module.get("path", ""), module["type"].rpartition(".")[2]
        match kind:
            case "Transformer":
                pass
            case "Pooling":
                facts = evolve(facts, pooling=_pooling(folder / "config.json"))
            case "Normalize":
                facts = evolve(facts, normalized=True)
            case _:
                problem = f"a module {kind} is not supported: vectors would differ from the model's"
                raise ConfigError([problem], str(path / "modules.json"))
    return facts


def _pooling(file: Path) -> PoolingMode:
    config = _read(file)
    named = config.get("pooling_mode")
    modes = [mode for name, mode in _POOLING if config.get(name) or named == mode]
    others = [
        name for name, on in config.items() if name.startswith("pooling_mode_") and on is True
    ]
    if len(modes) != 1 or len(others) > 1:
        problem = (
            f"expected one of {', '.join(mode for _, mode in _POOLING)}, got {others or named}"
        )
        raise ConfigError([problem], str(file))
    return modes[0]


def _read(file: Path, *, optional: bool = False, kind: type[Any] = dict) -> Any:
    """The JSON of a file, an object unless ``kind`` says otherwise. Raises ConfigError."""
    if optional and not file.is_file():
        return kind()
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError([f"cannot be read: {error}"], str(file)) from error
    if not isinstance(content, kind):
        raise ConfigError([f"expected a JSON {kind.__name__}"], str(file))
    return content
