"""What tells one served model from another, for the identity of its KV blocks.

For connectors whose engines read Hugging Face's directories.
"""

from __future__ import annotations

from typing import Any

from attrs import frozen

from commutator.engine.weights_revision import weights_revision

__all__ = ["ModelWords", "model_facts", "model_words"]

_OF_THE_MACHINE = {"_name_or_path", "transformers_version"}
"""Entries of a model's configuration that change no byte of its blocks."""


@frozen
class ModelWords:
    """Two parts of a ``CacheIdentity``."""

    weights: str
    tokenizer: str


def model_words(
    model: str, revision: str | None, tokenizer: str | None, *, random_seed: int | None = None
) -> ModelWords:
    """``random_seed``: of weights that are no file's (`--load-format dummy`).

    Reads every byte of the weights, as ``weights_revision`` does.
    """
    weights = weights_revision(model, revision)
    if random_seed is not None:
        weights += f" random by {random_seed}"
    own = tokenizer is not None and tokenizer != model
    return ModelWords(weights, f"{weights} {tokenizer}" if own else weights)


def model_facts(config: Any) -> dict[str, Any]:
    """Of a `transformers` configuration, what may change the bytes of a block."""
    return {name: value for name, value in config.to_dict().items() if name not in _OF_THE_MACHINE}
