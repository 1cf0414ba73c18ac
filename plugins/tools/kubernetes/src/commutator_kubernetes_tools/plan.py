"""Which pods a configuration becomes, and what cannot become pods."""

from __future__ import annotations

import hashlib
import json
import math
import posixpath
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal
from urllib.parse import urlsplit

import attrs
import yaml
from attrs import evolve, field, frozen

from commutator.config.doors import door_path
from commutator.config.load import Loaded, load_config
from commutator.config.model import Config
from commutator.config.secrets import secrets_in
from commutator.config.show import shown
from commutator.config.tree import DEFAULT, Node
from commutator.config.yaml_file import Dumper
from commutator.contract.engine import EngineConfig
from commutator.contract.settings import Secret
from commutator.errors import ConfigError
from commutator.supervisor.specs import generation_of
from commutator.tokenizer.load import is_model_name
from commutator.trust import is_loopback

CONFIG_FOLDER = "/etc/commutator"
CONFIG_FILE = "commutator.yaml"
HOME = "/home/commutator"
MODELS = "/models"
"""Where the volume with models is mounted; models of the Hub are cached in a folder of it."""
PROBES_PORT = 8081
_SOMEWHERE = {
    "COMMUTATOR__CLUSTER__HOST__NAME": "a-pod",
    "COMMUTATOR__CLUSTER__HOST__LISTEN": "192.0.2.1",
}
"""As a pod's environment; the address is one of documentation (RFC 5737)."""
_ON_GPUS = {"vllm", "sglang", "trtllm"}
_IN_API = "kubernetes"
"""The kind of the registry that the API server keeps."""
_MAX_SLUG = 20
"""Characters: with the deployment's name and the digest of a revision they fit into a label."""
_PORTS_OF_ROOT = 1024
_SLUG_DIGEST = 6
_MIN_NOTICE_S = 5.0
_MORE_GRACE_S = 30
"""Seconds after the drain in which processes end."""


@frozen(kw_only=True)
class Mount:
    """A volume at a path of every pod that needs it."""

    path: str
    kind: Literal["secret", "configmap", "pvc", "claim", "empty", "host", "image"]
    """`image`: the path is in the image, and nothing is mounted."""
    source: str = ""
    """A name, a size or a path of the node, as the kind needs it."""

    def covers(self, path: str) -> bool:
        """Whether ``path`` is this one or below it."""
        return path == self.path or path.startswith(self.path.rstrip("/") + "/")


@frozen(kw_only=True)
class Options:
    """What the command line says, and a configuration does not."""

    name: str = "commutator"
    namespace: str | None = None
    image: str
    images: Mapping[str, str] = field(factory=dict)
    """Of engine entries, by name."""
    front_doors: int | None = None
    gpus: Mapping[str, int] = field(factory=dict)
    """How many each worker of an entry has, where the entry does not tell."""
    gpu_resource: str = "nvidia.com/gpu"
    resources: Mapping[str, Mapping[str, str]] = field(factory=dict)
    """Requests by entry, or `frontend`; memory is also the limit."""
    secret: str = ""
    """Name of the Secret with the environment variables; NAME-secrets by default."""
    models: Mount | None = None
    mounts: tuple[Mount, ...] = ()
    monitoring: str | None = None
    """The namespace that may read metrics; with it, a PodMonitor is written."""
    network_policy: bool = True

    @property
    def secret_name(self) -> str:
        return self.secret or f"{self.name}-secrets"


@frozen(kw_only=True)
class Port:
    """A TCP port of a front door."""

    name: str
    number: int
    https: bool
    is_http: bool
    is_admin: bool


@frozen(kw_only=True)
class Pods:
    """Equal pods: front doors, the workers of an engine entry, or everything in one."""

    component: str
    """Its label; also the end of its objects' names."""
    engine: str | None
    """The entry whose workers it runs."""
    arguments: tuple[str, ...]
    replicas: int
    image: str
    digest: str
    """Of all that its processes read and that takes effect by a new start."""
    gpus: int = 0
    ports: tuple[Port, ...] = ()
    variables: tuple[str, ...] = ()
    """Environment variables with secrets."""
    mounts: tuple[Mount, ...] = ()
    fetches: bool = False
    """Whether models of the Hub are downloaded before it starts."""
    resources: Mapping[str, str] = field(factory=dict)
    grace_s: int
    pre_stop_s: int = 0
    joins: bool
    """Whether it is a host of a cluster, by its own name and address."""


