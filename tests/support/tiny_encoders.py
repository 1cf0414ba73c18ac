"""Encoders with few random weights, as transformers writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from tokenizers.decoders import WordPiece

__all__ = ["VOCAB_SIZE", "write_encoder", "write_tokenizer"]

VOCAB_SIZE = 60
_WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def write_encoder(
    folder: Path,
    family: str,
    *,
    labels: int | None = None,
    pooling: str = "mean_tokens",
    normalized: bool = True,
    **config: Any,
) -> Any:
    """Save a model, its tokenizer and its modules in ``folder``; returns it.

    With ``labels`` it is a classifier, or for 1 a cross-encoder.
    """
    import torch
    import transformers

    torch.manual_seed(7)
    sizes = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "intermediate_size": 40,
        "max_position_embeddings": 66,
        "initializer_range": 0.4,
    }
    auto: Any = transformers
    made_config = auto.AutoConfig.for_model(family, **{**sizes, **config})
    if labels is None:
        model = auto.AutoModel.from_config(made_config)
    else:
        made_config.num_labels = labels
        model = auto.AutoModelForSequenceClassification.from_config(made_config)
    model = model.eval()
    model.save_pretrained(folder)
    write_tokenizer(folder, second_type=1 if family == "bert" else 0)
    if labels is None:
        modules = [
            {"idx": 0, "path": "", "type": "sentence_transformers.models.Transformer"},
            {"idx": 1, "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
        ]
        if normalized:
            modules.append({"path": "2", "type": "sentence_transformers.models.Normalize"})
        (folder / "modules.json").write_text(json.dumps(modules))
        (folder / "1_Pooling").mkdir(exist_ok=True)
        (folder / "1_Pooling" / "config.json").write_text(
            json.dumps({f"pooling_mode_{pooling}": True})
        )
    return model


def write_tokenizer(folder: Path, *, second_type: int = 1) -> None:
    """Save a tokenizer of word pieces: its words are w0, w1, ..."""
    words = [*_WORDS, *(f"w{number}" for number in range(VOCAB_SIZE - len(_WORDS)))]
    word_pieces: Any = models.WordPiece  # its stubs know no arguments
    vocab = {word: token_id for token_id, word in enumerate(words)}
    tokenizer = Tokenizer(word_pieces(vocab=vocab, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = WordPiece()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS]:0 $A:0 [SEP]:0",
        pair=f"[CLS]:0 $A:0 [SEP]:0 $B:{second_type} [SEP]:{second_type}",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    tokenizer.save(str(folder / "tokenizer.json"))
