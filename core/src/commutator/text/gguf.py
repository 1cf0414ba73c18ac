"""Loads a model's text side from a GGUF file."""

from __future__ import annotations

from pathlib import Path

from commutator.errors import ConfigError
from commutator.text.gguf_metadata import read_gguf_metadata
from commutator.text.gguf_tokenizer import tokenizer_from_gguf
from commutator.text.model import TextModel

__all__ = ["load_gguf"]

# End of text, of a turn, of a message: each ends an answer.
_EOS_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
_NAMED = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def load_gguf(path: Path) -> TextModel:
    """Raises ConfigError when the file is damaged or its tokenizer is of a kind not supported."""
    metadata = read_gguf_metadata(path)
    try:
        tokens = metadata["tokenizer.ggml.tokens"]
        max_model_len = metadata[f"{metadata['general.architecture']}.context_length"]
        tokenizer = tokenizer_from_gguf(metadata)
    except KeyError as error:
        raise ConfigError([f"the metadata lacks {error}"], str(path)) from error
    ids = {key: metadata.get(f"tokenizer.ggml.{key}") for key in _EOS_KEYS}
    named = {name: metadata.get(f"tokenizer.ggml.{key}_token_id") for name, key in _NAMED.items()}
    return TextModel(
        tokenizer,
        max_model_len=max_model_len,
        eos_ids=frozenset(token_id for token_id in ids.values() if token_id is not None),
        bos_id=metadata.get("tokenizer.ggml.bos_token_id"),
        chat_template=metadata.get("tokenizer.chat_template"),
        special_tokens={
            name: tokens[token_id] for name, token_id in named.items() if token_id is not None
        },
    )
