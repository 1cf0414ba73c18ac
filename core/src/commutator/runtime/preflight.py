"""What can be known to fail before any process is started."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from commutator.config.model import Config
from commutator.errors import ConfigError
from commutator.frontend.server import tls_context
from commutator.observe.tracing import DISTRIBUTIONS, missing_package
from commutator.text.source import locate_model

__all__ = ["check_machine"]

_LONGEST_FOLDER = 64
"""Bytes. Socket names are limited to some 100, of which ours take up to 40."""


def check_machine(config: Config) -> None:
    """Raises ConfigError with everything that this machine lacks for ``config``."""
    if problems := list(_problems(config)):
        raise ConfigError(problems, "this machine")


def _problems(config: Config) -> Iterator[str]:
    for index, model in enumerate(config.models):
        try:
            locate_model(model.source)
        except ConfigError as error:
            yield from (f"models[{index}].source: {problem}" for problem in error.problems)
        if model.chat_template is not None and not Path(model.chat_template).is_file():
            yield f"models[{index}].chat_template: no such file: {model.chat_template}"
    for index, secret in enumerate(config.frontend.api_keys):
        try:
            secret.reveal()
        except ConfigError as error:
            yield from (f"frontend.api_keys[{index}]: {problem}" for problem in error.problems)
    if config.frontend.tls is not None:
        try:
            tls_context(config.frontend.tls)
        except ConfigError as error:
            yield from (f"frontend.tls: {problem}" for problem in error.problems)
    if config.tracing is not None and (package := missing_package()) is not None:
        yield f"tracing: {package} is not installed; pip install {' '.join(DISTRIBUTIONS)}"
    yield from _folder_problems(Path(config.runtime.state_dir or tempfile.gettempdir()))


def _folder_problems(folder: Path) -> Iterator[str]:
    folder = folder.absolute()
    if not folder.is_dir():
        yield f"runtime.state_dir: no such folder: {folder}"
    elif len(os.fsencode(folder)) > _LONGEST_FOLDER:
        yield f"runtime.state_dir: too long for the name of a socket: {folder}"
