"""The command line of one SGLang server: its arguments, and those for the tiers behind HiCache."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path

from attrs import evolve

from commutator import LaunchContext, LaunchPlan, ModelConfig, TierConfig
from commutator.errors import ConfigError
from commutator.tokenizer import locate_model
from commutator_engine_kit import free_ports
from commutator_engine_kit.launching import (
    RANKS_ON_LOOPBACK,
    api_key_at,
    argument_names,
    compact_json,
    event_settings,
    event_sockets,
    missing_plugin,
    python_at,
    server_environment,
    server_plan,
    with_defaults,
    write_tiers,
)
from commutator_engine_kit.model_files import directory_for
from commutator_engine_kit.model_kv import refused
from commutator_engine_kit.preflight import ServerNeeds, server_problems, server_warnings
from commutator_sglang import model_support
from commutator_sglang.config import TRANSFER, SglangConfig

log = logging.getLogger(__name__)

_SERVER = ("-m", "sglang.launch_server")
_CONFIG = "--config"
_GRAMMAR_BACKEND = "--grammar-backend"
# What works without an accelerator; SGLang's own defaults differ.
_ON_CPU = {"--attention-backend": "torch_native", "--sampling-backend": "pytorch"}
_CPU_ENV = {"SGLANG_USE_CPU_ENGINE": "1"}
_DISAGGREGATION = "--disaggregation-mode"
_BOOTSTRAP_PORT = "--disaggregation-bootstrap-port"
_EVENTS_AT_PORTS = {
    *("--data-parallel-size", "--dp-size", "--dp", "--attn-dp-size", "--load-publish-endpoint"),
    _CONFIG,
}
"""SGLang names no sockets for several ranks, nor beside its own load reports; a file may ask for
either."""
_BACKEND = "--hicache-storage-backend"
_OPTIONS = "--hicache-storage-backend-extra-config"
_PAGE_TOKENS = "64"
"""SGLang's default page may be a single token, too little for a block."""


_NEEDS = ServerNeeds(
    title="SGLang",
    package="sglang",
    distributions=("sglang",),  # it serves GPUs and CPUs; without a GPU, `on_cpu` decides
    made_by="make sglang",
    without_gpu="add --device=cpu to `args`",
    oldest="0.5.23",
    ours=dict.fromkeys(
        (
            *("--host", "--port", "--model-path", "--model", "--served-model-name"),
            *("--skip-tokenizer-init", "--api-key"),
        ),
        "remove it",
    ),
    context_argument="--context-length",
    parallel_arguments=(
        ("--tp-size", "--tp", "--tensor-parallel-size"),
        ("--pp-size", "--pp", "--pipeline-parallel-size"),
    ),
    shrinking_arguments=("--quantization", "--load-format", "--cpu-offload-gb"),
)


def problems(
    config: SglangConfig, model: ModelConfig, tiers: Sequence[TierConfig]
) -> Iterator[str]:
    """As ``EngineConnector.problems``, of servers that are to be launched."""
    found = chain(_contradictions(config, tiers), _not_with_tiers(model, tiers))
    return server_problems(config, model, _NEEDS, found)


def warnings(config: SglangConfig) -> Iterator[str]:
    """As ``EngineConnector.warnings``, likewise."""
    return server_warnings(config, _NEEDS)


def launch_plan(config: SglangConfig, context: LaunchContext) -> LaunchPlan:
    """Raises ConfigError when the environment, the model, an argument or a tier is unusable."""
    python = python_at(config.python, _NEEDS.advice, config.where)
    if found := list(_contradictions(config, context.tiers)):
        raise ConfigError(found, config.where)
    source = locate_model(context.model.source)
    if config.role == "prefill" and context.kv_host != context.host:
        # Its bootstrap server, which decode servers ask for the KV, listens where its own does.
        (port,) = free_ports(context.kv_host)
        context = evolve(context, host=context.kv_host, advertise=context.kv_host, port=port)
    arguments = server_arguments(config, context, directory_for(source))
    command = (python, *_SERVER, *arguments)
    defaults = {
        "HF_HUB_OFFLINE": "1",
        # Log probabilities before temperature and filters, as from the other engines.
        "SGLANG_RETURN_ORIGINAL_LOGPROB": "1",
        # Where its sockets for hand-overs listen.
        "SGLANG_HOST_IP": context.kv_host,
        **_rendezvous(config, context),
        **(_CPU_ENV if config.on_cpu else {}),
    }
    env = server_environment(config, context, defaults)
    address = f"http://{context.advertise}:{context.port}"
    command = (*command, *_key_arguments(config, context, address))
    return server_plan(config, context, command, env, address)


