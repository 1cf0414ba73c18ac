"""What engines need of this machine, found out before a process is started.

The environment of a server is looked into by a short program that its own Python runs, which
imports nothing of it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

from attrs import frozen

from commutator.contract.engine import ModelConfig
from commutator.errors import ConfigError
from commutator.tokenizer import locate_model
from commutator_engine_kit.launching import (
    PythonServerConfig,
    argument_names,
    argument_value,
    python_at,
    revealed,
)
from commutator_engine_kit.model_files import directory_for

__all__ = [
    "Environment",
    "ServerNeeds",
    "gpu_memory_bytes",
    "machine_memory_bytes",
    "server_problems",
    "server_warnings",
    "size_text",
]

_MEMINFO = Path("/proc/meminfo")
_CGROUP_LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)
_TIMEOUT_S = 60.0
_OTHER_DEVICES = (Path("/dev/kfd"), Path("/dev/dxg"), Path("/dev/accel"))
"""Of AMD, of WSL, of others: where one is, nobody concludes that there is no GPU."""
_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.gguf")
_MB = 10**6
_PROBE = """
import importlib.metadata, importlib.util, json, sys
packages, distributions = json.loads(sys.argv[1])
def version(name):
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
print(json.dumps([
    [name for name in packages if importlib.util.find_spec(name) is not None],
    {name: version(name) for name in distributions},
]))
"""


@frozen(kw_only=True)
class ServerNeeds:
    """What an engine's servers need in the environment of the option `python`."""

    title: str
    """The engine's name for people."""
    package: str
    """The Python package of the server."""
    distributions: tuple[str, ...]
    """What may have installed it; the first one is the build for NVIDIA GPUs."""
    made_by: str
    """The command that installs it, for people."""
    without_gpu: str
    """What to do on a machine without a GPU."""
    oldest: str
    """The oldest version that it is tested with."""
    ours: Mapping[str, str]
    """Arguments that Commutator sets itself, each with advice."""
    context_argument: str
    """The argument with the longest prompt and answer together."""
    parallel_arguments: tuple[tuple[str, ...], ...]
    """The names of each argument by which the number of GPUs of one server is multiplied."""
    shrinking_arguments: tuple[str, ...]
    """Arguments with which weights take less memory than their files, or are nowhere as files."""

    def gpus_of_one(self, args: Sequence[str]) -> int:
        """How many GPUs a server with these arguments uses."""
        gpus = 1
        for names in self.parallel_arguments:
            values = [argument_value(args, name) for name in names]
            gpus *= next((int(value) for value in values if value and value.isdigit()), 1)
        return gpus

    @property
    def advice(self) -> str:
        """What to do about a Python that lacks the server."""
        return f"run `{self.made_by}`, or set `python` to that of the environment that has it"


@frozen(kw_only=True)
class Environment:
    """What an environment has, of what was looked for."""

    packages: frozenset[str]
    versions: Mapping[str, str | None]
    """By distribution."""


def server_problems(
    config: PythonServerConfig,
    model: ModelConfig,
    needs: ServerNeeds,
    further: Iterable[str] = (),
) -> Iterator[str]:
    """Why a server cannot be launched here, in the form of ``EngineConnector.problems``.

    ``config`` has no `url`. ``further`` problems are looked for if nothing else is wrong.
    """
    yield from list(_server_problems(config, model, needs)) or further


def _server_problems(
    config: PythonServerConfig, model: ModelConfig, needs: ServerNeeds
) -> Iterator[str]:
    try:
        argument_names(config.args, needs.ours, config.where)
        python = python_at(config.python, needs.advice, config.where)
        variables = revealed(config.env)
    except ConfigError as error:
        yield from error.problems
        return
    found = _environment(python, needs, variables)
    if isinstance(found, str):
        yield f"python: {python} cannot be run: {found}; {needs.advice}"
        return
    if needs.package not in found.packages:
        yield f"python: {python} has no {needs.title}; {needs.advice}"
        return
    if config.needs_nixl and not found.packages & {"nixl", "nixl_cu12", "nixl_cu13"}:
        yield f"role: NIXL is not installed beside {python}; {needs.advice}"
    yield from _device_problems(config, needs, found)
    yield from _model_problems(config, model, needs)


def server_warnings(config: PythonServerConfig, needs: ServerNeeds) -> Iterator[str]:
    """What may go wrong with a server that ``server_problems`` finds possible."""
    python = python_at(config.python, needs.advice, config.where)
    found = _environment(python, needs, revealed(config.env))
    if isinstance(found, str):
        return
    for version in filter(None, found.versions.values()):
        if _numbers(version) < _numbers(needs.oldest):
            yield (
                f"python: {needs.title} {version} is older than {needs.oldest}, the oldest that is "
                f"tested; {needs.advice}"
            )


def _numbers(version: str) -> tuple[int, ...]:
    """The release of a version: (0, 5, 23) of "0.5.23.post1"."""
    parts = []
    for part in version.partition("+")[0].split("."):
        if not part.isdigit():
            break
        parts.append(int(part))
    return tuple(parts)


def _device_problems(
    config: PythonServerConfig, needs: ServerNeeds, found: Environment
) -> Iterator[str]:
    memory = gpu_memory_bytes()
    if memory is None:
        return
    version = found.versions[needs.distributions[0]]
    for_nvidia = version is not None and "+" not in version  # others name their build there
    if not memory and for_nvidia and not config.on_cpu:
        yield (
            f"python: {needs.title} {version} is for NVIDIA GPUs, and this machine has none; "
            f"{needs.without_gpu}"
        )
    for number in config.gpus:
        if number >= len(memory):
            there = f"0 to {len(memory) - 1}" if memory else "none"
            yield f"gpus: there is no GPU {number}; this machine has {there}"


