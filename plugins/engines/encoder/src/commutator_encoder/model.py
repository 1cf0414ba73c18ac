"""The encoder in PyTorch: tokens of a batch in one sequence, padded for attention alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from attrs import frozen
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional

from commutator.errors import ConfigError
from commutator_encoder.facts import ModelFacts
from commutator_engine_kit.pytorch import threads_for

_ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "gelu": functional.gelu,
    "gelu_new": lambda x: functional.gelu(x, approximate="tanh"),
    "gelu_pytorch_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "relu": functional.relu,
}
_PREFIXES = ("bert.", "roberta.")
_WEIGHTS = "model.safetensors"


@frozen
class _Linear:
    weight: Tensor
    bias: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight, self.bias)


@frozen
class _Norm:
    weight: Tensor
    bias: Tensor
    epsilon: float

    def __call__(self, x: Tensor) -> Tensor:
        return functional.layer_norm(x, self.weight.shape, self.weight, self.bias, self.epsilon)


@frozen
class _Layer:
    qkv: _Linear
    out: _Linear
    after_attention: _Norm
    up: _Linear
    down: _Linear
    after_feed_forward: _Norm


@frozen
class _Head:
    """Logits from the first token's state."""

    dense: _Linear
    out: _Linear

    def __call__(self, first: Tensor) -> Tensor:
        return self.out(torch.tanh(self.dense(first)))


