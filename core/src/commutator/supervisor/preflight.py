"""Checks of the machine before any process starts."""

from __future__ import annotations

import logging
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from commutator.config.doors import door_path
from commutator.config.model import Config
from commutator.config.secrets import secrets_in
from commutator.contract.door import FrontendConfig
from commutator.contract.engine import EngineConfig, EngineConnector, ModelConfig
from commutator.contract.protocol import RPC_METHODS, DoorFacts, ProtocolConfig, Route
from commutator.contract.tier import TierConfig
from commutator.errors import ConfigError
from commutator.plugins import PluginHost
from commutator.supervisor.hosts import cluster_warnings, host_problems
from commutator.supervisor.planner.setup import planner_problems
from commutator.tokenizer.load import (
    download,
    downloaded,
    is_model_name,
    load_text_model,
    locate_model,
)
from commutator.tokenizer.text_model import ChatTemplate
from commutator.tracing import DISTRIBUTIONS, missing_package

log = logging.getLogger(__name__)
_WORKER = "{worker}"
_LONGEST_FOLDER = 64
"""Bytes. Socket names are limited to some 100, of which ours take up to 40."""


def check_machine(config: Config, host: PluginHost, *, front_doors: bool = True) -> None:
    """Raises ConfigError with everything that this machine lacks for ``config``.

    ``front_doors`` says whether it will run some.
    """
    of_doors = _of_doors(config.frontend, host) if front_doors else ()
    problems = [*_missing(config), *host_problems(config), *of_doors, *_damaged(config)]
    problems += _of_log_files(config) if front_doors else ()
    problems += planner_problems(config, host)
    if not problems:  # engines look at the models
        problems += _of_engines(config, host)
    if problems:
        raise ConfigError(problems, "this machine")


def _of_doors(frontend: FrontendConfig, host: PluginHost) -> Iterator[str]:
    for index, door in enumerate(frontend.doors):
        path = door_path(frontend, index) + "."
        for problem in host.doors.kinds[door.kind].thing.problems(door):
            yield path + problem
        for number, entry in enumerate(door.protocols):
            for problem in host.protocols.kinds[entry.kind].thing.problems(entry):
                yield f"{path}protocols[{number}].{problem}"
    yield from _of_routes(frontend, host)


def check_routes(config: Config, host: PluginHost) -> None:
    """Raises ConfigError if protocols of one door claim a route, and cannot share it."""
    if problems := [*_of_routes(config.frontend, host)]:
        raise ConfigError(problems, "configuration")


def _of_routes(frontend: FrontendConfig, host: PluginHost) -> Iterator[str]:
    for index, door in enumerate(frontend.doors):
        rpc = host.doors.kinds[door.kind].thing.serves_rpcs
        if len(door.protocols) == 1 and not rpc:
            continue  # what answers is not imported only to be compared with nothing
        path = door_path(frontend, index)
        facts = DoorFacts(needs_key=False, operations=door.operations != "off")
        claims: _Claims = {}
        for number, entry in enumerate(door.protocols):
            try:
                routes = host.protocols.kinds[entry.kind].thing.mount(entry, _LATER, facts).routes()
            except _LaterError:
                continue  # the door says it as it opens
            except ConfigError as error:
                yield from (f"{path}.protocols[{number}].{each}" for each in error.problems)
                continue
            routes = [one for one in routes if (one.method in RPC_METHODS) == rpc]
            if not routes:
                yield f"{path}.protocols[{number}]: {entry.kind} is not for a door of {door.kind}"
            for route in routes:
                claims.setdefault((route.method, route.path), []).append((number, route))
        for numbers, wheres in _contested(claims).items():
            yield _claimed(path, door.protocols, numbers, sorted(wheres))


_Claims = dict[tuple[str, str], list[tuple[int, Route]]]


def _contested(claims: _Claims) -> dict[tuple[int, int], list[tuple[str, str]]]:
    contested: dict[tuple[int, int], list[tuple[str, str]]] = {}
    for where, given in claims.items():
        kept = [(number, route) for number, route in given if not route.yields] or given
        others = [number for number, route in kept if route.is_mine is None]
        for number in others[1:]:
            contested.setdefault((others[0], number), []).append(where)
    return contested


