"""Rotary position embedding: frequencies and their use, in Hugging Face's half-split order."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from commutator_reference.llama_config import LinearRopeScaling, Llama3RopeScaling, LlamaConfig

__all__ = ["rope_frequencies", "rope_tables", "rotate_"]


def rope_frequencies(config: LlamaConfig) -> Tensor:
    """Radians a position, [head_size / 2], float32: theta ** (-2i / head_size), then scaled."""
    exponents = torch.arange(0, config.head_size, 2, dtype=torch.float32) / config.head_size
    frequencies = 1.0 / config.rope_theta**exponents
    match config.rope_scaling:
        case None:
            return frequencies
        case LinearRopeScaling(factor):
            return frequencies / factor
        case Llama3RopeScaling() as scaling:
            return _scaled_as_llama3(frequencies, scaling)


def _scaled_as_llama3(frequencies: Tensor, scaling: Llama3RopeScaling) -> Tensor:
    """The scaling of Llama 3.1's reference implementation.

    With r = original context length / wavelength: frequencies of r >= high are kept, those of
    r <= low are divided by the factor, and between the two the share kept grows linearly with r.
    """
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    turns = scaling.original_context_length * frequencies / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return kept * frequencies + (1.0 - kept) * frequencies / scaling.factor


def rope_tables(
    frequencies: Tensor, positions: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Cosines and signed sines, each [tokens, 1, head_size], for ``rotate_``."""
    angles = positions[:, None].to(torch.float32) * frequencies
    cos, sin = angles.cos(), angles.sin()
    cosines = torch.cat((cos, cos), dim=-1)
    signed_sines = torch.cat((-sin, sin), dim=-1)
    return cosines[:, None].to(dtype), signed_sines[:, None].to(dtype)


def rotate_(heads: Tensor, cosines: Tensor, signed_sines: Tensor) -> None:
    """Rotate ``heads`` [tokens, heads, head_size] in place.

    Each pair (x[i], x[i + size/2]) turns by its angle; rolling by half brings partners together.
    """
    partners = heads.roll(heads.shape[-1] // 2, dims=-1)
    heads.mul_(cosines).addcmul_(partners, signed_sines)
