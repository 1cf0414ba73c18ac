"""Converts GGUF weights to safetensors. Runs in an engine's Python, without Commutator."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any


def main(gguf: Path, directory: Path) -> None:
    """Write the weights, in float32 without loss, and config.json; `--dtype` rounds them later."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(
        str(gguf.parent), gguf_file=gguf.name, dtype=torch.float32
    )
    # Otherwise save_pretrained treats the model as quantized, which it no longer is.
    del model.config.quantization_config
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(directory)
    model.generation_config.save_pretrained(directory)
    # Engines read tied weights under the name of the embedding only.
    tied: set[str] = set()
    if model.config.tie_word_embeddings:
        tied = set(model._tied_weights_keys or ())  # noqa: SLF001 - there is no public name
    weights = {name: value for name, value in model.state_dict().items() if name not in tied}
    save_file(weights, str(directory / "model.safetensors"), metadata={"format": "pt"})


if __name__ == "__main__":
    del sys.path[0]  # this folder: its http.py would shadow Python's
    main(Path(sys.argv[1]), Path(sys.argv[2]))