def _claimed(
    path: str,
    protocols: Sequence[ProtocolConfig],
    numbers: tuple[int, int],
    routes: Sequence[tuple[str, str]],
) -> str:
    before, number = numbers
    more = f" and {len(routes) - 1} more" if len(routes) > 1 else ""
    return (
        f"{path}.protocols[{number}]: {protocols[number].kind} claims {' '.join(routes[0])}{more}, "
        f"which protocols[{before}], {protocols[before].kind}, has already, and they do not tell "
        "their callers apart; remove one, or give it a door of its own"
    )


class _LaterError(Exception):
    """A protocol wants something of the services before there are any."""


class _Later:
    """Stands for the services of a front door that does not run yet."""

    def __getattr__(self, name: str) -> Any:
        raise _LaterError(name)


_LATER = _Later()


def machine_warnings(config: Config, host: PluginHost) -> Iterator[str]:
    """A line for each thing that will be other than expected on this machine.

    ``check_machine`` has passed.
    """
    yield from cluster_warnings(config)
    for index, name in _to_download(config):
        yield (
            f'models[{index}].source: "{name}" is not on this machine yet; `commutator serve` '
            "downloads it from the Hugging Face Hub"
        )
    yield from _disk_warnings(config)
    for path, engine, connector, model in _engines(config, host):
        yield from (f"{path}.{warning}" for warning in connector.warnings(engine, model))


def model_notes(config: Config, host: PluginHost) -> Iterator[str]:
    """What each engine does with its model, for people; what several say alike once."""
    told: set[tuple[str, str]] = set()
    for path, engine, connector, model in _engines(config, host):
        for note in connector.model_notes(engine, model):
            if (model.name, note) not in told:
                told.add((model.name, note))
                yield f"{path} ({model.name}): {note}"


def fetch_models(config: Config) -> None:
    """Download the models of the Hugging Face Hub that are not on this machine.

    Raises ConfigError with every one that cannot be had.
    """
    problems: list[str] = []
    for index, name in _to_download(config):
        log.info("downloading %s from the Hugging Face Hub", name)
        try:
            download(name)
        except ConfigError as error:
            problems += (f"models[{index}].source: {problem}" for problem in error.problems)
    if problems:
        raise ConfigError(problems, "this machine")


def _to_download(config: Config) -> Iterator[tuple[int, str]]:
    for index, model in enumerate(config.models):
        if is_model_name(model.source) and downloaded(model.source) is None:
            yield index, model.source


def check_files(config: Config) -> None:
    """Raises ConfigError for existing files of ``config`` that cannot be used.

    Missing files may exist on the machine that will run ``config``.
    """
    if problems := list(_damaged(config)):
        raise ConfigError(problems, "files that it names")


def _engines(
    config: Config, host: PluginHost
) -> Iterator[tuple[str, EngineConfig, EngineConnector[Any], ModelConfig]]:
    """Path, entry, connector and model of each engine."""
    models = {model.name: model for model in config.models}
    for index, engine in enumerate(config.engines):
        connector = host.engines.kinds[engine.kind].thing
        yield f"engines[{index}]", engine, connector, models[engine.model or ""]


def _of_engines(config: Config, host: PluginHost) -> Iterator[str]:
    for path, engine, connector, model in _engines(config, host):
        tiers = config.tiers if connector.uses_tiers else ()
        for problem in connector.problems(engine, model, tiers):
            yield problem if problem.startswith("tiers[") else f"{path}.{problem}"


def _of_log_files(config: Config) -> Iterator[str]:
    """Each file of observers whose folder is not there and cannot be made, or not be written."""
    for index, observer in enumerate(config.observers):
        file = getattr(observer, "path", None)
        if not isinstance(file, str):
            continue
        if problem := _place_problem(Path(file).expanduser().absolute().parent):
            yield f"observers[{index}].path: {problem}; name a file in another folder"


def _damaged(config: Config) -> Iterator[str]:
    load_problem = cache(_load_problem)  # several models may share their files
    for index, model in enumerate(config.models):
        if problem := load_problem(model.source):
            yield f"models[{index}].source: {problem}"
        template = model.chat_template
        if template is not None and (problem := _template_problem(template)):
            yield f"models[{index}].chat_template: {problem}"


