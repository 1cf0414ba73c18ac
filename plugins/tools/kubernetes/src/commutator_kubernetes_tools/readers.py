"""Reads what other servers were deployed from."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

from commutator.errors import ConfigError
from commutator_kubernetes_tools.draft import (
    Draft,
    Engine,
    named,
    read_arguments,
    read_container,
    read_env,
    read_gpus,
    set_gpus_of_arguments,
)
from commutator_kubernetes_tools.plan import MODELS
from commutator_kubernetes_tools.source import Path, Source

_ROUTERS = {
    "kv": "kv",
    "kvaware": "kv",
    "prefixaware": "kv",
    "round-robin": "round_robin",
    "roundrobin": "round_robin",
    "random": "random",
    "session": "session_affinity",
    "least-loaded": "least_loaded",
    "power-of-two": "power_of_two",
}
_BY_PREFIX = {"kind": "kv"}


def _must_be(source: Source, kind: str) -> None:
    if source.get("kind") != kind:
        raise ConfigError([f"expected kind: {kind}, got {source.get('kind')!r}"], source.name)


def _replicas(source: Source, engine: Engine, *path: str | int) -> None:
    count = source.get(*path)
    if isinstance(count, int) and count > 0:
        engine.replicas = count
        source.take(*path)
    elif count is not None:
        source.leave(path, "an entry has at least one worker; it was left at one")


def _model_at(source: Source, engine: Engine, *path: str | int) -> None:
    """A URI such as hf://NAME or pvc://CLAIM/FOLDER."""
    uri = str(source.get(*path) or "")
    scheme, separator, rest = uri.partition("://")
    if scheme == "pvc" and separator:
        claim, _, folder = rest.partition("/")
        engine.source = f"{MODELS}/{folder}".rstrip("/")
        source.leave(path, f"render --models pvc:{claim}")
    elif separator and scheme != "hf":
        engine.source = f"{MODELS}/{rest.rpartition('/')[2] or 'model'}"
        source.leave(path, f"copy it to {engine.source}")
    elif uri:
        engine.source = rest if separator else uri
        source.take(*path)


# --- Dynamo -------------------------------------------------------------------------------------


def dynamo(source: Source) -> Draft:
    """A DynamoGraphDeployment, of v1alpha1 (`services`) or v1beta1 (`components`)."""
    _must_be(source, "DynamoGraphDeployment")
    draft = Draft(name=str(source.take("metadata", "name") or ""))
    framework = str(source.take("spec", "backendFramework") or "vllm")
    places = source.mappings("spec", "components") or source.mappings("spec", "services")
    for place, one in places:
        kind = str(one.get("type") or one.get("componentType") or "")
        name = str(one.get("name") or place[-1])
        if kind == "frontend" or name.lower() == "frontend":
            _dynamo_frontend(source, place, draft)
        elif kind in ("planner", "epp"):
            source.leave(place, "see planner" if kind == "planner" else "the front door picks")
        else:
            _dynamo_worker(source, place, draft, Engine(framework, name), kind)
    return draft


def _container_of(source: Source, place: Path) -> Path:
    if source.get(*place, "extraPodSpec") is not None:
        return (*place, "extraPodSpec", "mainContainer")
    return (*place, "podTemplate", "spec", "containers", 0)


def _dynamo_frontend(source: Source, place: Path, draft: Draft) -> None:
    for part in ("type", "componentType", "name"):
        source.take(*place, part)
    container = _container_of(source, place)
    source.take(*container, "name")
    for env in ((*container, "env"), (*place, "envs")):
        for one_place, one in source.mappings(*env):
            mode = _ROUTERS.get(str(one.get("value")))
            if one.get("name") == "DYN_ROUTER_MODE" and mode is not None:
                draft.router["kind"] = mode
                source.take(*one_place)
    if "dynamo.frontend" in [word for _, word in source.entries(*container, "command")]:
        source.take(*container, "command")
    arguments = source.entries(*container, "args")
    for (one_place, word), (next_place, value) in pairwise([*arguments, ((), "")]):
        if word == "--http-port" and str(value).isdecimal():
            draft.frontend["port"] = int(value)
        elif word == "--router-mode" and str(value) in _ROUTERS:
            draft.router["kind"] = _ROUTERS[str(value)]
        else:
            continue
        source.take(*one_place)
        source.take(*next_place)