@frozen
class _Attention:
    """Where the tokens of a batch are in its padded form; None: nothing is padded."""

    batch: int
    longest: int
    rows: Tensor | None
    """[batch, longest]: the token of each place; padding has the first one."""
    places: Tensor | None
    """[tokens]: the place of each token in the flattened padded form."""
    mask: Tensor | None
    """[batch, 1, 1, longest]: which places are tokens."""

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device) -> _Attention:
        """For sequences of these lengths, one after another."""
        batch, longest = len(lengths), max(lengths)
        if min(lengths) == longest:
            return cls(batch, longest, None, None, None)
        sizes = torch.tensor(lengths, device=device)
        place = torch.arange(longest, device=device)
        is_token = place < sizes[:, None]
        starts = torch.cumsum(sizes, 0) - sizes
        rows = torch.where(is_token, starts[:, None] + place, 0)
        return cls(
            batch, longest, rows, is_token.flatten().nonzero()[:, 0], is_token[:, None, None, :]
        )

    def __call__(self, qkv: Tensor, heads: int) -> Tensor:
        """[tokens, 3 x hidden] to [tokens, hidden]: each token attends to those of its sequence."""
        hidden = qkv.shape[1] // 3
        padded = qkv if self.rows is None else qkv[self.rows.flatten()]
        parts = padded.view(self.batch, self.longest, 3, heads, hidden // heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        found = functional.scaled_dot_product_attention(query, key, value, attn_mask=self.mask)
        flat = found.transpose(1, 2).reshape(self.batch * self.longest, hidden)
        return flat if self.places is None else flat[self.places]


class Encoder:
    """One model. Used from one thread, whose number of PyTorch's threads it sets."""

    def __init__(
        self, facts: ModelFacts, weights: Mapping[str, Tensor], device: torch.device
    ) -> None:
        """``weights`` by the names of transformers, without the family's prefix.

        Raises KeyError for one that is missing.
        """
        self.facts = facts
        self.device = device
        self._threads = torch.get_num_threads()
        """The most that a batch is computed by."""
        self._act = _ACTIVATIONS[facts.activation]

        def linear(*names: str) -> _Linear:
            return _Linear(
                torch.cat([weights[f"{name}.weight"] for name in names]),
                torch.cat([weights[f"{name}.bias"] for name in names]),
            )

        def norm(name: str) -> _Norm:
            return _Norm(weights[f"{name}.weight"], weights[f"{name}.bias"], facts.norm_epsilon)

        self._words = weights["embeddings.word_embeddings.weight"]
        self._positions = weights["embeddings.position_embeddings.weight"]
        self._types = weights["embeddings.token_type_embeddings.weight"]
        self._norm = norm("embeddings.LayerNorm")
        self._layers = []
        for number in range(facts.layers):
            layer = f"encoder.layer.{number}"
            own = f"{layer}.attention.self"
            self._layers.append(
                _Layer(
                    qkv=linear(f"{own}.query", f"{own}.key", f"{own}.value"),
                    out=linear(f"{layer}.attention.output.dense"),
                    after_attention=norm(f"{layer}.attention.output.LayerNorm"),
                    up=linear(f"{layer}.intermediate.dense"),
                    down=linear(f"{layer}.output.dense"),
                    after_feed_forward=norm(f"{layer}.output.LayerNorm"),
                )
            )
        self.head: _Head | None = None
        """Makes logits, where the model has classes."""
        if facts.labels is not None:
            has_pooler = facts.family == "bert"
            self.head = _Head(
                linear("pooler.dense" if has_pooler else "classifier.dense"),
                linear("classifier" if has_pooler else "classifier.out_proj"),
            )
            if len(self.head.out.bias) != len(facts.labels):
                raise KeyError(f"classifier for {len(facts.labels)} labels")

    @property
    def vocab_size(self) -> int:
        """One more than the largest token id."""
        return len(self._words)

    @torch.inference_mode()
    def __call__(self, sequences: Sequence[Sequence[int]], firsts: Sequence[int]) -> Tensor:
        """The last layer's states of all tokens, [tokens, hidden], one sequence after another.

        Of each sequence the first ``firsts`` tokens have type 0, the others type 1.
        """
        device, lengths = self.device, [len(one) for one in sequences]
        torch.set_num_threads(threads_for(sum(lengths), self._threads))
        ids = torch.tensor([token for one in sequences for token in one], device=device)
        places = [torch.arange(length) for length in lengths]
        positions = torch.cat(places).to(device) + self.facts.first_position
        x = self._words[ids] + self._positions[positions]
        if len(self._types) > 1:
            later = [at >= first for at, first in zip(places, firsts, strict=True)]
            x = x + self._types[torch.cat(later).to(device).long()]
        else:
            x = x + self._types[0]
        x = self._norm(x)
        attention = _Attention.of(lengths, device)
        for layer in self._layers:
            attended = attention(layer.qkv(x), self.facts.heads)
            x = layer.after_attention(layer.out(attended) + x)
            x = layer.after_feed_forward(layer.down(self._act(layer.up(x))) + x)
        return x


@torch.inference_mode()
def pooled(states: Tensor, lengths: Sequence[int], mode: str) -> Tensor:
    """One vector for each sequence, [sequences, hidden]."""
    sizes = torch.tensor(lengths, device=states.device)
    starts = torch.cumsum(sizes, 0) - sizes
    if mode == "cls":
        return states[starts]
    reduce = "max" if mode == "max" else "sum"
    found = torch.segment_reduce(states, reduce, lengths=sizes, axis=0)
    if mode == "mean":
        return found / sizes[:, None]
    return found / sizes[:, None].sqrt() if mode == "mean_sqrt_len" else found


@torch.inference_mode()
def squashed(logits: Tensor, how: str) -> Tensor:
    """Scores or probabilities, [sequences, labels]."""
    if how == "sigmoid":
        return torch.sigmoid(logits)
    return torch.softmax(logits, dim=-1) if how == "softmax" else logits


def load_encoder(
    path: Path, facts: ModelFacts, *, device: torch.device, dtype: torch.dtype
) -> Encoder:
    """Read the weights. Raises ConfigError when they are missing or of another shape."""
    file = path / _WEIGHTS
    if not file.is_file():
        raise ConfigError(["it is missing; save the weights as safetensors"], str(file))
    try:
        weights = {
            _plain(name): tensor.to(device=device, dtype=dtype)
            for name, tensor in load_file(file).items()
            if tensor.is_floating_point()
        }
        return Encoder(facts, weights, device)
    except (KeyError, RuntimeError) as error:
        raise ConfigError([f"no weights of {facts.family}: {error}"], str(file)) from error


def _plain(name: str) -> str:
    for prefix in _PREFIXES:
        name = name.removeprefix(prefix)
    return name.replace("LayerNorm.gamma", "LayerNorm.weight").replace(
        "LayerNorm.beta", "LayerNorm.bias"
    )
