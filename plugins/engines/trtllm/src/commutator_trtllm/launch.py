"""The command lines of a sidecar and its server."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import msgspec

from commutator import LaunchContext, LaunchPlan, ModelConfig, TierConfig
from commutator.errors import ConfigError
from commutator.tokenizer import locate_model
from commutator_engine_kit import free_ports
from commutator_engine_kit.launching import (
    argument_names,
    log_command,
    revealed,
    server_environment,
    warn_of_unused_tiers,
    write_tiers,
)
from commutator_engine_kit.preflight import gpu_memory_bytes
from commutator_trtllm.config import TrtllmConfig
from commutator_trtllm.options import PREFIX, as_yaml, server_options
from commutator_trtllm.sidecar import SidecarOptions

__all__ = ["launch_plan", "problems", "server_command"]

_SERVER = "trtllm-serve"
_OURS = {
    "--host": "remove it",
    "--port": "remove it",
    "--max_seq_len": "set `max_model_len` in `models` instead",
    "--extra_llm_api_options": "set `options` instead",
    "--config": "set `options` instead",
}


def problems(
    config: TrtllmConfig, model: ModelConfig, tiers: Sequence[TierConfig]
) -> Iterator[str]:
    """As ``EngineConnector.problems``."""
    checks: list[Callable[[], object]] = [partial(_check_entry, config, model)]
    if config.url is None:
        checks.append(partial(argument_names, config.args, _OURS, config.where))
        checks += [partial(_check_tiers, config)] if tiers else []
        checks += [partial(_check_program, config), partial(_checkpoint, config, model)]
    for check in checks:
        try:
            check()
        except ConfigError as error:
            yield from error.problems
    if config.url is None and Path(config.command[0]).name == _SERVER and gpu_memory_bytes() == ():
        yield (
            "command: TensorRT-LLM needs an NVIDIA GPU, and this machine has none; attach to a "
            "server on another machine by `url`"
        )


def _check_entry(config: TrtllmConfig, model: ModelConfig) -> None:
    """Raises ConfigError for options that contradict each other."""
    if model.max_model_len is None:
        raise ConfigError(
            [f"model: {model.name} needs max_model_len: TensorRT-LLM does not report it"],
            config.where,
        )
    if config.url is not None and config.replicas > 1:
        raise ConfigError(["replicas: `url` is one server; add an entry for each"], config.where)


def launch_plan(config: TrtllmConfig, context: LaunchContext) -> LaunchPlan:
    """The command of the sidecar, which starts the server unless it is at `url`.

    The sidecar's address is the worker's. Raises ConfigError when the model, an argument or a tier
    is unusable.
    """
    _check_entry(config, context.model)
    longest = context.model.max_model_len
    assert longest is not None
    url, command = config.url, tuple[str, ...]()
    if url is not None:
        warn_of_unused_tiers(context)
    else:
        (port,) = free_ports(context.host)
        url, command = f"http://{context.host}:{port}", server_command(config, context, port)
    options = SidecarOptions(
        url=url.rstrip("/"),
        host=context.host,
        port=context.port,
        max_model_len=longest,
        kv_events=config.kv_events,
        hands_over=config.takes_part_in_handovers,
    )
    defaults = _tiers_environment(context) if command and context.tiers else {}
    env = server_environment(config, context, defaults)
    described = msgspec.json.encode(options).decode()
    argv = (sys.executable, "-m", "commutator_trtllm", described, *command)
    if command:
        log_command(config, context, env, command)
    return LaunchPlan(argv=argv, address=f"http://{context.advertise}:{context.port}", env=env)


def server_command(config: TrtllmConfig, context: LaunchContext, port: int) -> tuple[str, ...]:
    """The command line of the server. Writes its YAML file. Raises ConfigError."""
    argument_names(config.args, _OURS, config.where)
    if context.tiers:
        _check_tiers(config)
    _check_program(config)
    options = server_options(
        config.role,
        hands_over=config.takes_part_in_handovers,
        kv_events=config.kv_events,
        max_model_len=context.model.max_model_len,
        tiers=bool(context.tiers),
        laid_over=config.options,
    )
    file = context.state_dir / "trtllm.yaml"
    file.write_text(as_yaml(options))
    command = [*config.command, _checkpoint(config, context.model)]
    command += ["--host", context.host, "--port", str(port)]
    command += ["--max_seq_len", str(context.model.max_model_len)]
    return (*command, "--extra_llm_api_options", str(file), *config.args)


def _check_tiers(config: TrtllmConfig) -> None:
    """Raises ConfigError when the server would ignore the tiers, or cannot work with them."""
    problem = None
    if config.takes_part_in_handovers:
        problem = (
            "a server that hands over KV (`role`, `cache_transceiver_config`) cannot use them: "
            "TensorRT-LLM warns against both together"
        )
    elif "kv_connector_config" in config.options:
        problem = "`options` already set a kv_connector_config; remove one of the two"
    if problem is not None:
        raise ConfigError([f"tiers: {problem}"], config.where)


def _tiers_environment(context: LaunchContext) -> dict[str, str]:
    """Writes the tiers to a file for the worker, and returns the environment that names it."""
    return {f"{PREFIX}TIERS": str(write_tiers(context)), f"{PREFIX}WORKER": context.worker_id}


def _check_program(config: TrtllmConfig) -> None:
    program = config.command[0]
    if shutil.which(program, path=revealed(config.env).get("PATH")) is None:
        advice = (
            "install TensorRT-LLM, which needs an NVIDIA GPU, and set `command` to the path of its "
            "`trtllm-serve`, or attach to a server by `url`"
        )
        raise ConfigError([f"command: {program} was not found; {advice}"], config.where)


def _checkpoint(config: TrtllmConfig, model: ModelConfig) -> str:
    if config.checkpoint is not None:
        return config.checkpoint
    source = locate_model(model.source)
    if not source.is_dir():
        problem = f"model: {source} is not a Hugging Face directory, which TensorRT-LLM needs"
        raise ConfigError([f"{problem}; set `checkpoint` to one of the same model"], config.where)
    return str(source)
