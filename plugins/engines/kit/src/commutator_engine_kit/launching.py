"""What connectors share that start a server, or attach to one by the option `url`."""

from __future__ import annotations

import json
import logging
import os
import shlex
import subprocess
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, TypedDict, TypeVar
from urllib.parse import urlsplit

import attrs
from attrs import Attribute, frozen

from commutator.config.secrets import HIDDEN, hidden_arguments, hidden_values
from commutator.contract.engine import (
    EngineConfig,
    EngineConnector,
    HttpRelay,
    LaunchContext,
    ModelConfig,
    NodeGroup,
)
from commutator.contract.launcher import LaunchPlan
from commutator.contract.settings import NonNegativeInt, Secret, setting
from commutator.contract.tier import TierConfig
from commutator.contract.worker import EventSource
from commutator.errors import ConfigError
from commutator.trust import is_loopback, secret_of_this_process

__all__ = [
    "RANKS_ON_LOOPBACK",
    "HttpRelay",
    "NodeGroup",
    "PythonServerConfig",
    "ServerAccess",
    "ServerConfig",
    "ServerConnector",
    "api_key_at",
    "argument_names",
    "argument_value",
    "compact_json",
    "event_settings",
    "event_sockets",
    "log_command",
    "missing_plugin",
    "only_to_attach",
    "only_to_launch",
    "python_at",
    "revealed",
    "server_environment",
    "server_plan",
    "warn_of_unused_tiers",
    "with_defaults",
    "write_tiers",
]

log = logging.getLogger(__name__)
RANKS_ON_LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
"""Environment of a server whose ranks are all on this machine.

PyTorch's backends would listen at the address of the machine's name, also for a single rank, which
other hosts may reach; they ask for no proof.
"""
_LONGEST_SOCKET_PATH = 107
_LOOK_S = 60.0
"""For a Python to say whether it has a package; one that takes longer counts as without it."""
"""Bytes."""


def _http_url(_config: Any, field: Attribute[Any], url: str | None) -> None:
    """Require an HTTP address or None."""
    if url is not None and not url.startswith(("http://", "https://")):
        raise ValueError(
            f"{field.name}: expected http://HOST:PORT or https://HOST:PORT, got {url!r}"
        )


def only_to_launch(config: Any, field: Attribute[Any], value: Any) -> None:
    """Refuse an option that has no effect beside ``url``."""
    if config.url is not None and value != field.default:
        raise ValueError(f"{field.name}: without effect with `url`: that server is already running")


def only_to_attach(config: Any, field: Attribute[Any], value: Any) -> None:
    """Refuse an option that has no effect without ``url``."""
    if config.url is None and value != field.default:
        raise ValueError(
            f"{field.name}: only with `url`; set by Commutator for a server that it launches"
        )


def _shared_evenly(config: Any, field: Attribute[Any], gpus: Sequence[int]) -> None:
    """Refuse a number of GPUs that is not a multiple of the replicas."""
    only_to_launch(config, field, gpus)
    if len(gpus) % config.replicas:
        raise ValueError(f"gpus: {len(gpus)} GPUs cannot be shared by {config.replicas} replicas")


@frozen(kw_only=True)
class ServerConfig(EngineConfig):
    """A running server at `url`, or servers to launch when there is no `url`."""

    url: str | None = setting(
        "Attach to the server at this address, http://HOST:PORT. It reports its own model.",
        None,
        validator=_http_url,
    )
    env: Mapping[str, str | Secret] = setting(
        "Environment variables of the server. {env: NAME} or {file: PATH} instead of a value reads "
        "it from Commutator's environment or a file, for a secret such as HF_TOKEN.",
        {},
        validator=only_to_launch,
    )
    gpus: tuple[NonNegativeInt, ...] = setting(
        "GPU numbers, divided evenly among the replicas in this order; by default each server uses "
        "all visible GPUs.",
        (),
        validator=_shared_evenly,
    )

    @property
    def where(self) -> str:
        """Names the entry in errors."""
        return f"engine {self.name or self.kind}"


