"""The command line of one SGLang server. Shown in the log, so that it can be run by hand."""

from __future__ import annotations

import json
import logging
import shlex
from collections.abc import Iterator
from pathlib import Path

from commutator import LaunchContext, LaunchPlan
from commutator.engine import free_ports, gpus_of, python_at
from commutator.engine.model_directory import directory_for, start_command
from commutator.errors import ConfigError
from commutator.text import locate_model
from commutator_sglang.config import SglangConfig
from commutator_sglang.launch_tiers import check_tiers, tier_arguments

__all__ = ["launch_plan", "server_arguments"]

log = logging.getLogger(__name__)

_SERVER = ("-m", "sglang.launch_server")
_OURS = (
    "--host",
    "--port",
    "--model-path",
    "--model",
    "--served-model-name",
    "--skip-tokenizer-init",
)
# What there is without an accelerator, of which SGLang itself chooses other parts.
_ON_CPU = {"--attention-backend": "torch_native", "--sampling-backend": "pytorch"}
_CPU_ENV = {"SGLANG_USE_CPU_ENGINE": "1"}
_DISAGGREGATION = "--disaggregation-mode"
_TRANSFER = "--disaggregation-transfer-backend"
_BOOTSTRAP_PORT = "--disaggregation-bootstrap-port"


def launch_plan(config: SglangConfig, context: LaunchContext) -> LaunchPlan:
    """Raises ConfigError when the environment, the model or an argument cannot be used."""
    advice = "run `make sglang`, or give the Python of the environment that has SGLang"
    python = python_at(config.python, advice, f"engine {config.name or config.kind}")
    if context.tiers:
        check_tiers(config, python, set(_names(config)))
    source = locate_model(context.model.source)
    directory = directory_for(source) if source.is_file() else source
    server = (python, *_SERVER, *server_arguments(config, context, directory))
    env = {
        "HF_HUB_OFFLINE": "1",
        # Log probabilities as everywhere else: before temperature and filters.
        "SGLANG_RETURN_ORIGINAL_LOGPROB": "1",
        **(_CPU_ENV if _on_cpu(config) else {}),
        **config.env,
    }
    if gpus := gpus_of(config.gpus, config.replicas, context.worker_id):
        env["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, gpus))
    shown = [*(f"{name}={value}" for name, value in sorted(env.items())), *server]
    log.info("%s: %s", context.worker_id, shlex.join(shown))
    if source.is_file():
        server = start_command(source, directory, server)
    return LaunchPlan(server, f"http://{context.host}:{context.port}", env)


def server_arguments(
    config: SglangConfig, context: LaunchContext, directory: Path
) -> tuple[str, ...]:
    """What the configuration says, and before it what we add unless it says otherwise."""
    given = set(_names(config))
    if ours := sorted(given.intersection(_OURS)):
        raise ConfigError([f"args: {', '.join(ours)} is set by us; leave it out"])
    ports = free_ports(context.host, 3)
    added = {
        "--host": context.host,
        "--port": str(context.port),
        "--model-path": str(directory),
        "--served-model-name": context.model.name,
        **(_ON_CPU if _on_cpu(config) else {}),
    }
    if context.model.max_model_len is not None:
        added["--context-length"] = str(context.model.max_model_len)
    if not given & {"--disable-radix-cache"}:
        added["--kv-events-config"] = _events(context.host, *ports[:2])
    if context.tiers:
        added |= tier_arguments(context)
    if config.role != "both":
        added |= {_DISAGGREGATION: config.role, _TRANSFER: "nixl"}
        if config.role == "prefill":
            added[_BOOTSTRAP_PORT] = str(ports[2])
        if _on_cpu(config):
            added["--disable-overlap-schedule"] = ""
    flags = ["--incremental-streaming-output"]
    if "--enable-priority-scheduling" not in given:
        flags += ["--enable-priority-scheduling", "--schedule-low-priority-values-first"]
    arguments = [
        word
        for name, value in added.items()
        if name not in given
        for word in ((name, value) if value else (name,))
    ]
    return (*arguments, *(flag for flag in flags if flag not in given), *config.args)


def _names(config: SglangConfig) -> Iterator[str]:
    return (argument.partition("=")[0] for argument in config.args)


def _on_cpu(config: SglangConfig) -> bool:
    words = " ".join(config.args).replace("=", " ")
    return "--device cpu" in words


def _events(host: str, port: int, replay_port: int) -> str:
    # Told to bind: with a host in place of a "*", SGLang would connect.
    events = {
        "publisher": "zmq",
        "endpoint": f"tcp://{host}:{port}",
        "replay_endpoint": f"tcp://{host}:{replay_port}",
        "bind": True,
    }
    return json.dumps(events, separators=(",", ":"))
