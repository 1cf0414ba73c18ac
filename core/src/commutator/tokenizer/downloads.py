"""Models by their name on the Hugging Face Hub: found in its cache, and downloaded into it."""

from __future__ import annotations

import re
from pathlib import Path

from commutator.errors import ConfigError

__all__ = ["download", "downloaded", "is_model_name"]

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_NOT_NEEDED = ["*.pt", "*.pth", "*.onnx", "*.h5", "*.msgpack", "original/*", "onnx/*", "*.gguf"]
"""Weights in formats beside the one that engines read; together they often double the bytes."""


def is_model_name(source: str) -> bool:
    """Whether a source is like "Qwen/Qwen3-0.6B", and no path of a folder of this machine."""
    return _NAME.fullmatch(source) is not None and not Path(source).parent.is_dir()


def downloaded(name: str) -> Path | None:
    """The directory of a model in the Hub's cache (HF_HOME); None if it is not there."""
    # Imported on use, as it takes longer than everything that most commands do.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        path = Path(snapshot_download(name, local_files_only=True, ignore_patterns=_NOT_NEEDED))
    except (LocalEntryNotFoundError, OSError, ValueError):
        return None
    return path if (path / "config.json").is_file() else None


def download(name: str) -> Path:
    """Download a model, with progress bars on standard error. Raises ConfigError."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    try:
        path = Path(snapshot_download(name, ignore_patterns=_NOT_NEEDED))
    except GatedRepoError as error:
        raise _problem(
            name, "its owner gives access on request; ask on its page, and set HF_TOKEN"
        ) from error
    except RepositoryNotFoundError as error:
        raise _problem(
            name, "the Hub has no such model; check the name, or set HF_TOKEN if it is private"
        ) from error
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError, ValueError) as error:
        reason = str(error.__cause__ or error).partition("\n")[0]
        raise _problem(
            name,
            f"the Hub cannot be reached ({reason}); download it on a machine with network by "
            f"`hf download {name}`, and give the folder, or set HF_ENDPOINT to a mirror",
        ) from error
    if not (path / "config.json").is_file():
        raise _problem(name, "it has no config.json; give the path of one of its .gguf files")
    return path


def _problem(name: str, text: str) -> ConfigError:
    return ConfigError(
        [f'"{name}" is no path here and cannot be downloaded: {text}'], "model source"
    )
