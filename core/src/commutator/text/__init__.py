"""Text to tokens and back: a model's tokenizer and chat template, streams of either into other."""

from commutator.text.load import load_text_model
from commutator.text.model import TextModel
from commutator.text.source import locate_model

__all__ = ["TextModel", "load_text_model", "locate_model"]
