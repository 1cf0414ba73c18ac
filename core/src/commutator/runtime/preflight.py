"""What can be known to fail before any process is started."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import attrs

from commutator.config.model import Config
from commutator.config.secret import Secret
from commutator.errors import ConfigError
from commutator.frontend.server import tls_context
from commutator.observe.tracing import DISTRIBUTIONS, missing_package
from commutator.text.chat_template import ChatTemplate
from commutator.text.load import load_text_model
from commutator.text.source import locate_model

__all__ = ["check_files", "check_machine"]

_LONGEST_FOLDER = 64
"""Bytes. Socket names are limited to some 100, of which ours take up to 40."""


def check_machine(config: Config) -> None:
    """Raises ConfigError with everything that this machine lacks for ``config``."""
    if problems := [*_missing(config), *_damaged(config)]:
        raise ConfigError(problems, "this machine")


def check_files(config: Config) -> None:
    """Raises ConfigError for files of ``config`` that lie here and can never work.

    Those that do not lie here may be meant for another machine.
    """
    if problems := list(_damaged(config)):
        raise ConfigError(problems, "files that it names")


def _damaged(config: Config) -> Iterator[str]:
    load_problem = cache(_load_problem)  # several models may share their files
    for index, model in enumerate(config.models):
        if problem := load_problem(model.source):
            yield f"models[{index}].source: {problem}"
        template = model.chat_template
        if template is not None and (problem := _template_problem(template)):
            yield f"models[{index}].chat_template: {problem}"


def _missing(config: Config) -> Iterator[str]:
    for index, model in enumerate(config.models):
        try:
            locate_model(model.source)
        except ConfigError as error:
            yield from (f"models[{index}].source: {problem}" for problem in error.problems)
        template = model.chat_template
        if template is not None and not Path(template).exists():
            yield f"models[{index}].chat_template: no such file: {template}"
    for path, secret in _secrets(config, ""):
        try:
            secret.reveal()
        except ConfigError as error:
            yield from (f"{path}: {problem}" for problem in error.problems)
    if config.frontend.tls is not None:
        try:
            tls_context(config.frontend.tls)
        except ConfigError as error:
            yield from (f"frontend.tls: {problem}" for problem in error.problems)
    if config.tracing is not None and (package := missing_package()) is not None:
        yield f"tracing: {package} is not installed; pip install {' '.join(DISTRIBUTIONS)}"
    if problem := _folder_problem(config.runtime.state_dir):
        yield f"runtime.state_dir: {problem}"


def _load_problem(source: str) -> str | None:
    """Loads the tokenizer, as every front door will: half a second for 130,000 tokens.

    Less would not find a damaged one, with which front doors and workers are started for ever.
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


def _secrets(value: Any, path: str) -> Iterator[tuple[str, Secret]]:
    """Every secret below ``value``, those of plugins' options too, with its path."""
    if isinstance(value, Secret):
        yield path, value
    elif attrs.has(type(value)):
        for field in attrs.fields(type(value)):
            inner = f"{path}.{field.name}" if path else field.name
            yield from _secrets(getattr(value, field.name), inner)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _secrets(item, f"{path}.{key}")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _secrets(item, f"{path}[{index}]")


def _folder_problem(state_dir: str | None) -> str | None:
    try:
        folder = Path(state_dir or tempfile.gettempdir()).absolute()
        if not folder.is_dir():
            return f"no such folder: {folder}"
        if len(os.fsencode(folder)) > _LONGEST_FOLDER:
            return f"too long for the name of a socket: {folder}"
        # Asking for the rights is not enough: root has them in folders where nothing can be made.
        with tempfile.TemporaryDirectory(prefix="commutator-", dir=folder):
            return None
    except OSError as error:
        place = state_dir or "the folder for temporary files"
        return f"nothing can be made in {place}: {error.strerror}; name another folder"