@frozen(kw_only=True)
class Plan:
    """A deployment in pods."""

    options: Options
    text: str
    """The configuration of all pods, as YAML."""
    front: Pods
    asks_api: bool
    """Whether pods ask the API server, where their registry is."""
    workers: tuple[Pods, ...]
    """Empty where the front door's pods run everything."""
    notes: tuple[str, ...]
    """What the one who deploys it should know."""

    @property
    def pods(self) -> tuple[Pods, ...]:
        return (self.front, *self.workers)


def plan_of(loaded: Loaded, options: Options) -> Plan:
    """The pods of ``loaded``. Raises ConfigError with everything that cannot be expressed."""
    config = loaded.config
    problems = [*_problems(config, options)]
    shares = config.registry.kind != "memory"
    problems += _split_problems(config) if shares else _whole_problems(config, options)
    mounts = (*options.mounts, *([options.models] if options.models else []))
    problems += _path_problems(config, mounts)
    if problems:
        raise ConfigError(problems, "Kubernetes")
    text = _text(loaded, shares)
    _must_load(text, shares)
    notes = list(_notes(config, options, shares=shares))
    if shares:
        front = _front_doors(config, options, mounts)
        names = _names(config)
        workers = tuple(
            _workers(config, engine, names[index], options, mounts)
            for index, engine in enumerate(config.engines)
        )
    else:
        front, workers = _whole(config, options, mounts), ()
    return Plan(
        options=options,
        text=text,
        front=front,
        asks_api=config.registry.kind == _IN_API,
        workers=workers,
        notes=tuple(notes),
    )


# --- what cannot be expressed -------------------------------------------------------------------


def _problems(config: Config, options: Options) -> Iterator[str]:
    if config.launcher.kind != "process":
        yield (
            f'launcher.kind: "{config.launcher.kind}" starts workers itself, and here Kubernetes '
            "does; remove the section `launcher`, as by --set launcher.kind=process"
        )
    for index, engine in enumerate(config.engines):
        yield from _engine_problems(f"engines[{index}]", engine)
    yield from _port_problems(config)
    yield from _name_problems(config, options)


def _engine_problems(path: str, engine: EngineConfig) -> Iterator[str]:
    if engine.nodes > 1:
        yield (
            f"{path}.nodes: a worker over {engine.nodes} nodes has no pods of its own here; start "
            "the server by a LeaderWorkerSet, and name it by `url`"
        )
    url = getattr(engine, "url", None)
    if url is not None and is_loopback(urlsplit(url).hostname or ""):
        yield (
            f"{path}.url: {url} is the pod itself there; give the address of the server's pod, "
            "such as http://vllm-0.vllm.NAMESPACE.svc:8000"
        )


def _port_problems(config: Config) -> Iterator[str]:
    for number, door in enumerate(config.frontend.doors):
        path = door_path(config.frontend, number)
        if not door.port:
            yield f"{path}.port: a Service needs a port that is known before; set one, such as 8000"
        elif door.port < _PORTS_OF_ROOT:
            yield (
                f"{path}.port: {door.port} needs rights that pods do not get; set 8000 or so, and "
                "give the Service or the Ingress before it the other one"
            )


def _name_problems(config: Config, options: Options) -> Iterator[str]:
    known = {str(engine.name) for engine in config.engines}
    chosen: tuple[tuple[str, Iterable[str]], ...] = (
        ("--engine-image", options.images),
        ("--gpus", options.gpus),
        ("--resources", set(options.resources) - {"frontend"}),
    )
    for option, names in chosen:
        for name in sorted(set(names) - known):
            yield f"{option} {name}: no engine has this name; there are: {', '.join(sorted(known))}"
    taken = {"frontend": "the front doors", "admin": "the door for operators"}
    for index, engine in enumerate(config.engines):
        slug = slug_of(str(engine.name))
        if slug in taken:
            yield (
                f'engines[{index}].name: "{engine.name}" and {taken[slug]} would have the same '
                f"objects, {options.name}-{slug}; choose another name"
            )
        taken[slug] = f'"{engine.name}"'


