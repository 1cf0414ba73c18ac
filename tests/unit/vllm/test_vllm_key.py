"""A launched vLLM server asks for the run's key, and publishes KV events in its private folder."""

from __future__ import annotations

import json
import sys
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

from commutator.contract.engine import LaunchContext, ModelConfig
from commutator.errors import ConfigError
from commutator.trust import RunSecret, adopt
from commutator_vllm.config import VllmConfig
from commutator_vllm.key_guard import KeyGuard
from commutator_vllm.launch import launch_plan
from commutator_vllm.plugin import VllmConnector

Message = MutableMapping[str, Any]
SECRET = RunSecret.from_text("run")


@pytest.fixture
def context(tmp_path: Path) -> LaunchContext:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    model = ModelConfig(name="m", source=str(tmp_path / "model"))
    return LaunchContext(
        worker_id="vllm-0", model=model, host="127.0.0.1", port=8123, state_dir=tmp_path
    )


@pytest.fixture
def config(tmp_path: Path) -> VllmConfig:
    (tmp_path / "interpreter").touch()
    return VllmConfig(kind="vllm", python=str(tmp_path / "interpreter"))


@pytest.mark.security
def test_the_server_and_its_clients_share_a_key_that_the_command_line_does_not_show(
    context: LaunchContext, config: VllmConfig, caplog: pytest.LogCaptureFixture
) -> None:
    with adopt(SECRET), caplog.at_level("INFO"):
        plan = launch_plan(config, context)
        client = VllmConnector().connect(config, plan.address)
        elsewhere = VllmConnector().connect(config, "http://127.0.0.1:8124")
    key = plan.env["VLLM_API_KEY"]
    assert len(key) == 64
    assert key not in " ".join(plan.argv) + caplog.text
    assert client.server._headers["Authorization"] == f"Bearer {key}"  # type: ignore[attr-defined]
    assert elsewhere.server._headers != client.server._headers  # type: ignore[attr-defined]
    name = plan.argv[plan.argv.index("--middleware") + 1]
    folder = plan.env["PYTHONPATH"].split(":")[0]
    assert (Path(folder) / f"{name.partition('.')[0]}.py").is_file()


@pytest.mark.security
def test_events_are_published_in_the_workers_folder(
    context: LaunchContext, config: VllmConfig
) -> None:
    plan = launch_plan(config, context)
    events = json.loads(plan.argv[plan.argv.index("--kv-events-config") + 1])
    for endpoint in (events["endpoint"], events["replay_endpoint"]):
        assert Path(endpoint.removeprefix("ipc://")).parent == context.state_dir


@pytest.mark.parametrize("arguments", [("--data-parallel-size", "2"), ("-dp=2",)])
def test_several_ranks_publish_at_ports_as_vllm_names_no_sockets_for_them(
    context: LaunchContext, config: VllmConfig, arguments: tuple[str, ...]
) -> None:
    plan = launch_plan(evolve(config, args=arguments), context)
    events = json.loads(plan.argv[plan.argv.index("--kv-events-config") + 1])
    assert events["endpoint"] == "tcp://*:0"


def test_a_folder_with_too_long_a_name_has_ports_and_a_warning(
    context: LaunchContext, config: VllmConfig, caplog: pytest.LogCaptureFixture
) -> None:
    folder = context.state_dir / ("x" * 100)
    folder.mkdir()
    plan = launch_plan(config, evolve(context, state_dir=folder))
    assert "tcp://" in plan.argv[plan.argv.index("--kv-events-config") + 1]
    assert "shorter name" in caplog.text


def test_a_key_of_ones_own_is_refused(context: LaunchContext, config: VllmConfig) -> None:
    with adopt(SECRET):
        with pytest.raises(ConfigError, match="--api-key"):
            launch_plan(evolve(config, args=("--api-key=mine",)), context)
        with pytest.raises(ConfigError, match="VLLM_API_KEY"):
            launch_plan(evolve(config, env={"VLLM_API_KEY": "mine"}), context)


async def asked(
    path: str, key: str | None, monkeypatch: pytest.MonkeyPatch, kind: str = "http"
) -> list[Message]:
    """What the client gets: a message "reached" when the request reached the server."""
    monkeypatch.setenv("VLLM_API_KEY", "the key")
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    async def receive() -> Message:
        raise AssertionError("nothing is read of a request that is refused")

    async def server(*_: object) -> None:
        sent.append({"type": "reached"})

    headers = [] if key is None else [(b"authorization", key.encode())]
    await KeyGuard(server)({"type": kind, "path": path, "headers": headers}, receive, send)
    return sent


@pytest.mark.security
@pytest.mark.parametrize("key", [None, "", "Bearer", "Bearer another", "the key"])
@pytest.mark.parametrize("path", ["/v1/completions", "/invocations", "/tokenize", "/pause", "/"])
async def test_without_the_key_every_path_is_refused(
    path: str, key: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, *_ = await asked(path, key, monkeypatch)
    assert first["status"] == 401
    (closed,) = await asked(path, key, monkeypatch, "websocket")
    assert closed["type"] == "websocket.close"


async def test_with_the_key_and_for_probes_requests_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    reached = [{"type": "reached"}]
    assert await asked("/v1/completions", "Bearer the key", monkeypatch) == reached
    assert await asked("/health", None, monkeypatch) == reached
    assert await asked("/metrics", None, monkeypatch) == reached
    monkeypatch.setenv("VLLM_API_KEY", "the key")
    assert await asked("", None, monkeypatch, "lifespan") == reached


def test_the_guard_needs_nothing_but_the_standard_library() -> None:
    import ast

    import commutator_vllm.key_guard as module

    tree = ast.parse(Path(str(module.__file__)).read_text())
    modules = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {str(name).partition(".")[0] for name in modules} <= set(sys.stdlib_module_names)