def _missing(config: Config) -> Iterator[str]:
    yield from _missing_models(config)
    for path, secret in secrets_in(config):
        try:
            secret.reveal()
        except ConfigError as error:
            shown = re.sub(
                r"frontend\.doors\[(\d+)\]",
                lambda found: door_path(config.frontend, int(found[1])),
                path,
            )
            yield from (f"{shown}: {problem}" for problem in error.problems)
    if config.tracing is not None and (package := missing_package()) is not None:
        yield f"tracing: {package} is not installed; pip install {' '.join(DISTRIBUTIONS)}"
    if problem := _folder_problem(config.runtime.state_dir):
        yield f"runtime.state_dir: {problem}"
    for index, tier, place in _tier_folders(config):
        if problem := _place_problem(place):
            yield f"tiers[{index}].path: {problem}; name another folder for the tier {tier.kind}"


def _missing_models(config: Config) -> Iterator[str]:
    for index, model in enumerate(config.models):
        try:
            locate_model(model.source)
        except ConfigError as error:
            if not is_model_name(model.source):  # `fetch_models` downloads those
                yield from (f"models[{index}].source: {problem}" for problem in error.problems)
        template = model.chat_template
        if template is not None and not Path(template).exists():
            yield f"models[{index}].chat_template: no such file: {template}"


def _tier_folders(config: Config) -> Iterator[tuple[int, TierConfig, Path]]:
    """The folders that tiers make on this machine, up to the first part that varies by worker."""
    for index, tier in enumerate(config.tiers):
        path = getattr(tier, "path", None)
        if isinstance(path, str) and path.strip():
            yield index, tier, Path(path.partition(_WORKER)[0] or ".").expanduser().absolute()


def _place_problem(path: Path) -> str | None:
    """Why no folder can be made at ``path``; None if it can, or is there."""
    there = _existing(path)
    if there is None:
        return None
    if not there.is_dir():
        return f"{there} is not a folder"
    return None if os.access(there, os.W_OK | os.X_OK) else f"{there} cannot be written"


def _existing(path: Path) -> Path | None:
    """``path``, or the nearest folder above it that exists."""
    return next((one for one in (path, *path.parents) if one.exists()), None)


def _disk_warnings(config: Config) -> Iterator[str]:
    """A line for each tier whose disk is too small for it, even if it were empty."""
    workers = sum(engine.replicas for engine in config.engines)
    for index, tier, path in _tier_folders(config):
        capacity = getattr(tier, "capacity", None)
        there = _existing(path)
        if not isinstance(capacity, int) or there is None:
            continue
        total = shutil.disk_usage(there).total
        if 0 < total < capacity * workers:  # file systems without a size say 0
            yield (
                f"tiers[{index}].capacity: {capacity / 1e9:.4g} GB for each of {workers} workers "
                f"are more than the whole disk of {there}, {total / 1e9:.4g} GB; set it to at most "
                f"{total * 0.9 / workers / 1e9:.3g}GB"
            )


def _load_problem(source: str) -> str | None:
    """Load the tokenizer, as every front door does: half a second for 130,000 tokens.

    Only loading finds a damaged tokenizer, with which processes would be restarted for ever.
    """
    try:
        locate_model(source)
    except ConfigError:
        return None  # there is nothing to load
    try:
        load_text_model(source)
    except ConfigError as error:
        return f"{error.where}: {'; '.join(error.problems)}"
    except Exception as error:  # noqa: BLE001 - files of others make libraries raise anything
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        return f"{source}: cannot be loaded: {reason}; are its files complete?"
    return None


def _template_problem(file: str) -> str | None:
    try:
        ChatTemplate(Path(file).read_text(encoding="utf-8"), {})
    except FileNotFoundError:
        return None
    except UnicodeDecodeError:
        return f"{file}: not UTF-8 text; save it as UTF-8"
    except OSError as error:
        return f'"{file}" cannot be read: {error.strerror}'
    except ConfigError as error:
        return f"{file}: {'; '.join(error.problems)}"
    return None


def _folder_problem(state_dir: str | None) -> str | None:
    try:
        folder = Path(state_dir or tempfile.gettempdir()).absolute()
        if not folder.is_dir():
            return f"no such folder: {folder}"
        if len(os.fsencode(folder)) > _LONGEST_FOLDER:
            return f"too long for the name of a socket: {folder}"
        # Checking permissions is not enough: root has them even in folders such as /proc.
        with tempfile.TemporaryDirectory(prefix="commutator-", dir=folder):
            return None
    except OSError as error:
        place = state_dir or "the folder for temporary files"
        return f"nothing can be made in {place}: {error.strerror}; name another folder"
