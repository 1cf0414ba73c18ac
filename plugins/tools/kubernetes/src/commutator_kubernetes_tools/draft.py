"""The configuration that a reader drafts from another server's file."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from attrs import define, field

from commutator.config.secrets import HIDDEN, is_secret_name
from commutator.config.tree import path_text
from commutator_kubernetes_tools.plan import parallel_size
from commutator_kubernetes_tools.source import Path, Source

SETS_ITSELF = "Commutator sets it"
_PROGRAMS = {
    "dynamo.vllm": "vllm",
    "dynamo.sglang": "sglang",
    "dynamo.trtllm": "trtllm",
    "dynamo.mocker": "sim",
    "vllm": "vllm",
    "vllm.entrypoints.openai.api_server": "vllm",
    "sglang.launch_server": "sglang",
    "trtllm-serve": "trtllm",
}
_LAUNCHERS = {
    "python",
    "python3",
    "-m",
    "serve",
    "/bin/sh",
    "/bin/bash",
    "sh",
    "bash",
    "-c",
    "exec",
}
_MOST_SHOWN = 70


@define
class Engine:
    """An entry of `engines`, and its model."""

    kind: str
    name: str
    role: str = "both"
    replicas: int = 1
    source: str = ""
    served_as: str = ""
    args: list[str] = field(factory=list)
    env: dict[str, Any] = field(factory=dict)
    kv_events: bool = False
    gpus: int = 0
    """Of each worker."""


@define
class Draft:
    """What becomes the file."""

    engines: list[Engine] = field(factory=list)
    router: dict[str, Any] = field(factory=dict)
    frontend: dict[str, Any] = field(factory=dict)
    migration: dict[str, Any] = field(factory=dict)
    tiers: list[dict[str, Any]] = field(factory=list)
    name: str = ""

    def configuration(self) -> dict[str, Any]:
        """As plain data, in the order in which people write it."""
        models: dict[str, str] = {}
        for engine in self.engines:
            models.setdefault(engine.served_as or engine.source, engine.source)
        values: dict[str, Any] = {
            "models": [{"name": name, "source": source} for name, source in models.items()],
            "engines": [*self._entries(several=len(models) > 1)],
        }
        roles = {engine.role for engine in self.engines}
        if {"prefill", "decode"} <= roles:
            values["disaggregation"] = {"kind": "always"}
        for name in ("router", "tiers", "migration", "frontend"):
            if part := getattr(self, name):
                values[name] = part
        if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}", self.name):
            values["cluster"] = {"name": self.name}
        return values

    def _entries(self, *, several: bool) -> Iterator[dict[str, Any]]:
        first = 0
        for engine in self.engines:
            entry: dict[str, Any] = {"kind": engine.kind, "name": engine.name}
            if several:
                entry["model"] = engine.served_as or engine.source
            if engine.replicas != 1:
                entry["replicas"] = engine.replicas
            if engine.role != "both":
                entry["role"] = engine.role
            if engine.gpus and engine.kind != "sim":
                count = engine.gpus * engine.replicas
                entry["gpus"] = [*range(first, first + count)]
                first += count
            if engine.kv_events and engine.kind == "trtllm":  # others are always read
                entry["kv_events"] = True
            if engine.args and engine.kind != "sim":
                entry["args"] = engine.args
            if engine.env and engine.kind != "sim":
                entry["env"] = engine.env
            yield entry


# --- arguments ----------------------------------------------------------------------------------


def read_arguments(source: Source, path: Path, engine: Engine) -> None:
    """A list of arguments, such as `args` of a container, or the text of a command line."""
    given = source.get(*path)
    if isinstance(given, str):
        words = [(word, path) for word in _split(given)]
    else:
        words = [
            (word, (*path, number))
            for number, text in enumerate(given if isinstance(given, list) else [])
            for word in (_split(str(text)) if " -" in str(text) else [str(text)])
        ]
    source.take(*path)
    position = 0
    while position < len(words):
        word, place = words[position]
        name, equals, value = word.partition("=")
        places = [place]
        takes_next = position + 1 < len(words) and not words[position + 1][0].startswith("--")
        if word.startswith("-") and not equals and takes_next and name not in _NO_VALUE:
            position += 1
            value = words[position][0]
            places.append(words[position][1])
        position += 1
        if reason := _read(engine, word, name, value):
            for one in places:
                source.leave(one, reason)
        elif word.startswith("-") and not _is_meant(name):
            engine.args += [word] if len(places) == 1 else [word, value]


def _split(text: str) -> list[str]:
    try:
        return shlex.split(text.replace("\\\n", " "))
    except ValueError:
        return text.split()


def _is_meant(name: str) -> bool:
    """Whether ``_read`` has put an argument somewhere else."""
    return name in _PLACES or name in _NO_VALUE


def _read(engine: Engine, word: str, name: str, value: str) -> str:
    """Put one argument into the entry; why it has no place, if it has none."""
    if (place := _PLACES.get(name)) is not None:
        return place(engine, name, value)
    if not word.startswith("-"):
        return _read_word(engine, word)
    if name in _REASONS:
        return _REASONS[name]
    if name.startswith("--dyn-"):
        return _OF_DYNAMO
    if engine.kind == "trtllm" and name not in _OF_TRTLLM and name not in _NO_VALUE:
        return "not an argument of trtllm-serve"
    return ""


def _set_source(engine: Engine, _: str, value: str) -> str:
    engine.source = value
    return ""


def _set_name(engine: Engine, _: str, value: str) -> str:
    engine.served_as = value
    return ""


def _set_role(engine: Engine, name: str, value: str) -> str:
    role = {"--is-prefill-worker": "prefill", "--is-decode-worker": "decode"}.get(name, value)
    if role not in ("prefill", "decode"):
        return "no role that is known"
    engine.role = role
    return ""


def _set_events(engine: Engine, _: str, __: str) -> str:
    engine.kv_events = True
    return ""


def _set_handover(_: Engine, __: str, value: str) -> str:
    return "" if "nixl" in value.lower() else "roles and disaggregation set up NIXL; see tiers"


_PLACES: Mapping[str, Callable[[Engine, str, str], str]] = {
    **dict.fromkeys(("--model", "--model-path"), _set_source),
    **dict.fromkeys(("--served-model-name", "--model-name"), _set_name),
    **dict.fromkeys(
        ("--is-prefill-worker", "--is-decode-worker", "--disaggregation-mode"), _set_role
    ),
    **dict.fromkeys(("--kv-events-config", "--publish-events-and-metrics"), _set_events),
    **dict.fromkeys(
        ("--kv-transfer-config", "--kv_transfer_config", "--disaggregation-transfer-backend"),
        _set_handover,
    ),
}
_OF_DYNAMO = "of Dynamo; models[].tool_parser and reasoning_parser are auto"
_REASONS = {
    **dict.fromkeys(
        (
            "--host",
            "--port",
            "--api-key",
            "--skip-tokenizer-init",
            "--disaggregation-bootstrap-port",
        ),
        SETS_ITSELF,
    ),
    **dict.fromkeys(
        ("--connector", "--request-plane", "--event-plane", "--discovery-backend", "--endpoint"),
        "of Dynamo",
    ),
    "--extra-engine-args": "write what that file says into engines[].options",
    "--custom-jinja-template": "set models[].chat_template",
    "--migration-limit": "set migration.limit",
}
_OF_TRTLLM = {"--tp_size", "--pp_size", "--ep_size", "--max_batch_size", "--max_num_tokens"}
_NO_VALUE = ("-m", "-c")
"""Of interpreters: what follows is a word of its own."""


def _read_word(engine: Engine, word: str) -> str:
    if (program := _PROGRAMS.get(word)) is not None:
        engine.kind = program
        return ""
    if word in _LAUNCHERS:
        return ""
    if not engine.source and "/" in word and not word.startswith("."):
        engine.source = word
        return ""
    return "no argument that is known"


# --- containers ---------------------------------------------------------------------------------

_GPU_NAMES = ("gpu", "nvidia.com/gpu", "amd.com/gpu", "gpu.intel.com/i915", "gpu.intel.com/xe")


def read_container(source: Source, path: Path, engine: Engine) -> None:
    """What a container of Kubernetes says: command, arguments, variables, GPUs."""
    if source.get(*path, "name") is not None:
        source.take(*path, "name")
    for part in ("command", "args"):
        if source.get(*path, part):
            read_arguments(source, (*path, part), engine)
    read_env(source, (*path, "env"), engine)
    read_gpus(source, (*path, "resources"), engine)


def read_env(source: Source, path: Path, engine: Engine) -> None:
    """Environment variables of a container."""
    for place, one in source.mappings(*path):
        name, value = one.get("name"), one.get("value")
        if name in ("VLLM_ADDITIONAL_ARGS", "VLLM_EXTRA_ARGS") and isinstance(value, str):
            source.take(*place, "name")
            read_arguments(source, (*place, "value"), engine)
        elif name == "DYN_ROUTER_MODE":
            continue
        elif value is not None and not str(name).startswith(("DYN_", "KSERVE_")):
            if not is_secret_name(str(name)):
                engine.env[str(name)] = str(value)
                source.take(*place)
        elif source.get(*place, "valueFrom", "secretKeyRef") is not None:
            engine.env[str(name)] = {"env": str(name)}
            source.take(*place, "name")
            source.leave((*place, "valueFrom"), f"put it into render's Secret, as the key {name}")
        elif source.get(*place, "valueFrom", "fieldRef") is not None:
            source.leave(place, SETS_ITSELF)


def read_gpus(source: Source, path: Path, engine: Engine) -> None:
    """GPUs among limits and requests."""
    for part in ("limits", "requests"):
        for name in _GPU_NAMES:
            count = source.get(*path, part, name)
            if count is not None and str(count).isdecimal():
                engine.gpus = max(engine.gpus, int(count))
                source.take(*path, part, name)


def set_gpus_of_arguments(engine: Engine) -> None:
    """Where nothing else tells how many GPUs a worker has: parallelism does, if it is given."""
    if not engine.gpus and any(argument.startswith("-") for argument in engine.args):
        size = parallel_size(engine.args)
        engine.gpus = size if size > 1 else 0


# --- text ---------------------------------------------------------------------------------------

_ADVICE = (
    (r"image(PullPolicy|PullSecrets)?$|repository|\.tag$", "render --image, --engine-image"),
    (r"[pP]robe|healthCheck", "pods have probes of their own"),
    (r"resources\.|request(CPU|Memory)|limit(CPU|Memory)", "render --resources"),
    (r"volume|pvc|Volume|modelArtifacts\.size|sharedMemory", "render --models, --mount"),
    (r"envFrom|authSecret|hf_token|secret", "put it into the Secret that render names"),
    (r"nodeSelector|tolerations|affinity|runtimeClass", "patch the objects that render writes"),
    (r"podmonitor|monitoring|[sS]erviceMonitor", "render --monitoring"),
    (r"securityContext|SecurityContext", "pods run without rights"),
    (r"(frontend|Frontend|routerSpec).*(replicas|replicaCount)", "render --front-doors"),
    (r"terminationGrace", "follows runtime.drain_timeout_s"),
    (r"worker\.|multinode|nodeCount", "a worker over several nodes: launcher ray"),
)


def reason_of(path: Path, reason: str) -> str:
    """Why a field is not carried, and what takes its place."""
    text = path_text(path)
    return reason or next((why for word, why in _ADVICE if re.search(word, text)), "no counterpart")


def comments(source: Source, title: str) -> list[str]:
    """The head of the file: what it comes from, and a line for each field that is not carried."""
    total, carried = len(source.fields()), source.carried()
    lines = [f"# From {title}: {carried} of {total} fields are carried."]
    if left := source.left():
        lines.append("# Without counterpart in this file:")
    for path, value, reason in left:
        text = path_text(path)
        shown = HIDDEN if any(is_secret_name(str(step)) for step in path) else json.dumps(value)
        if len(shown) > _MOST_SHOWN:
            shown = f"{shown[: _MOST_SHOWN - 3]}..."
        lines.append(f"#   {text} = {shown}: {reason_of(path, reason)}")
    return lines


def named(names: Sequence[str], wanted: str) -> str:
    """``wanted`` as the name of an entry, different from ``names``."""
    clean = re.sub(r"[^A-Za-z0-9._-]", "-", wanted).strip("-._") or "engine"
    number = 2
    result = clean[:60]
    while result in names:
        result, number = f"{clean[:56]}-{number}", number + 1
    return result
