"""Models out of Hugging Face directories and GGUF files, compared with transformers and gguf."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, quantize
from transformers import LlamaConfig as HfConfig
from transformers import LlamaForCausalLM

from commutator.errors import ConfigError
from commutator.tokenizer import read_gguf
from commutator_reference.arena import KVArena
from commutator_reference.llama import Llama3RopeScaling
from commutator_reference.model import LlamaModel, build_batch, load_model
from commutator_reference.scheduler import Chunk
from commutator_reference.weights import read_gguf_tensor

IDS = [(i * i + 3) % 120 for i in range(80)]
SHAPE: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "eos_token_id": 7,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


def hf_model(**options: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(HfConfig(**{**SHAPE, **options}))


def ours(model: LlamaModel) -> torch.Tensor:
    """Logits after the last of IDS."""
    arena = KVArena(model.config, 1, len(IDS), device=model.device, dtype=model.dtype)
    chunk = Chunk(0, tuple(IDS), 0, (0,), samples=True)
    return model.forward(build_batch([chunk], arena, model.dtype), arena)[0]


def theirs(model: LlamaForCausalLM) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([IDS])).logits[0, -1]
    return logits


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"tie_word_embeddings": True},
        {"head_dim": 16},
        {"num_key_value_heads": 4},
        {"rope_parameters": LLAMA3},
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}},
    ],
    ids=["plain", "tied", "wide heads", "no groups", "llama3 rope", "linear rope"],
)
@pytest.mark.parametrize("shard_size", ["1GB", "20KB"], ids=["one file", "sharded"])
def test_a_directory_gives_the_logits_of_transformers(
    tmp_path: Path, options: dict[str, Any], shard_size: str
) -> None:
    reference = hf_model(**options)
    reference.save_pretrained(tmp_path, max_shard_size=shard_size)
    assert (tmp_path / "model.safetensors.index.json").exists() == (shard_size == "20KB")
    torch.testing.assert_close(ours(load_model(tmp_path)), theirs(reference), atol=2e-5, rtol=1e-4)


def rewrite_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    raw = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in raw.items() if value != "absent"}))


def test_the_older_spelling_of_rope_scaling_is_read(tmp_path: Path) -> None:
    reference = hf_model(rope_parameters=LLAMA3)
    reference.save_pretrained(tmp_path)
    old = {key: value for key, value in LLAMA3.items() if key != "rope_theta"}
    rewrite_config(tmp_path, rope_parameters="absent", rope_scaling=old, rope_theta=500.0)
    model = load_model(tmp_path)
    assert model.config.rope_theta == 500.0
    assert model.config.rope_scaling == Llama3RopeScaling(8.0, 1.0, 4.0, 16)
    torch.testing.assert_close(ours(model), theirs(reference), atol=2e-5, rtol=1e-4)


def test_every_end_of_sequence_token_is_known(tmp_path: Path) -> None:
    hf_model().save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [9, 7]}')
    assert load_model(tmp_path).config.eos_token_ids == (7, 9)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "qwen2"}, 'model_type is "qwen2"'),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"rope_parameters": {"rope_type": "yarn"}}, '"yarn" is unknown'),
        ({"rms_norm_eps": "absent"}, "has no 'rms_norm_eps'"),
        ({"intermediate_size": 64}, r"the shape \(48, 32\), the configuration says \(64, 32\)"),
        ({"num_hidden_layers": 3}, '"model.layers.2.self_attn.q_proj.weight" is missing'),
        ({"num_key_value_heads": 3}, "4 attention heads cannot share 3"),
    ],
)
def test_what_cannot_be_computed_is_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    hf_model().save_pretrained(tmp_path)
    rewrite_config(tmp_path, **changes)
    with pytest.raises(ConfigError, match=message):
        load_model(tmp_path)


def test_a_directory_without_weights_is_refused(tmp_path: Path) -> None:
    hf_model().save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"expected model\.safetensors"):
        load_model(tmp_path)


def write_gguf(path: Path, model: LlamaForCausalLM, **metadata: Any) -> None:
    """The model as llama.cpp's converter lays it out: names, and rotary partners side by side."""
    config = model.config
    writer = GGUFWriter(path, metadata.pop("architecture", "llama"))
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads or config.num_attention_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_token_list([f"token {i}" for i in range(config.vocab_size)] + ["x"] * 1000)
    writer.add_vocab_size(config.vocab_size)
    writer.add_eos_token_id(7)
    for key, value in metadata.items():
        writer.add_key_value(key.replace("__", "."), *value)
    names = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
        "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm", "model.layers.": "blk.",
    }  # fmt: skip
    for hf_name, tensor in model.state_dict().items():
        name, array = hf_name, tensor.numpy()
        for heads, part in ((config.num_attention_heads, "q_proj"), (config.num_key_value_heads, "k_proj")):  # fmt: skip  # noqa: E501
            if part in name:
                halves = array.reshape(heads, 2, -1, array.shape[1])
                array = halves.swapaxes(1, 2).reshape(array.shape)
        for old, new in names.items():
            name = name.replace(old, new)
        writer.add_tensor(name, np.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_gguf_file_gives_the_logits_of_transformers(tmp_path: Path) -> None:
    reference = hf_model()
    write_gguf(tmp_path / "m.gguf", reference)
    model = load_model(tmp_path / "m.gguf")
    assert model.config.eos_token_ids == (7,)
    assert not model.config.tied_embeddings
    torch.testing.assert_close(ours(model), theirs(reference), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_1"])
def test_every_kind_of_tensor_is_read_as_the_gguf_package_reads_it(
    tmp_path: Path, kind: str
) -> None:
    path, wanted = tmp_path / "t.gguf", GGMLQuantizationType[kind]
    values = np.random.default_rng(0).normal(size=(5, 64)).astype(np.float32)
    writer = GGUFWriter(path, "llama")
    writer.add_array("short", [1, 2, 3])
    writer.add_array("numbers", list(range(2000)))
    writer.add_array("words", ["word"] * 2000)
    writer.add_float64("half", 0.5)
    if kind == "F16":
        writer.add_tensor("t", values.astype(np.float16))
    else:
        writer.add_tensor("t", quantize(values, wanted), raw_dtype=wanted)
    writer.add_tensor("u", np.arange(6, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    metadata, tensors = read_gguf(path)
    reader = GGUFReader(path)
    assert {name: (entry.kind, entry.offset) for name, entry in tensors.items()} == {
        tensor.name: (tensor.tensor_type, tensor.data_offset) for tensor in reader.tensors
    }
    assert metadata["short"] == [1, 2, 3]
    assert metadata["words"] == ["word"] * 2000
    assert metadata["half"] == 0.5
    data = np.memmap(path, np.uint8, "r")
    tolerance = {"F32": 0.0, "F16": 1e-3, "BF16": 1e-2, "Q8_0": 0.05}.get(kind, 0.5)
    assert read_gguf_tensor(data, tensors["t"]) == pytest.approx(
        values, abs=tolerance, rel=tolerance
    )
    assert read_gguf_tensor(data, tensors["u"]).tolist() == list(range(6))


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"architecture": "qwen2"}, 'the architecture is "qwen2"'),
        ({"llama__expert_count": (8, GGUFValueType.UINT32)}, "mixture of experts"),
        ({"llama__rope__dimension_count": (4, GGUFValueType.UINT32)}, "only part of each head"),
        ({"llama__rope__scaling__type": ("yarn", GGUFValueType.STRING)}, '"yarn" is unknown'),
    ],
)
def test_gguf_files_that_cannot_be_computed_are_refused(
    tmp_path: Path, metadata: dict[str, Any], message: str
) -> None:
    write_gguf(tmp_path / "m.gguf", hf_model(), **metadata)
    with pytest.raises(ConfigError, match=message):
        load_model(tmp_path / "m.gguf")


@pytest.mark.parametrize("keep", [0, 3, 20, 400])
def test_damaged_gguf_files_are_refused(tmp_path: Path, keep: int) -> None:
    write_gguf(tmp_path / "m.gguf", hf_model())
    path = tmp_path / "cut.gguf"
    path.write_bytes((tmp_path / "m.gguf").read_bytes()[:keep])
    with pytest.raises(ConfigError, match="not a readable GGUF file"):
        load_model(path)


def test_a_gguf_file_cut_in_its_data_is_refused(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", hf_model())
    path = tmp_path / "cut.gguf"
    path.write_bytes((tmp_path / "m.gguf").read_bytes()[:-64])
    with pytest.raises(ConfigError, match="ends before"):
        load_model(path)


def test_a_quantization_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    path, kind = tmp_path / "t.gguf", GGMLQuantizationType.I16
    writer = GGUFWriter(path, "llama")
    writer.add_tensor("t", np.zeros((2, 8), np.int16), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ValueError, match="I16 cannot be read"):
        read_gguf_tensor(np.memmap(path, np.uint8, "r"), read_gguf(path)[1]["t"])