def _rendezvous(config: SglangConfig, context: LaunchContext) -> dict[str, str]:
    """Where the server's own processes meet, on one machine: by a private file, at loopback ports.

    PyTorch's store for it would listen at every interface, and asks nobody for a proof.
    """
    given = argument_names(config.args, _NEEDS.ours, config.where)
    if given & {"--nnodes", "--dist-init-addr", "--nccl-init-addr", _CONFIG}:
        return {}
    file = context.state_dir.absolute() / "rendezvous"
    file.unlink(missing_ok=True)  # of the process before
    return {
        "SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE": file.as_uri(),
        **RANKS_ON_LOOPBACK,
    }


def _key_arguments(config: SglangConfig, context: LaunchContext, address: str) -> tuple[str, ...]:
    """Arguments that name a private file with the server's API key.

    SGLang takes the key only as an argument, which every user of the machine could read, or from
    the one file that `--config` names.
    """
    key = api_key_at(address)
    if key is None:
        return ()
    if _CONFIG in argument_names(config.args, _NEEDS.ours, config.where):
        log.warning(
            "%s: `args` name a %s file, so Commutator cannot give the server an API key: every "
            "user of this machine can use it",
            context.worker_id,
            _CONFIG,
        )
        return ()
    file = context.state_dir / "key.yaml"
    file.touch(mode=0o600)
    file.write_text(f"api-key: {key}\n")
    return (_CONFIG, str(file))


def server_arguments(
    config: SglangConfig, context: LaunchContext, directory: Path
) -> tuple[str, ...]:
    """Our default arguments that `args` does not set, followed by `args`."""
    given = argument_names(config.args, _NEEDS.ours, config.where)
    ports = free_ports(context.host, 3)
    added = {
        "--host": context.host,
        "--port": str(context.port),
        "--model-path": str(directory),
        "--served-model-name": context.model.name,
        **(_ON_CPU if config.on_cpu else {}),
    }
    if context.model.max_model_len is not None:
        added["--context-length"] = str(context.model.max_model_len)
    if "--disable-radix-cache" not in given:
        sockets = None if given & _EVENTS_AT_PORTS else event_sockets(context)
        at_ports = (f"tcp://{context.host}:{port}" for port in ports[:2])
        # With a host instead of "*", SGLang would connect to it if `bind` were not set.
        added["--kv-events-config"] = event_settings(*(sockets or at_ports), bind=True)
    if not given & {_GRAMMAR_BACKEND, _CONFIG}:
        added[_GRAMMAR_BACKEND] = "llguidance"  # it refuses what it cannot enforce
    if context.tiers:
        added |= _tier_arguments(context)
    if config.role != "both":
        added |= {_DISAGGREGATION: config.role, TRANSFER: "nixl"}
        if config.role == "prefill":
            added[_BOOTSTRAP_PORT] = str(ports[2])
        if config.on_cpu:
            added["--disable-overlap-schedule"] = ""
    if "--enable-priority-scheduling" not in given:
        flags = ("--enable-priority-scheduling", "--schedule-low-priority-values-first")
        added |= dict.fromkeys(flags, "")
    return with_defaults({**added, "--incremental-streaming-output": ""}, config.args)


def _contradictions(config: SglangConfig, tiers: Sequence[TierConfig]) -> Iterator[str]:
    """Why the server would ignore the tiers, or cannot load our plugin."""
    if not tiers:
        return
    given = argument_names(config.args, _NEEDS.ours, config.where)
    if config.role != "both":
        yield f"tiers: a server with role {config.role} cannot use them; remove one"
    elif _BACKEND in given or _OPTIONS in given:
        yield f"tiers: {_BACKEND} and its options are set from `tiers`; remove them from `args`"
    elif "--disable-radix-cache" in given:
        yield "tiers: they have no use with --disable-radix-cache; remove one"
    elif lack := missing_plugin(config.python, "commutator-sglang", _NEEDS.made_by):
        yield f"tiers: {lack}"


def _not_with_tiers(model: ModelConfig, tiers: Sequence[TierConfig]) -> Iterator[str]:
    """What our storage backend would refuse once the server has begun to start."""
    if tiers:
        yield from (f"tiers: {one}" for one in refused(model, model_support.tiers))


def _tier_arguments(context: LaunchContext) -> dict[str, str]:
    """Writes the tiers to a file for the worker, and returns the arguments that refer to it."""
    options = {
        "backend_name": "commutator",
        "module_path": "commutator_sglang.hicache",
        "class_name": "CommutatorHiCache",
        "interface_v1": 1,
        "hicache_storage_pass_prefix_keys": True,
        "tiers": str(write_tiers(context)),
        "worker": context.worker_id,
    }
    return {
        "--enable-hierarchical-cache": "",
        _BACKEND: "dynamic",
        _OPTIONS: compact_json(options),
        "--page-size": _PAGE_TOKENS,
    }
