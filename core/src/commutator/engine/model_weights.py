"""Run by an engine's Python, where Commutator is not: GGUF weights to a safetensors file."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any


def main(gguf: Path, directory: Path) -> None:
    """Weights in float32, which is exact, and config.json. The engine's `--dtype` rounds them."""
    import torch  # noqa: PLC0415 - only in the engine's environment
    from safetensors.torch import save_file  # noqa: PLC0415
    from transformers import AutoModelForCausalLM  # noqa: PLC0415

    model: Any = AutoModelForCausalLM.from_pretrained(
        str(gguf.parent), gguf_file=gguf.name, dtype=torch.float32
    )
    # Its own save_pretrained takes the model for a quantized one, which it no longer is.
    del model.config.quantization_config
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(directory)
    model.generation_config.save_pretrained(directory)
    # Engines read tied weights under the name of the embedding only.
    tied: set[str] = set()
    if model.config.tie_word_embeddings:
        tied = set(model._tied_weights_keys or ())  # noqa: SLF001 - told nowhere else
    weights = {name: value for name, value in model.state_dict().items() if name not in tied}
    save_file(weights, str(directory / "model.safetensors"), metadata={"format": "pt"})


if __name__ == "__main__":
    del sys.path[0]  # this folder, whose http.py would be taken for Python's own
    main(Path(sys.argv[1]), Path(sys.argv[2]))
