"""Text to tokens and back: a model's tokenizer and chat template, streams of either into other."""

from commutator.text.gguf_metadata import read_gguf_metadata
from commutator.text.gguf_tokenizer import tokenizer_from_gguf
from commutator.text.load import load_text_model
from commutator.text.model import TextModel
from commutator.text.source import locate_model

__all__ = [
    "TextModel",
    "load_text_model",
    "locate_model",
    "read_gguf_metadata",
    "tokenizer_from_gguf",
]
