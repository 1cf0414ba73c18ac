"""Text to tokens and back: a model's tokenizer, chat template and incremental detokenizer."""

from __future__ import annotations

from commutator.tokenizer.gguf import GgufTensor, read_gguf, read_gguf_metadata, tokenizer_from_gguf
from commutator.tokenizer.load import is_model_name, load_text_model, locate_model
from commutator.tokenizer.prompt_cache import PromptTokens
from commutator.tokenizer.text_model import TextModel

__all__ = [
    "GgufTensor",
    "PromptTokens",
    "TextModel",
    "is_model_name",
    "load_text_model",
    "locate_model",
    "read_gguf",
    "read_gguf_metadata",
    "tokenizer_from_gguf",
]