def _model_problems(
    config: PythonServerConfig, model: ModelConfig, needs: ServerNeeds
) -> Iterator[str]:
    args = config.args
    try:
        source = locate_model(model.source)
    except ConfigError:
        return  # other checks report it
    shrunk = any(argument_value(args, name) is not None for name in needs.shrinking_arguments)
    weights_bytes = sum(
        file.stat().st_size
        for pattern in _WEIGHTS
        for file in ([source] if source.is_file() else source.glob(pattern))
        if file.match(pattern)
    )
    if not weights_bytes and not shrunk:
        yield f"model: {source} has no weights: no {' or '.join(_WEIGHTS[:2])} file"
    if source.is_file() and (problem := _unwritable(directory_for(source))) is not None:
        yield f"model: GGUF is converted for {needs.title}, and {problem}; set XDG_CACHE_HOME"
    longest = _context_length(source)
    asked = argument_value(args, needs.context_argument) or model.max_model_len
    if longest is not None and str(asked).isdigit() and int(str(asked)) > longest:
        given = argument_value(args, needs.context_argument) is not None
        option = f"args: {needs.context_argument}" if given else "model: max_model_len"
        yield (
            f"{option} {asked} is more than the {longest:,} tokens that the model is made for; "
            f"{needs.title} would refuse to start"
        )
    if not shrunk:
        yield from _memory_problems(config, needs, weights_bytes)


def _memory_problems(
    config: PythonServerConfig, needs: ServerNeeds, weights_bytes: int
) -> Iterator[str]:
    memory = gpu_memory_bytes()
    if memory and not config.on_cpu:
        each = needs.gpus_of_one(config.args)
        if weights_bytes > (total := each * max(memory)):
            yield (
                f"model: its weights of {size_text(weights_bytes)} are more than the "
                f"{size_text(total)} of {each} GPU{'s' if each > 1 else ''}; use more, by "
                f"{needs.parallel_arguments[0][0]} in `args`, or a smaller model"
            )
        return
    total_bytes = machine_memory_bytes()
    needed = weights_bytes * config.replicas // config.nodes
    if not memory and total_bytes is not None and needed > total_bytes:
        times = "" if config.replicas == 1 else f", {config.replicas} times,"
        fewer = "a smaller model" if config.replicas == 1 else "fewer replicas"
        yield (
            f"model: its weights of {size_text(weights_bytes)}{times} are more than this machine's "
            f"{size_text(total_bytes)} of memory; use {fewer}"
        )


def _context_length(source: Path) -> int | None:
    """What a Hugging Face model is made for; None where it is scaled, or not told."""
    try:
        raw = json.loads((source / "config.json").read_text(encoding="utf-8"))
        text = raw.get("text_config", raw)
        if text.get("rope_scaling") or text.get("rope_parameters"):
            return None
        return int(text["max_position_embeddings"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _unwritable(folder: Path) -> str | None:
    for parent in (folder, *folder.parents):
        if parent.exists():
            return None if os.access(parent, os.W_OK) else f"{parent} cannot be written"
    return None


def _environment(
    python: str, needs: ServerNeeds, variables: Mapping[str, str]
) -> Environment | str:
    packages = (needs.package, "nixl", "nixl_cu12", "nixl_cu13")
    return _look(python, packages, needs.distributions, tuple(sorted(variables.items())))


@cache
def _look(
    python: str,
    packages: tuple[str, ...],
    distributions: tuple[str, ...],
    variables: tuple[tuple[str, str], ...],
) -> Environment | str:
    """What the environment of ``python`` has, or why it cannot be run."""
    try:
        done = subprocess.run(  # noqa: S603 - the configuration names the program
            [python, "-c", _PROBE, json.dumps([packages, distributions])],
            env={**os.environ, **dict(variables)},
            capture_output=True,
            text=True,
            check=False,
            timeout=_TIMEOUT_S,
        )
        if done.returncode:
            lines = done.stderr.strip().splitlines()
            return lines[-1] if lines else f"it exits with status {done.returncode}"
        there, versions = json.loads(done.stdout.strip().splitlines()[-1])
    except (OSError, subprocess.TimeoutExpired, ValueError, IndexError) as error:
        return str(error)
    return Environment(packages=frozenset(there), versions=versions)


@cache
def gpu_memory_bytes() -> tuple[int, ...] | None:
    """The memory of each NVIDIA GPU of this machine; None where GPUs cannot be counted."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None if any(path.exists() for path in _OTHER_DEVICES) else ()
    query = ["--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(  # noqa: S603
            [program, *query],
            capture_output=True,
            text=True,
            check=False,
            timeout=_TIMEOUT_S,
        )
        return tuple(int(line) << 20 for line in done.stdout.split() if not done.returncode)
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return None


def machine_memory_bytes() -> int | None:
    """The memory of this machine, or of this container if that is less; None if not known."""
    found = []
    try:
        lines = _MEMINFO.read_text().splitlines()
        found += [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemTotal:")]
    except (OSError, ValueError, IndexError):
        pass
    for file in _CGROUP_LIMITS:
        try:
            found.append(int(file.read_text()))
        except (OSError, ValueError):  # not there, or "max"
            continue
    return min(found, default=None)


def size_text(size_bytes: int) -> str:
    """In the notation of options, at most as large as it is, such as "1.5GB"."""
    for factor, unit in ((10**9, "GB"), (_MB, "MB")):
        if size_bytes >= factor:
            return f"{size_bytes * 1000 // factor / 1000:.15g}{unit}"
    return f"{size_bytes}B"