def _split_problems(config: Config) -> Iterator[str]:
    if config.cluster.tls is not None:
        yield (
            "cluster.tls: each pod would need a certificate with its own name. Remove it and set "
            "cluster.insecure: true; the NetworkPolicy lets nobody but these pods reach workers, "
            "and a service mesh encrypts between them"
        )
    elif not config.cluster.insecure:
        yield (
            "cluster.insecure: set it to true. Traffic between pods is not encrypted by "
            "Commutator; the NetworkPolicy lets nobody but these pods reach workers"
        )
    if config.runtime.secret is None:
        yield (
            "runtime.secret: pods prove to each other that they know it; set {env: "
            "COMMUTATOR_PASSPHRASE}, which comes from the Secret"
        )
    if config.planner is not None:
        yield (
            "planner: it starts workers of its own machine only. Remove it, and scale the "
            "StatefulSet of an engine; or remove `registry`, so that one pod runs everything"
        )
    if config.cluster.host.name is not None or config.cluster.host.spans_hosts:
        yield "cluster.host: each pod gets its own name and address; remove `name` and `listen`"


def _whole_problems(config: Config, options: Options) -> Iterator[str]:
    started = [e for e in config.engines if getattr(e, "url", None) is None]
    if getattr(config.registry, "address", None) is not None:
        yield (
            "registry.address: the registry is in one host's memory at a fixed address, which pods "
            "do not have; set registry: {kind: etcd, endpoints: [...]}"
        )
    if started and (options.front_doors or 1) > 1:
        yield (
            f"--front-doors {options.front_doors}: without a registry that pods share, one pod "
            "runs everything; set registry: {kind: etcd, endpoints: [...]}"
        )
    if len({options.images.get(str(e.name), options.image) for e in started}) > 1:
        yield (
            "--engine-image: one pod runs everything, in one image; set registry: {kind: etcd, "
            "endpoints: [...]} to run each engine in pods of its own"
        )


_PATH_NAMES = {"path", "source", "chat_template", "state_dir"}


