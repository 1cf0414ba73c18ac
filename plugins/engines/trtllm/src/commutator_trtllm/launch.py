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
from commutator_engine_kit.model_kv import refused
from commutator_engine_kit.preflight import gpu_memory_bytes
from commutator_trtllm import model_support
from commutator_trtllm.config import TrtllmConfig
from commutator_trtllm.options import PREFIX, as_yaml, server_options
from commutator_trtllm.sidecar import SidecarOptions

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
    checks: list[Callable[[], object]] = [partial(_check, config, model, tiers)]
    if config.url is None:
        checks.append(partial(argument_names, config.args, _OURS, config.where))
        checks.append(partial(_checkpoint, config, model))
    for check in checks:
        try:
            check()
        except ConfigError as error:
            yield from error.problems
    if tiers and config.url is None:
        yield from (f"tiers: {one}" for one in refused(model, model_support.tiers))
    if config.url is None and Path(config.command[0]).name == _SERVER and gpu_memory_bytes() == ():
        yield (
            "command: TensorRT-LLM needs an NVIDIA GPU, and this machine has none; attach to a "
            "server on another machine by `url`"
        )


def _check(config: TrtllmConfig, model: ModelConfig, tiers: Sequence[TierConfig]) -> None:
    """Raises ConfigError for options that contradict each other, and for a missing program."""
    found = []
    if model.max_model_len is None:
        found.append(f"model: {model.name} needs max_model_len: TensorRT-LLM does not report it")
    if config.url is not None and config.replicas > 1:
        found.append("replicas: `url` is one server; add an entry for each")
    if tiers and config.url is None and config.takes_part_in_handovers:
        found.append(
            "tiers: a server that hands over KV (`role`, `cache_transceiver_config`) cannot use "
            "them: TensorRT-LLM warns against both together"
        )
    elif tiers and config.url is None and "kv_connector_config" in config.options:
        found.append("tiers: `options` already set a kv_connector_config; remove one of the two")
    program = config.command[0]
    if config.url is None and not shutil.which(program, path=revealed(config.env).get("PATH")):
        found.append(
            f"command: {program} was not found; install TensorRT-LLM, which needs an NVIDIA GPU, "
            "and set `command` to the path of its `trtllm-serve`, or attach to a server by `url`"
        )
    if found:
        raise ConfigError(found, config.where)


def launch_plan(config: TrtllmConfig, context: LaunchContext) -> LaunchPlan:
    """The command of the sidecar, which starts the server unless it is at `url`.

    The sidecar's address is the worker's. Raises ConfigError when the model, an argument or a tier
    is unusable.
    """
    _check(config, context.model, context.tiers)
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


def _tiers_environment(context: LaunchContext) -> dict[str, str]:
    """Writes the tiers to a file for the worker, and returns the environment that names it."""
    return {f"{PREFIX}TIERS": str(write_tiers(context)), f"{PREFIX}WORKER": context.worker_id}


def _checkpoint(config: TrtllmConfig, model: ModelConfig) -> str:
    if config.checkpoint is not None:
        return config.checkpoint
    source = locate_model(model.source)
    if not source.is_dir():
        problem = f"model: {source} is not a Hugging Face directory, which TensorRT-LLM needs"
        raise ConfigError([f"{problem}; set `checkpoint` to one of the same model"], config.where)
    return str(source)
