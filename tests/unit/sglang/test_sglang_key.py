"""A launched SGLang server asks for the run's key, which no command line and no line shows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from attrs import evolve

from commutator.config.secrets import hidden_line
from commutator.contract.engine import LaunchContext, ModelConfig
from commutator.errors import ConfigError
from commutator.trust import RunSecret, adopt
from commutator_sglang.config import SglangConfig
from commutator_sglang.launch import launch_plan
from commutator_sglang.plugin import SglangConnector

pytestmark = pytest.mark.security
SECRET = RunSecret.from_text("run")


@pytest.fixture
def context(tmp_path: Path) -> LaunchContext:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    model = ModelConfig(name="m", source=str(tmp_path / "model"))
    return LaunchContext(
        worker_id="sglang-0", model=model, host="127.0.0.1", port=8123, state_dir=tmp_path
    )


@pytest.fixture
def config(tmp_path: Path) -> SglangConfig:
    (tmp_path / "interpreter").touch()
    return SglangConfig(kind="sglang", python=str(tmp_path / "interpreter"))


def test_the_key_comes_from_a_private_file_and_clients_send_it(
    context: LaunchContext, config: SglangConfig, caplog: pytest.LogCaptureFixture
) -> None:
    with adopt(SECRET), caplog.at_level("INFO"):
        plan = launch_plan(config, context)
        client = SglangConnector().connect(config, plan.address)
    file = Path(plan.argv[plan.argv.index("--config") + 1])
    assert file.stat().st_mode & 0o777 == 0o600
    key = yaml.safe_load(file.read_text())["api-key"]
    assert len(key) == 64
    assert client.server._headers["Authorization"] == f"Bearer {key}"  # type: ignore[attr-defined]
    assert key not in " ".join([*plan.argv, *plan.env.values()]) + caplog.text


def test_a_file_of_the_users_own_leaves_no_room_for_the_key_and_a_warning_says_so(
    context: LaunchContext, config: SglangConfig, caplog: pytest.LogCaptureFixture
) -> None:
    with adopt(SECRET):
        plan = launch_plan(evolve(config, args=("--config", "mine.yaml")), context)
        with pytest.raises(ConfigError, match="--api-key"):
            launch_plan(evolve(config, args=("--api-key", "mine")), context)
    assert plan.argv.count("--config") == 1
    assert "cannot give the server an API key" in caplog.text


def test_the_key_is_hidden_in_the_arguments_that_the_server_prints() -> None:
    key = SECRET.mac("p").hex()
    for line in (
        f"server_args={{'host': '127.0.0.1', 'api_key': '{key}', 'seed': 1}}",
        f"ServerArgs(api_key='{key}', seed=1)",
        f"--api-key={key} --seed 1",
    ):
        assert key not in hidden_line(line)
        assert "seed" in hidden_line(line)
    assert hidden_line("capital letters") == "capital letters"


def test_events_are_published_in_the_servers_folder(
    context: LaunchContext, config: SglangConfig
) -> None:
    events = events_of(config, context)
    for endpoint in (events["endpoint"], events["replay_endpoint"]):
        assert Path(endpoint.removeprefix("ipc://")).parent == context.state_dir


@pytest.mark.parametrize(
    "arguments",
    [
        ("--dp-size", "2"),
        ("--attn-dp-size=2",),
        ("--load-publish-endpoint=auto",),
        ("--config", "mine.yaml"),
    ],
)
def test_what_sglang_names_no_sockets_for_is_published_at_loopback_ports(
    context: LaunchContext, config: SglangConfig, arguments: tuple[str, ...]
) -> None:
    events = events_of(evolve(config, args=arguments), context)
    assert events["endpoint"].startswith("tcp://127.0.0.1:")
    assert events["replay_endpoint"].startswith("tcp://127.0.0.1:")


def events_of(config: SglangConfig, context: LaunchContext) -> dict[str, str]:
    plan = launch_plan(config, context)
    found: dict[str, str] = json.loads(plan.argv[plan.argv.index("--kv-events-config") + 1])
    return found