def _paths(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """(where, path) of each option with the path of a file or folder."""
    if isinstance(value, Secret):
        if value.file is not None:
            yield f"{path}.file", value.file
        return
    items: Iterable[tuple[str, str, Any]] = ()
    if attrs.has(type(value)):
        names = [one.name for one in attrs.fields(type(value))]
        items = [(f"{path}.{n}" if path else n, n, getattr(value, n)) for n in names]
    elif isinstance(value, Mapping):
        items = [(f"{path}.{key}", str(key), item) for key, item in value.items()]
    elif isinstance(value, list | tuple):
        items = [(f"{path}[{index}]", "", item) for index, item in enumerate(value)]
    for inner, name, item in items:
        is_path = name in _PATH_NAMES or name.endswith(("_file", "_dir", "_path"))
        if isinstance(item, str) and is_path:
            if name != "source" or not (item.startswith("package:") or is_model_name(item)):
                yield inner, item
        else:
            yield from _paths(item, inner)


_WRITTEN = ("tiers", "observers", "operations", "runtime.state_dir")


def _path_problems(config: Config, mounts: Sequence[Mount]) -> Iterator[str]:
    for where, path in _paths(config):
        if not posixpath.isabs(path):
            yield (
                f"{_short(where, config)}: {path} is a path of this machine; give one that starts "
                "with /, and a volume that has it"
            )
        elif not any(mount.covers(path) for mount in mounts):
            folder = posixpath.dirname(path.partition("{")[0])
            yield (
                f"{_short(where, config)}: no volume has {path}; add {_advice(where, folder)}, or "
                f"--mount {folder}=image if it is in the image"
            )
    for mount in mounts:
        if mount.kind != "image" and mount.covers(CONFIG_FOLDER):
            yield f"--mount {mount.path}: it hides {CONFIG_FOLDER}; choose a folder below it"


def _advice(where: str, folder: str) -> str:
    if where.startswith(_WRITTEN):
        return f"--mount {folder}=empty:10Gi"
    if where.startswith("models") and where.endswith(".source"):
        return f"--models pvc:CLAIM, if it is below {MODELS}"
    if where.endswith(".file") or ".tls." in where or "key" in where.rpartition(".")[2]:
        return f"--mount {folder}=secret:NAME"
    return f"--mount {folder}=configmap:NAME"


def _short(where: str, config: Config) -> str:
    match = re.match(r"frontend\.doors\[(\d+)\]", where)
    if match is None:
        return where
    return door_path(config.frontend, int(match[1])) + where[match.end() :]


# --- the file -----------------------------------------------------------------------------------


def _text(loaded: Loaded, shares: bool) -> str:
    values = _given(loaded.tree, ())
    values.pop("launcher", None)
    numbers = sorted({gpu for engine in values["engines"] for gpu in engine.get("gpus") or ()})
    for engine in values["engines"]:
        gpus = engine.pop("gpus", None)  # a pod sees its own only, from 0
        if gpus and not shares:
            engine["gpus"] = [numbers.index(gpu) for gpu in gpus]
    for door in values.setdefault("frontend", {}).setdefault("doors", [{"kind": "http"}]):
        door["host"] = "0.0.0.0"  # noqa: S104 - the pod's address, which the NetworkPolicy guards
    return yaml.dump(values, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=100)


def _given(node: Node, steps: tuple[str, ...]) -> Any:
    """What sources have set; of doors, also what their short form means."""
    if isinstance(node.value, dict):
        whole = steps[:2] == ("frontend", "doors")
        return {
            key: _given(item, (*steps, key))
            for key, item in node.value.items()
            if not key.startswith("x-") and (whole or item.origin != DEFAULT)
        }
    if isinstance(node.value, list):
        return [_given(item, steps) for item in node.value]
    return node.value


def _must_load(text: str, shares: bool) -> None:
    """Raises ConfigError where a pod would refuse the file."""
    from pathlib import Path
    from tempfile import TemporaryDirectory

    with TemporaryDirectory() as folder:
        file = Path(folder) / CONFIG_FILE
        file.write_text(text, encoding="utf-8")
        try:
            load_config([file], environ=_SOMEWHERE if shares else {})
        except ConfigError as error:
            lines = [re.sub(rf"^{re.escape(str(file))}:\d+: ", "", one) for one in error.problems]
            raise ConfigError(lines, "the file of the pods") from error


def _digest(*parts: Any) -> str:
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _of_doors(config: Config) -> Any:
    values = shown(config)
    values.pop("launcher")
    del values["log"]["level"]
    for engine in values["engines"]:
        for key in ("replicas", "gpus", "start_timeout_s", "python"):
            engine.pop(key, None)
    return values


def _of_workers(config: Config, engine: EngineConfig) -> Any:
    model = next(one for one in config.models if one.name == engine.model)
    same: Any = engine
    if hasattr(engine, "gpus"):  # their numbers do not matter in a pod
        same = evolve(same, gpus=())
    log = {"format": config.log.format}
    parts = (config.runtime, config.registry, config.cluster, config.plugins, config.limiter)
    return [generation_of(same, model, config.tiers), *map(shown, parts), log]


# --- pods ---------------------------------------------------------------------------------------


def slug_of(name: str) -> str:
    """``name`` as a part of names of objects: lower case, digits and dashes."""
    slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "x"
    if len(slug) <= _MAX_SLUG:
        return slug
    digest = hashlib.sha256(name.encode()).hexdigest()[:_SLUG_DIGEST]
    return f"{slug[: _MAX_SLUG - _SLUG_DIGEST - 1]}-{digest}"


def _names(config: Config) -> list[str]:
    return [slug_of(str(engine.name)) for engine in config.engines]


def _file() -> str:
    return f"{CONFIG_FOLDER}/{CONFIG_FILE}"


def _grace(config: Config) -> dict[str, int]:
    runtime = config.runtime
    pause = 0 if runtime.drain_notice_s >= _MIN_NOTICE_S else math.ceil(_MIN_NOTICE_S)
    total = runtime.drain_notice_s + runtime.drain_timeout_s + pause + _MORE_GRACE_S
    return {"pre_stop_s": pause, "grace_s": math.ceil(total)}


def _ports(config: Config) -> tuple[Port, ...]:
    kinds = [door.kind for door in config.frontend.doors]
    return tuple(
        Port(
            name="admin" if _is_admin(door) else door.kind[:12] + (str(number) if twice else ""),
            number=door.port,
            https=getattr(door, "tls", None) is not None,
            is_http=door.kind == "http",
            is_admin=_is_admin(door),
        )
        for number, door in enumerate(config.frontend.doors)
        for twice in [kinds[:number].count(door.kind) > 0]
    )


def _is_admin(door: Any) -> bool:
    return door.operations == "open" and not door.protocols


_OF_DOORS = ("frontend", "auth", "observers", "operations", "tracing", "router", "disaggregation")
_OF_WORKERS = ("tiers",)


def _needs(where: str, *, doors: bool, engines: Sequence[int]) -> bool:
    """Whether pods of ``doors``, or of entries, read the option at ``where``."""
    section = re.split(r"[.\[]", where, maxsplit=1)[0]
    if section in _OF_DOORS:
        return doors
    if section in _OF_WORKERS:
        return bool(engines)
    if match := re.match(r"engines\[(\d+)\]\.(\w+)", where):
        return int(match[1]) in engines or (doors and match[2] != "env")
    return True


def _mounts_of(
    config: Config, mounts: Sequence[Mount], *, doors: bool, engines: Sequence[int]
) -> tuple[Mount, ...]:
    paths = [*_paths(config)]
    paths += [
        (f"models[{i}].source", MODELS)
        for i, m in enumerate(config.models)
        if is_model_name(m.source)
    ]
    chosen = []
    for mount in mounts:
        users = [where for where, path in paths if mount.covers(path)]
        used = [_needs(where, doors=doors, engines=engines) for where in users]
        if mount.kind != "image" and (any(used) or not users):
            chosen.append(mount)
    return tuple(chosen)


def _variables_of(config: Config, *, doors: bool, engines: Sequence[int]) -> tuple[str, ...]:
    found = {
        secret.env
        for where, secret in secrets_in(config)
        if secret.env is not None and _needs(where, doors=doors, engines=engines)
    }
    return tuple(sorted(found))


def _front_doors(config: Config, options: Options, mounts: Sequence[Mount]) -> Pods:
    return Pods(
        component="frontend",
        engine=None,
        arguments=("frontend", _file()),
        replicas=options.front_doors or 2,
        image=options.image,
        digest=_digest(_of_doors(config)),
        ports=_ports(config),
        variables=_variables_of(config, doors=True, engines=()),
        mounts=_mounts_of(config, mounts, doors=True, engines=()),
        fetches=_fetches(config),
        resources=options.resources.get("frontend", {}),
        joins=True,
        **_grace(config),
    )


def _workers(
    config: Config, engine: EngineConfig, slug: str, options: Options, mounts: Sequence[Mount]
) -> Pods:
    index = config.engines.index(engine)
    probes = f"operations=[{{kind: probes, probe_port: {PROBES_PORT}}}]"
    name = str(engine.name)
    return Pods(
        component=slug,
        engine=name,
        arguments=(
            *("worker", "run", _file(), "--engine", name, "--replicas", "1"),
            *("--set", probes),
        ),
        replicas=engine.replicas,
        image=options.images.get(name, options.image),
        digest=_digest(_of_workers(config, engine)),
        gpus=_gpus(engine, options),
        variables=_variables_of(config, doors=False, engines=(index,)),
        mounts=_mounts_of(config, mounts, doors=False, engines=(index,)),
        fetches=_fetches(config),
        resources=options.resources.get(name, {}),
        joins=True,
        grace_s=_grace(config)["grace_s"],
    )


def _whole(config: Config, options: Options, mounts: Sequence[Mount]) -> Pods:
    every = range(len(config.engines))
    images = {
        options.images.get(str(e.name), options.image)
        for e in config.engines
        if getattr(e, "url", None) is None
    }
    resources: dict[str, str] = dict(options.resources.get("frontend", {}))
    for engine in config.engines:
        resources |= options.resources.get(str(engine.name), {})
    return Pods(
        component="frontend",
        engine=None,
        arguments=("serve", _file()),
        replicas=options.front_doors or 1,
        image=images.pop() if images else options.image,
        digest=_digest(_of_doors(config), [_of_workers(config, e) for e in config.engines]),
        gpus=_gpus_together(config, options),
        ports=_ports(config),
        variables=_variables_of(config, doors=True, engines=every),
        mounts=_mounts_of(config, mounts, doors=True, engines=every),
        fetches=_fetches(config),
        resources=resources,
        joins=False,
        **_grace(config),
    )


def _fetches(config: Config) -> bool:
    return any(is_model_name(model.source) for model in config.models)


# --- GPUs ---------------------------------------------------------------------------------------

_PARALLEL = {
    "--tensor-parallel-size": ("--tensor-parallel-size", "-tp", "--tp-size", "--tp", "--tp_size"),
    "--pipeline-parallel-size": ("--pipeline-parallel-size", "-pp", "--pp-size", "--pp"),
    "--data-parallel-size": ("--data-parallel-size", "-dp"),
}


def _gpus(engine: EngineConfig, options: Options) -> int:
    """How many GPUs a worker needs, as the entry says."""
    if (given := options.gpus.get(str(engine.name))) is not None:
        return given
    if getattr(engine, "url", None) is not None:
        return 0
    if own := getattr(engine, "gpus", ()):
        return len(own) // engine.replicas
    if engine.kind in _ON_GPUS:
        return parallel_size(getattr(engine, "args", ()))
    return 1 if str(getattr(engine, "device", "")).startswith("cuda") else 0


def parallel_size(arguments: Sequence[str]) -> int:
    """The GPUs of a server with these arguments: tensor by pipeline by data parallelism."""
    total = 1
    for spellings in _PARALLEL.values():
        for index, argument in enumerate(arguments):
            name, equals, value = argument.partition("=")
            if name in spellings:
                text = value if equals else (arguments[index + 1 : index + 2] or ("1",))[0]
                total *= int(text) if text.isdecimal() else 1
    return total


def _gpus_together(config: Config, options: Options) -> int:
    own = {gpu for engine in config.engines for gpu in getattr(engine, "gpus", ())}
    others = [e for e in config.engines if not getattr(e, "gpus", ()) or e.name in options.gpus]
    return len(own) + sum(_gpus(engine, options) * engine.replicas for engine in others)


def _notes(config: Config, options: Options, *, shares: bool) -> Iterator[str]:
    hub = [m.name for m in config.models if is_model_name(m.source)]
    if hub and options.models is None:
        yield (
            f"each pod downloads {', '.join(hub)} when it is created; --models pvc:CLAIM keeps "
            "models in a volume"
        )
    mounts = (*options.mounts, *([options.models] if options.models else []))
    for mount in mounts:
        if mount.kind == "host":
            yield f"{mount.path} is of the node, which Pod Security `restricted` refuses"
    if not shares and (options.front_doors or 1) > 1:
        yield "front doors in several pods route by their own load; a shared registry ends this"
    if options.monitoring and config.auth and not any(_is_admin(d) for d in config.frontend.doors):
        yield "metrics ask for a key; `frontend.admin` serves them without one, to Prometheus only"
    if config.registry.kind == _IN_API:
        yield (
            "create the registry's objects once: python -m commutator_kubernetes crds, and "
            f"python -m commutator_kubernetes role {options.name}"
        )
    if shares and options.network_policy:
        yield "connections between pods are plain; the network has to enforce NetworkPolicy"
