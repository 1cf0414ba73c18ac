"""Loads a model's text side from a Hugging Face directory."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from commutator.errors import ConfigError
from commutator.tokenizer.text_model import TextModel

__all__ = [
    "load_huggingface",
]

_NAMED = ("bos_token", "eos_token", "unk_token", "pad_token")


def load_huggingface(directory: Path) -> TextModel:
    """Read tokenizer.json, config.json and, if they exist, three other files.

    These are tokenizer_config.json, generation_config.json and chat_template.jinja. Raises
    ConfigError naming the file at fault.
    """
    tokenizer_file = directory / "tokenizer.json"
    if not tokenizer_file.is_file():
        raise ConfigError(
            ["it is missing; save it with transformers: tokenizer.save_pretrained(directory)"],
            str(tokenizer_file),
        )
    try:
        tokenizer = Tokenizer.from_file(str(tokenizer_file))
    except Exception as error:  # the library raises nothing more precise
        raise ConfigError([f"not a readable tokenizer: {error}"], str(tokenizer_file)) from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    config = _read(directory / "config.json")
    tokenizer_config = _read(directory / "tokenizer_config.json")
    generation_config = _read(directory / "generation_config.json")
    special_tokens = {
        name: _token_text(tokenizer_config[name]) for name in _NAMED if tokenizer_config.get(name)
    }
    eos_ids = {
        *_ids(generation_config.get("eos_token_id", config.get("eos_token_id"))),
        *_ids(tokenizer.token_to_id(special_tokens.get("eos_token", ""))),
    }
    bos_id = config.get("bos_token_id")
    if "bos_token" in special_tokens:
        bos_id = tokenizer.token_to_id(special_tokens["bos_token"])
    return TextModel(
        tokenizer,
        max_model_len=_max_model_len(config, directory),
        eos_ids=frozenset(eos_ids),
        bos_id=bos_id,
        chat_template=_chat_template(directory, tokenizer_config),
        special_tokens=special_tokens,
    )


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError([f"not JSON: {error}"], str(path)) from error
    if not isinstance(content, dict):
        raise ConfigError(["expected a JSON object"], str(path))
    return content


def _token_text(token: str | Mapping[str, Any]) -> str:
    return token if isinstance(token, str) else str(token["content"])


def _ids(value: int | Iterable[int] | None) -> list[int]:
    if value is None:
        return []
    return [value] if isinstance(value, int) else list(value)


def _max_model_len(config: Mapping[str, Any], directory: Path) -> int:
    # Multimodal models nest the settings of the language model in text_config.
    length = config.get("max_position_embeddings") or config.get("text_config", {}).get(
        "max_position_embeddings"
    )
    if not isinstance(length, int):
        raise ConfigError(["max_position_embeddings is missing"], str(directory / "config.json"))
    return length


def _chat_template(directory: Path, tokenizer_config: Mapping[str, Any]) -> str | None:
    file = directory / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = tokenizer_config.get("chat_template")
    if isinstance(template, list):  # several named ones
        by_name = {entry["name"]: entry["template"] for entry in template}
        template = by_name.get("default")
    return template