@frozen(kw_only=True)
class PythonServerConfig(ServerConfig):
    """Servers that an environment's own Python runs: with an API key, and KV events."""

    python: str
    args: tuple[str, ...]
    api_key: Secret | None = setting(
        "The `--api-key` of the server at `url`.", None, validator=only_to_attach
    )
    kv_events: str | None = setting(
        "Where the server at `url` publishes KV events, tcp://HOST:PORT. Needed when the server "
        "does not report it (older versions), or reports an address that cannot be reached from "
        "here.",
        None,
        validator=only_to_attach,
    )
    kv_events_replay: str | None = setting(
        "The replay endpoint that belongs to `kv_events`, tcp://HOST:PORT.",
        None,
        validator=only_to_attach,
    )

    @property
    def event_source(self) -> EventSource | None:
        """Where the server at `url` publishes KV events, if the options say so."""
        if self.kv_events is None:
            return None
        return EventSource(endpoint=self.kv_events, replay_endpoint=self.kv_events_replay)

    @property
    def on_cpu(self) -> bool:
        """Whether the options say that it runs without a GPU."""
        return False

    @property
    def needs_nixl(self) -> bool:
        """Whether its `role` makes it hand KV over by NIXL."""
        return self.role != "both"


class ServerAccess(TypedDict, total=False):
    """How a client reaches a server: arguments of ``HttpServer``."""

    api_key: str | None
    answer_timeout_s: float
    of_cluster: bool


ConfigT = TypeVar("ConfigT", bound=PythonServerConfig)


class ServerConnector(EngineConnector[ConfigT]):
    """Launches servers with the configured tiers, or attaches to the server at `url`.

    Other hosts reach them by the relay of their host, also one at a loopback `url`.
    """

    uses_tiers = True
    secures_connections = True
    launch_module: ClassVar[str]
    """A module with functions ``problems``, ``warnings`` and ``launch_plan`` of servers that are to
    be launched; it is imported on first use, because its imports may be heavy."""

    @property
    def _launch(self) -> Any:
        return import_module(self.launch_module)

    def problems(
        self, config: ConfigT, model: ModelConfig, tiers: Sequence[TierConfig]
    ) -> Iterable[str]:
        found: Iterable[str] = ()
        if config.url is None:
            found = self._launch.problems(config, model, tiers)
        return found

    def warnings(self, config: ConfigT, model: ModelConfig) -> Iterable[str]:
        del model
        found: Iterable[str] = () if config.url is not None else self._launch.warnings(config)
        return found

    def devices(self, config: ConfigT) -> Sequence[int]:
        return config.gpus

    @abstractmethod
    def paths(self) -> HttpRelay:
        """The paths that front doors need; the key is added to them."""

    def relay(self, config: ConfigT) -> HttpRelay | None:
        if config.url is not None and not is_loopback(urlsplit(config.url).hostname or ""):
            return None
        key = None if config.api_key is None else config.api_key.reveal()
        return attrs.evolve(self.paths(), api_key=key)

    def access(self, config: ConfigT, address: str) -> ServerAccess:
        """How to reach a server that runs already, was launched, or is relayed."""
        if address != config.url:
            return {"api_key": api_key_at(address), "of_cluster": True}
        return {"api_key": None if config.api_key is None else config.api_key.reveal()}

    def launch_plan(self, config: ConfigT, context: LaunchContext) -> LaunchPlan | None:
        if config.url is not None:
            warn_of_unused_tiers(context)
            return None
        plan: LaunchPlan = self._launch.launch_plan(config, context)
        return plan

    def attach_address(self, config: ConfigT) -> str:
        assert config.url is not None
        return config.url


def warn_of_unused_tiers(context: LaunchContext) -> None:
    """Called for a worker whose server is at `url`."""
    if context.tiers:
        log.warning(
            "worker %s: the configured tiers are not used, because the server was attached to by "
            "`url`; it uses only what its own options configure",
            context.worker_id,
        )


def server_environment(
    config: ServerConfig, context: LaunchContext, defaults: Mapping[str, str]
) -> dict[str, str]:
    """The environment of a launched server: ``defaults``, overridden by `env`, and its GPUs.

    Raises ConfigError when a secret in `env` cannot be read.
    """
    env = {**defaults, **revealed(config.env)}
    if context.devices:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, context.devices))
    return env


def revealed(env: Mapping[str, str | Secret]) -> dict[str, str]:
    """``env`` with the values of its secrets. Raises ConfigError when one cannot be read."""
    return {
        name: value.reveal() if isinstance(value, Secret) else value for name, value in env.items()
    }


def server_plan(
    config: ServerConfig,
    context: LaunchContext,
    command: Sequence[str],
    env: Mapping[str, str],
    address: str,
) -> LaunchPlan:
    """The plan of a server, whose command line it logs. A GGUF file is converted before."""
    # Both load tokenizers, which a list of plugins needs not.
    from commutator.tokenizer import locate_model
    from commutator_engine_kit.model_files import start_command

    log_command(config, context, env, command)
    argv = start_command(locate_model(context.model.source), command)
    return LaunchPlan(argv=argv, address=address, env=env)


