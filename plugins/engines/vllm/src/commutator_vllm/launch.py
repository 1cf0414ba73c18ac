"""The command line of one vLLM server. Shown in the log, so that it can be run by hand."""

from __future__ import annotations

import json
import logging
import shlex
from pathlib import Path

from commutator import LaunchContext, LaunchPlan
from commutator.engine import free_ports, gpus_of, python_at
from commutator.engine.model_directory import directory_for, start_command
from commutator.errors import ConfigError
from commutator.text import locate_model
from commutator_vllm.config import KV_TRANSFER, VllmConfig
from commutator_vllm.launch_tiers import check_tiers, kv_connector

__all__ = ["launch_plan", "server_arguments"]

log = logging.getLogger(__name__)

_SERVER = ("-m", "vllm.entrypoints.openai.api_server")
# Port 0 with this machine's address: free ports, of which /kv_event_sources tells.
_EVENTS = {
    "enable_kv_cache_events": True,
    "publisher": "zmq",
    "endpoint": "tcp://*:0",
    "replay_endpoint": "tcp://*:0",
}
_OURS = ("--host", "--port", "--model", "--served-model-name")


def launch_plan(config: VllmConfig, context: LaunchContext) -> LaunchPlan:
    """Raises ConfigError when the environment, the model or an argument cannot be used."""
    advice = "run `make vllm`, or give the Python of the environment that has vLLM"
    python = python_at(config.python, advice, f"engine {config.name or config.kind}")
    source = locate_model(context.model.source)
    directory = directory_for(source) if source.is_file() else source
    if context.tiers:
        check_tiers(config, python)
    server = (python, *_SERVER, *server_arguments(config, context, directory))
    env = {"HF_HUB_OFFLINE": "1", "VLLM_HOST_IP": context.host, **config.env}
    if config.takes_part_in_handovers:
        env.setdefault("VLLM_NIXL_SIDE_CHANNEL_HOST", context.host)
        env.setdefault("VLLM_NIXL_SIDE_CHANNEL_PORT", str(free_ports(context.host)[0]))
        # As vLLM sets it against a leak in UCX, unless NIXL was imported before, as our tiers do.
        env.setdefault("UCX_RCACHE_MAX_UNRELEASED", "1024")
    if gpus := gpus_of(config.gpus, config.replicas, context.worker_id):
        env["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, gpus))
    shown = [*(f"{name}={value}" for name, value in sorted(env.items())), *server]
    log.info("%s: %s", context.worker_id, shlex.join(shown))
    if source.is_file():
        server = start_command(source, directory, server)
    return LaunchPlan(server, f"http://{context.host}:{context.port}", env)


def server_arguments(
    config: VllmConfig, context: LaunchContext, directory: Path
) -> tuple[str, ...]:
    """What the configuration says, and before it what we add unless it says otherwise."""
    given = {argument.partition("=")[0] for argument in config.args}
    if ours := sorted(given.intersection(_OURS)):
        raise ConfigError([f"args: {', '.join(ours)} is set from `models`; leave it out"])
    arguments = ["--host", context.host, "--port", str(context.port)]
    arguments += ["--model", str(directory), "--served-model-name", context.model.name]
    if context.model.max_model_len is not None and "--max-model-len" not in given:
        arguments += ["--max-model-len", str(context.model.max_model_len)]
    if "--scheduling-policy" not in given:
        arguments += ["--scheduling-policy", "priority"]
    if not given & {"--kv-events-config", "--no-enable-prefix-caching"}:
        arguments += ["--kv-events-config", _json(_EVENTS)]
    if KV_TRANSFER not in given and (connector := kv_connector(config, context)) is not None:
        arguments += [KV_TRANSFER, _json(connector)]
    arguments += ["--enable-prompt-tokens-details", "--enable-scale-out"]
    return (*arguments, *config.args)


def _json(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))
