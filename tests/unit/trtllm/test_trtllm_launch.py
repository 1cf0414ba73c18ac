"""The command lines of a sidecar and its server, and the options that make them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from attrs import evolve
from tests.support.trtllm.published import connector

from commutator.config.load import load_config
from commutator.contract.engine import LaunchContext, ModelConfig
from commutator.errors import ConfigError
from commutator_dram.tier import DramConfig
from commutator_engine_kit.kv.tiers.setup import read_tiers
from commutator_trtllm import launch
from commutator_trtllm.config import TrtllmConfig
from commutator_trtllm.launch import launch_plan, server_command
from commutator_trtllm.options import read_options
from commutator_trtllm.plugin import TrtllmConnector
from commutator_trtllm.sidecar import SidecarOptions

CONFIG = TrtllmConfig(kind="trtllm", command=(sys.executable, "serve.py"))


@pytest.fixture
def context(tmp_path: Path) -> LaunchContext:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    model = ModelConfig(name="m", source=str(tmp_path / "model"), max_model_len=512)
    return LaunchContext(
        worker_id="trtllm-1", model=model, host="127.0.0.1", port=8123, state_dir=tmp_path
    )


def test_what_is_missing_is_found_before_a_start(
    context: LaunchContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "gpu_memory_bytes", lambda: ())

    def found(config: TrtllmConfig, **model: Any) -> list[str]:
        return list(TrtllmConnector().problems(config, evolve(context.model, **model), ()))

    assert found(CONFIG) == [], "another program may need no GPU"
    told = found(evolve(CONFIG, command=("no-such-serve",), args=("--host=x",)), max_model_len=None)
    assert [line.partition(":")[0] for line in told] == ["model", "command", "args"]
    program = tmp_path / "trtllm-serve"
    program.touch(mode=0o755)
    (no_gpu,) = found(evolve(CONFIG, command=(str(program),)))
    assert no_gpu.startswith("command: TensorRT-LLM needs an NVIDIA GPU, and this machine has none")
    assert found(TrtllmConfig(kind="trtllm", url="http://h:1")) == []


def value_of(arguments: tuple[str, ...], name: str) -> str:
    return arguments[arguments.index(name) + 1]


def test_the_sidecar_starts_the_server(context: LaunchContext) -> None:
    config = evolve(CONFIG, role="prefill", args=("--tp_size=2",), env={"A": "b"}, gpus=(4, 5))
    plan = launch_plan(config, evolve(context, devices=(4, 5)))
    assert plan.address == "http://127.0.0.1:8123"
    assert plan.env == {"A": "b", "CUDA_VISIBLE_DEVICES": "4,5"}
    options, server = msgspec.json.decode(plan.argv[3], type=SidecarOptions), plan.argv[4:]
    assert server[:3] == (*CONFIG.command, context.model.source)
    assert value_of(server, "--max_seq_len") == "512"
    assert server[-1] == "--tp_size=2"
    assert options.url == f"http://127.0.0.1:{value_of(server, '--port')}"
    assert (options.port, options.max_model_len, options.hands_over) == (8123, 512, True)
    written = yaml.safe_load(Path(value_of(server, "--extra_llm_api_options")).read_text())
    assert written["disable_overlap_scheduler"] is True
    assert written["cache_transceiver_config"]["max_tokens_in_buffer"] == 512


def test_a_server_that_runs_gets_a_sidecar_only(context: LaunchContext) -> None:
    config = TrtllmConfig(kind="trtllm", url="http://10.0.0.7:8000/", kv_events=False)
    plan = launch_plan(config, context)
    options = msgspec.json.decode(plan.argv[3], type=SidecarOptions)
    assert len(plan.argv) == 4
    assert options.url == "http://10.0.0.7:8000"
    assert not options.kv_events
    assert not options.hands_over


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"args": ("--port=1",)}, "--port is set by Commutator"),
        ({"args": ("--config", "f")}, "set `options`"),
        ({"args": ("--max_seq_len", "9")}, "max_model_len"),
    ],
)
def test_what_cannot_be(context: LaunchContext, changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        server_command(evolve(CONFIG, **changes), context, 1)


def test_without_tensorrt_llm_nothing_is_started(context: LaunchContext, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"command: no-such-serve was not found; install TensorRT-LLM"
    ):
        launch_plan(evolve(CONFIG, command=("no-such-serve",)), context)
    with pytest.raises(ConfigError, match="trtllm-serve was not found"):
        launch_plan(TrtllmConfig(kind="trtllm", env={"PATH": str(tmp_path)}), context)
    program = tmp_path / "trtllm-serve"
    program.touch(mode=0o755)
    launch_plan(TrtllmConfig(kind="trtllm", env={"PATH": str(tmp_path)}), context)


def test_the_model_must_be_known_and_be_readable(context: LaunchContext, tmp_path: Path) -> None:
    without = evolve(context, model=evolve(context.model, max_model_len=None))
    with pytest.raises(ConfigError, match="needs max_model_len"):
        launch_plan(CONFIG, without)
    file = tmp_path / "m.gguf"
    file.touch()
    gguf = evolve(context, model=evolve(context.model, source=str(file)))
    with pytest.raises(ConfigError, match="checkpoint"):
        launch_plan(CONFIG, gguf)
    command = server_command(evolve(CONFIG, checkpoint="org/name"), gguf, 1)
    assert command[2] == "org/name"
    with pytest.raises(ConfigError, match="replicas"):
        launch_plan(TrtllmConfig(kind="trtllm", url="http://h:1", replicas=2), context)


@pytest.mark.parametrize(
    ("entry", "problem"),
    [
        ("url: 10.0.0.7", "expected http://HOST:PORT"),
        ("url: http://h:1\n    args: [--a]", "args: without effect with `url`"),
        ("url: http://h:1\n    options: {a: 1}", "options: without effect with `url`"),
        ("hands_over: true", "hands_over: only with `url`"),
        ("gpus: [1, 2, 3]\n    replicas: 2", "cannot be shared by 2"),
        ("command: []", "expected the program"),
    ],
)
def test_mistakes_are_reported(tmp_path: Path, entry: str, problem: str) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(f"models: [{{name: m, source: x}}]\nengines:\n  - kind: trtllm\n    {entry}\n")
    with pytest.raises(ConfigError) as wrong:
        load_config([file])
    assert problem in str(wrong.value)


def with_tiers(context: LaunchContext) -> LaunchContext:
    tier = DramConfig(kind="dram", capacity=1 << 20)
    return evolve(context, tiers=(tier,))


def test_tiers_are_handed_to_the_connector(context: LaunchContext) -> None:
    config = evolve(CONFIG, env={"TLLM_COMMUTATOR_WAIT_S": "0.2"})
    plan = launch_plan(config, with_tiers(context))
    server = plan.argv[4:]
    written = yaml.safe_load(Path(value_of(server, "--extra_llm_api_options")).read_text())
    assert written["kv_cache_config"]["enable_partial_reuse"] is False
    assert written["kv_cache_config"]["enable_block_reuse"] is True
    assert written["kv_connector_config"]["connector_module"] == connector.__name__
    for name in ("connector_scheduler_class", "connector_worker_class"):
        assert hasattr(connector, written["kv_connector_config"][name])
    options = read_options(plan.env)
    assert (options.worker, options.wait_s) == ("trtllm-1", 0.2)
    (setup,) = read_tiers(options.tiers, options.worker)
    assert setup.name == "dram"


def test_without_tiers_there_is_no_connector(context: LaunchContext) -> None:
    plan = launch_plan(CONFIG, context)
    server = plan.argv[4:]
    written = yaml.safe_load(Path(value_of(server, "--extra_llm_api_options")).read_text())
    assert "kv_connector_config" not in written
    assert plan.env == {}


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"role": "prefill"}, "hands over KV"),
        ({"options": {"cache_transceiver_config": {"backend": "UCX"}}}, "hands over KV"),
        (
            {"options": {"kv_connector_config": {"connector": "lmcache"}}},
            "already set a kv_connector_config",
        ),
    ],
)
def test_tiers_that_would_be_ignored_are_refused(
    context: LaunchContext, changes: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        launch_plan(evolve(CONFIG, **changes), with_tiers(context))


def test_a_server_that_runs_keeps_its_own_tiers(
    context: LaunchContext, caplog: pytest.LogCaptureFixture
) -> None:
    attached = TrtllmConfig(kind="trtllm", url="http://h:1")
    assert launch_plan(attached, with_tiers(context)).env == {}
    assert "are not used" in caplog.text


def test_which_workers_take_part_in_hand_overs() -> None:
    connector = TrtllmConnector()
    for config in (
        evolve(CONFIG, role="decode"),
        TrtllmConfig(kind="trtllm", url="http://h:1", hands_over=True),
        evolve(CONFIG, options={"cache_transceiver_config": {"backend": "UCX"}}),
    ):
        assert connector.handover_style(config) is not None
    assert connector.handover_style(CONFIG) is None
    assert connector.handover_style(TrtllmConfig(kind="trtllm", url="http://h:1")) is None