def _dynamo_worker(source: Source, place: Path, draft: Draft, engine: Engine, kind: str) -> None:
    for part in ("type", "componentType", "name", "subComponentType"):
        source.take(*place, part)
    role = str(source.get(*place, "subComponentType") or kind)
    if role in ("prefill", "decode"):
        engine.role = role
    container = _container_of(source, place)
    read_container(source, container, engine)
    read_env(source, (*place, "envs"), engine)
    read_gpus(source, (*place, "resources"), engine)
    _replicas(source, engine, *place, "replicas")
    if source.get(*place, "multinode") is not None:
        source.leave((*place, "multinode"), "a worker over several nodes: `nodes`, launcher ray")
    set_gpus_of_arguments(engine)
    if not engine.source:
        source.leave(place, "no model is named")
        return
    engine.name = named([one.name for one in draft.engines], engine.name)
    draft.engines.append(engine)
    _settle_roles(draft)


def _settle_roles(draft: Draft) -> None:
    """Beside a prefill worker the others of its model decode; a role alone means nothing."""
    models = {one.source for one in draft.engines if one.role == "prefill"}
    for one in draft.engines:
        if one.role != "prefill":
            one.role = "decode" if one.source in models else "both"


# --- production-stack ---------------------------------------------------------------------------

_VLLM_OPTIONS = {
    "maxModelLen": "--max-model-len",
    "dtype": "--dtype",
    "tensorParallelSize": "--tensor-parallel-size",
    "pipelineParallelSize": "--pipeline-parallel-size",
    "maxNumSeqs": "--max-num-seqs",
    "gpuMemoryUtilization": "--gpu-memory-utilization",
    "maxLoras": "--max-loras",
}
_VLLM_FLAGS = {
    "enablePrefixCaching": "enable-prefix-caching",
    "enableChunkedPrefill": "enable-chunked-prefill",
    "enableLoRA": "enable-lora",
}


def production_stack(source: Source) -> Draft:
    """Values of the chart vllm-stack."""
    draft = Draft()
    for place, one in source.mappings("servingEngineSpec", "modelSpec"):
        engine = Engine("vllm", named([e.name for e in draft.engines], str(one.get("name"))))
        source.take(*place, "name")
        engine.source = str(source.take(*place, "modelURL") or "")
        _replicas(source, engine, *place, "replicaCount")
        count = source.get(*place, "requestGPU")
        if isinstance(count, int):
            engine.gpus = count
            source.take(*place, "requestGPU")
        read_gpus(source, (*place, "resources"), engine)
        _vllm_config(source, place, engine)
        _tools(source, place, engine)
        read_env(source, (*place, "env"), engine)
        if source.get(*place, "hf_token") is not None:
            engine.env["HF_TOKEN"] = {"env": "HF_TOKEN"}
        _lmcache(source, (*place, "lmcacheConfig"), engine, draft)
        if engine.source:
            draft.engines.append(engine)
    _settle_roles(draft)
    logic = _ROUTERS.get(str(source.get("routerSpec", "routingLogic")))
    if logic is not None:
        draft.router["kind"] = logic
        source.take("routerSpec", "routingLogic")
    elif source.get("routerSpec", "routingLogic") == "disaggregated_prefill":
        source.take("routerSpec", "routingLogic")
    port = source.get("routerSpec", "containerPort")
    if isinstance(port, int):
        draft.frontend["port"] = port
        source.take("routerSpec", "containerPort")
    return draft


def _vllm_config(source: Source, place: Path, engine: Engine) -> None:
    for one, value in source.entries(*place, "vllmConfig"):
        key = str(one[-1])
        if key in _VLLM_OPTIONS and value not in (None, ""):
            engine.args.append(f"{_VLLM_OPTIONS[key]}={value}")
            source.take(*one)
        elif key in _VLLM_FLAGS and isinstance(value, bool):
            if key != "enableLoRA" or value:
                engine.args.append(f"--{'' if value else 'no-'}{_VLLM_FLAGS[key]}")
            source.take(*one)
        elif key == "extraArgs":
            read_arguments(source, one, engine)


def _tools(source: Source, place: Path, engine: Engine) -> None:
    if source.get(*place, "enableTool") is True:
        engine.args.append("--enable-auto-tool-choice")
        source.take(*place, "enableTool")
        if parser := source.take(*place, "toolCallParser"):
            engine.args.append(f"--tool-call-parser={parser}")


