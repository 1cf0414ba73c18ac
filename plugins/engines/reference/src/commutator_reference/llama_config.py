"""The numbers that define one Llama-family model."""

from __future__ import annotations

from attrs import frozen

from commutator.errors import ConfigError

__all__ = ["LinearRopeScaling", "Llama3RopeScaling", "LlamaConfig", "RopeScaling"]


@frozen
class LinearRopeScaling:
    """Every rotary frequency divided by ``factor``."""

    factor: float


@frozen
class Llama3RopeScaling:
    """Low rotary frequencies divided by ``factor``, high ones kept, a ramp between (Llama 3.1)."""

    factor: float
    low_frequency_factor: float
    high_frequency_factor: float
    original_context_length: int


RopeScaling = LinearRopeScaling | Llama3RopeScaling


@frozen(kw_only=True)
class LlamaConfig:
    """Shapes and constants of a model; the names are the usual ones of model cards."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    context_length: int
    """Most tokens the model was made for, prompt and answer together."""
    norm_epsilon: float
    rope_theta: float
    rope_scaling: RopeScaling | None = None
    tied_embeddings: bool = False
    """Whether the output projection is the input embedding."""
    eos_token_ids: tuple[int, ...] = ()

    def __attrs_post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                [f"{self.num_heads} attention heads cannot share {self.num_kv_heads} KV heads"],
                "model",
            )
        if self.head_size % 2:
            raise ConfigError([f"the head size must be even, not {self.head_size}"], "model")

    @property
    def group_size(self) -> int:
        """Query heads that share one KV head."""
        return self.num_heads // self.num_kv_heads
