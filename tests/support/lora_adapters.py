"""A tiny Llama model of transformers with LoRA adapters of PEFT, in folders."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
ADAPTERS: dict[str, dict[str, Any]] = {
    "all": {"r": 4, "lora_alpha": 8, "target_modules": list(_PROJECTIONS)},
    "attention": {"r": 2, "lora_alpha": 4, "target_modules": ["q_proj", "v_proj"]},
    "stable": {
        "r": 8,
        "lora_alpha": 8,
        "use_rslora": True,
        "target_modules": ["o_proj", "up_proj", "down_proj"],
    },
}
"""By name, what PEFT's ``LoraConfig`` gets: every projection, some, and another scale."""


def make_base(folder: Path, seed: int = 0) -> Path:
    """The model's folder."""
    import transformers

    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=97,
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=512,
        eos_token_id=2,
    )
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(0, 0.3)
    model.save_pretrained(folder)
    return folder


def make_adapter(base: Path, folder: Path, options: dict[str, Any], seed: int = 1) -> Path:
    """An adapter of the model in ``base``, that changes it much."""
    import peft

    torch.manual_seed(seed)
    model = peft.get_peft_model(_model(base), peft.LoraConfig(task_type="CAUSAL_LM", **options))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_" in name:
                weight.normal_(0, 0.3)
    model.save_pretrained(str(folder))
    return folder


def expected_logits(base: Path, adapter: Path | None, prompts: Sequence[Sequence[int]]) -> Any:
    """What PEFT computes for the last token of each prompt; [prompts, vocabulary]."""
    import peft

    model = _model(base)
    if adapter is not None:
        model = peft.PeftModel.from_pretrained(model, str(adapter))
    model.eval()
    with torch.inference_mode():
        return torch.stack([model(torch.tensor([list(p)])).logits[0, -1] for p in prompts])


def _model(base: Path) -> Any:
    import transformers

    return transformers.LlamaForCausalLM.from_pretrained(base, dtype=torch.float32)


def write_adapter(folder: Path, seed: int, *, strength: float = 0.05) -> Path:
    """An adapter of SmolLM2-135M, of random numbers, without PEFT."""
    from safetensors.torch import save_file

    rank, hidden, layers, parts = 8, 576, 30, {"q": 576, "v": 192}
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(layers):
        for part, size in parts.items():
            name = f"base_model.model.model.layers.{layer}.self_attn.{part}_proj.lora_"
            down = torch.randn(rank, hidden, generator=generator)
            tensors[f"{name}A.weight"] = down * strength
            tensors[f"{name}B.weight"] = torch.randn(size, rank, generator=generator) * strength
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    modules = [f"{part}_proj" for part in parts]
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 32, "target_modules": modules}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder
