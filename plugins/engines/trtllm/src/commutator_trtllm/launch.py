"""The command lines of a sidecar and its server. Shown in the log, to be run by hand."""

from __future__ import annotations

import logging
import shlex
import shutil
import sys

from commutator import LaunchContext, LaunchPlan
from commutator.engine import free_ports, gpus_of
from commutator.errors import ConfigError
from commutator.text import locate_model
from commutator_trtllm.__main__ import sidecar_arguments
from commutator_trtllm.config import TrtllmConfig
from commutator_trtllm.launch_tiers import check_tiers, tiers_environment
from commutator_trtllm.options import as_yaml, server_options
from commutator_trtllm.sidecar import SidecarOptions

__all__ = ["launch_plan", "server_command"]

log = logging.getLogger(__name__)

_NOT_ITS_TIERS = "%s runs already: it has the tiers of its own kv_connector_config, not ours"
_OURS = {
    "--host": "leave it out",
    "--port": "leave it out",
    "--max_seq_len": "give `max_model_len` of `models`",
    "--extra_llm_api_options": "give `options`",
    "--config": "give `options`",
}


def launch_plan(config: TrtllmConfig, context: LaunchContext) -> LaunchPlan:
    """The sidecar, which starts the server unless that runs already; its address is the worker's.

    Raises ConfigError when the model or an argument cannot be used.
    """
    where = f"engine {config.name or config.kind}"
    longest = context.model.max_model_len
    if longest is None:
        raise ConfigError(
            [f"models: {context.model.name} needs max_model_len: TensorRT-LLM does not tell it"],
            where,
        )
    if config.url is not None and config.replicas > 1:
        raise ConfigError(["replicas: the server at `url` is one; give each an entry"], where)
    url, command = config.url, tuple[str, ...]()
    if url is not None and context.tiers:
        log.warning(_NOT_ITS_TIERS, context.worker_id)
    if url is None:
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
    env = {**(tiers_environment(context) if command and context.tiers else {}), **config.env}
    if gpus := gpus_of(config.gpus, config.replicas, context.worker_id):
        env["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, gpus))
    argv = (sys.executable, "-m", "commutator_trtllm", *sidecar_arguments(options))
    if command:
        shown = [*(f"{name}={value}" for name, value in sorted(env.items())), *command]
        log.info("%s: %s", context.worker_id, shlex.join(shown))
        argv = (*argv, "--", *command)
    return LaunchPlan(argv, f"http://{context.host}:{context.port}", env)


def server_command(config: TrtllmConfig, context: LaunchContext, port: int) -> tuple[str, ...]:
    """What starts the server; writes its YAML file. Raises ConfigError."""
    given = {argument.partition("=")[0] for argument in config.args}
    if ours := sorted(given.intersection(_OURS)):
        problems = [f"args: {name} is set from elsewhere; {_OURS[name]}" for name in ours]
        raise ConfigError(problems, f"engine {config.name or config.kind}")
    if context.tiers:
        check_tiers(config)
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
    command = [*config.command, _checkpoint(config, context)]
    command += ["--host", context.host, "--port", str(port)]
    command += ["--max_seq_len", str(context.model.max_model_len)]
    return (*command, "--extra_llm_api_options", str(file), *config.args)


def _check_program(config: TrtllmConfig) -> None:
    program = config.command[0]
    if shutil.which(program, path=config.env.get("PATH")) is None:
        advice = (
            "install TensorRT-LLM, which needs an NVIDIA GPU, and give the path of its "
            "`trtllm-serve`, or attach to a server by its `url`"
        )
        where = f"engine {config.name or config.kind}"
        raise ConfigError([f"command: there is no {program}; {advice}"], where)


def _checkpoint(config: TrtllmConfig, context: LaunchContext) -> str:
    if config.checkpoint is not None:
        return config.checkpoint
    source = locate_model(context.model.source)
    if not source.is_dir():
        problem = f"models: {source} is no Hugging Face directory, all that TensorRT-LLM reads"
        where = f"engine {config.name or config.kind}"
        raise ConfigError([f"{problem}; give one of the same model as `checkpoint`"], where)
    return str(source)
