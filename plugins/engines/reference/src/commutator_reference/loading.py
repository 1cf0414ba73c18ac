"""From a model's path to a model that is ready to run."""

from __future__ import annotations

from pathlib import Path

import torch

from commutator_reference.gguf_weights import open_gguf
from commutator_reference.hf_weights import open_hf
from commutator_reference.model import LlamaModel
from commutator_reference.weights import build_weights

__all__ = ["load_model"]


def load_model(
    path: Path,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> LlamaModel:
    """The model of a GGUF file or a Hugging Face directory (what ``locate_model`` finds).

    Raises ConfigError when it is no Llama model, or one with an option this engine lacks.
    """
    config, source = open_hf(path) if path.is_dir() else open_gguf(path)
    weights = build_weights(config, source, device=torch.device(device), dtype=dtype)
    return LlamaModel(config, weights)