def _lmcache(source: Source, path: Path, engine: Engine, draft: Draft) -> None:
    if source.get(*path, "enabled") is not True:
        if source.get(*path, "enabled") is False:
            source.take(*path, "enabled")
        return
    role = {"kv_producer": "prefill", "kv_consumer": "decode"}.get(str(source.get(*path, "kvRole")))
    if role is not None:
        engine.role = role
        source.take(*path, "kvRole")
    kinds = {tier["kind"] for tier in draft.tiers}
    for key, kind in (
        ("cpuOffloadingBufferSize", "dram"),
        ("maxLocalCpuSize", "dram"),
        ("diskOffloadingBufferSize", "nvme"),
        ("maxLocalDiskSize", "nvme"),
    ):
        size = str(source.get(*path, key) or "")
        if not re.fullmatch(r"\d+(\.\d+)?", size) or float(size) == 0:
            continue
        source.take(*path, key)
        source.take(*path, "enabled")
        if kind not in kinds:
            kinds.add(kind)
            tier: dict[str, Any] = {"kind": kind, "capacity": f"{size}GiB"}
            draft.tiers.append(tier | ({"path": "/var/cache/commutator"} if kind == "nvme" else {}))
    draft.tiers.sort(key=lambda tier: str(tier["kind"]))


# --- llm-d --------------------------------------------------------------------------------------


def llm_d(source: Source) -> Draft:
    """Values of the chart llm-d-modelservice."""
    if source.get("modelArtifacts") is None:
        raise ConfigError(
            ["expected values of llm-d-modelservice, with modelArtifacts"], source.name
        )
    draft = Draft(router=dict(_BY_PREFIX))
    for role in ("decode", "prefill"):
        if source.get(role) is None or source.get(role, "create") is False:
            source.take(role, "create")
            continue
        engine = Engine("vllm", role, role=role)
        source.take(role, "create")
        _model_at(source, engine, "modelArtifacts", "uri")
        _replicas(source, engine, role, "replicas")
        _parallelism(source, (role, "parallelism"), engine)
        container: Path = (role, "containers", 0)
        if source.get(*container, "modelCommand") in ("vllmServe", "custom"):
            source.take(*container, "modelCommand")
        read_container(source, container, engine)
        engine.served_as = str(source.take("modelArtifacts", "name") or engine.served_as)
        set_gpus_of_arguments(engine)
        engine.gpus = engine.gpus or 1
        draft.engines.append(engine)
    _settle_roles(draft)
    return draft


def _parallelism(source: Source, path: Path, engine: Engine) -> None:
    for key, name in (
        ("tensor", "--tensor-parallel-size"),
        ("pipeline", "--pipeline-parallel-size"),
        ("data", "--data-parallel-size"),
    ):
        size = source.get(*path, key)
        if isinstance(size, int):
            if size > 1:
                engine.args.append(f"{name}={size}")
            source.take(*path, key)
    if source.get(*path, "dataLocal") == source.get(*path, "data"):
        source.take(*path, "dataLocal")
    if source.get(*path, "expert") is True:
        engine.args.append("--enable-expert-parallel")
        source.take(*path, "expert")


# --- KServe -------------------------------------------------------------------------------------


def kserve(source: Source) -> Draft:
    """An LLMInferenceService."""
    _must_be(source, "LLMInferenceService")
    draft = Draft(name=str(source.take("metadata", "name") or ""))
    if source.get("spec", "router", "scheduler") is not None:
        draft.router = dict(_BY_PREFIX)
        source.take("spec", "router", "scheduler")
        if source.get("spec", "router", "scheduler"):
            source.leave(("spec", "router", "scheduler"), "router: {kind: kv}, or pipeline")
    for path, role in ((("spec",), "decode"), (("spec", "prefill"), "prefill")):
        if source.get(*path) is None:
            continue
        engine = Engine("vllm", role if role == "prefill" else "server", role=role)
        _model_at(source, engine, "spec", "model", "uri")
        engine.served_as = str(source.take("spec", "model", "name") or "")
        _replicas(source, engine, *path, "replicas")
        _parallelism(source, (*path, "parallelism"), engine)
        read_container(source, (*path, "template", "containers", 0), engine)
        set_gpus_of_arguments(engine)
        draft.engines.append(engine)
    _settle_roles(draft)
    return draft


READERS: Mapping[str, Callable[[Source], Draft]] = {
    "dynamo": dynamo,
    "kserve": kserve,
    "llm-d": llm_d,
    "production-stack": production_stack,
}