def log_command(
    config: ServerConfig, context: LaunchContext, env: Mapping[str, str], command: Sequence[str]
) -> None:
    """Log a server's command line, so that it can be run by hand, without the values of secrets.

    Secrets are those in `env`, and every variable and argument named like one.
    """
    secrets = {name for name, value in config.env.items() if isinstance(value, Secret)}
    known = {name: HIDDEN if name in secrets else value for name, value in env.items()}
    variables = (f"{name}={value}" for name, value in sorted(hidden_values(known).items()))
    shown = [*variables, *hidden_arguments(command)]
    log.info("%s: %s", context.worker_id, shlex.join(shown))


def api_key_at(address: str) -> str | None:
    """The API key that a launched server at ``address`` asks for; None in a process of no run.

    It is made from the run's secret, so that every process of the run can compute it. Each address
    has its own: a process that gets one, by listening at a port that a dead server left, can use it
    nowhere else.
    """
    secret = secret_of_this_process()
    return None if secret is None else secret.mac("engine API key", address.encode()).hex()


def event_sockets(context: LaunchContext) -> tuple[str, str] | None:
    """ZMQ endpoints for a server's KV events and their replay, in the worker's private folder.

    None when their paths are too long for Unix sockets.
    """
    paths = [str(context.state_dir / name) for name in ("events", "replay")]
    if max(len(os.fsencode(path)) for path in paths) > _LONGEST_SOCKET_PATH:
        log.warning(
            "%s: its folder's name is too long for sockets, so KV events are published over TCP, "
            "to every user of this machine; give the engine a shorter name",
            context.worker_id,
        )
        return None
    events, replay = (f"ipc://{path}" for path in paths)
    return events, replay


def event_settings(endpoint: str, replay_endpoint: str, **more: object) -> str:
    """The value of `--kv-events-config`: where a server publishes KV events, over ZMQ."""
    ends = {"endpoint": endpoint, "replay_endpoint": replay_endpoint}
    return compact_json({"publisher": "zmq", **ends, **more})


def compact_json(value: object) -> str:
    """An argument's value, as JSON."""
    return json.dumps(value, separators=(",", ":"))


def with_defaults(ours: Mapping[str, str], args: Sequence[str]) -> tuple[str, ...]:
    """Those of our arguments that `args` does not set, then `args`; an empty value is a flag's."""
    given = {argument.partition("=")[0] for argument in args}
    added = [(name, value) for name, value in ours.items() if name not in given]
    return (*(part for pair in added for part in pair if part), *args)


def argument_names(args: Sequence[str], ours: Mapping[str, str], where: str) -> set[str]:
    """The names of the arguments in `args`.

    Raises ConfigError for those that Commutator sets: ``ours`` maps each to advice.
    """
    given = {argument.partition("=")[0] for argument in args}
    if problems := [
        f"args: {name} is set by Commutator; {ours[name]}" for name in sorted(given & ours.keys())
    ]:
        raise ConfigError(problems, where)
    return given


def python_at(path: str, advice: str, where: str) -> str:
    """The path of an environment's Python. Raises ConfigError with ``advice`` if it is missing."""
    # Not resolved: an environment's Python is a link, and finds its environment by its own path.
    python = Path(path).expanduser().absolute()
    if not python.is_file():
        raise ConfigError([f"python: there is no {python}; {advice}"], where)
    return str(python)


def write_tiers(context: LaunchContext) -> Path:
    """Write the worker's tiers to a file for ``read_tiers``; a command line would show secrets."""
    file = context.state_dir / "tiers.json"
    file.write_text(json.dumps({"tiers": [attrs.asdict(tier) for tier in context.tiers]}))
    return file


def missing_plugin(path: str, distribution: str, made_by: str) -> str | None:
    """The problem if that Python lacks the plugin; the command ``made_by`` installs it."""
    package, python = distribution.replace("-", "_"), Path(path).expanduser().absolute()
    look = f"import sys; from importlib.util import find_spec; sys.exit(not find_spec({package!r}))"
    with suppress(subprocess.TimeoutExpired):
        done = subprocess.run([python, "-c", look], check=False, timeout=_LOOK_S)  # noqa: S603
        if not done.returncode:
            return None
    return (
        f"{python} lacks our plugins: install {distribution} and the packages of the "
        f"tiers in that environment, for example with `{made_by}`"
    )


def argument_value(args: Sequence[str], name: str) -> str | None:
    """The value of the argument ``name`` in a command line; "" for one without; None: not there."""
    found = None
    for index, argument in enumerate(args):
        head, equals, value = argument.partition("=")
        if head == name:
            following = args[index + 1] if index + 1 < len(args) else ""
            found = value if equals else ("" if following.startswith("-") else following)
    return found
