"""A Hugging Face directory for a model that comes as a GGUF file, which few engines read.

Made before the engine's server starts, in Commutator's own environment; only the weights are
converted in the server's, where PyTorch is. The text side is the one that the front door uses, so
both count the same tokens.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from commutator.text import read_gguf_metadata, tokenizer_from_gguf

__all__ = ["directory_for", "make_directory", "start_command"]

_WEIGHTS_SCRIPT = Path(__file__).with_name("model_weights.py")
_SPECIAL = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
_FORMAT = 1
"""Counted up when what is written changes, so that old directories are not used."""


def directory_for(gguf: Path) -> Path:
    """Where the directory of this very file is kept, in the user's cache."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    status = gguf.stat()
    facts = f"{_FORMAT} {gguf.resolve()} {status.st_size} {status.st_mtime_ns}"
    digest = hashlib.sha256(facts.encode()).hexdigest()[:12]
    return cache / "commutator" / "models" / f"{gguf.stem}-{digest}"


def start_command(gguf: Path, directory: Path, server: Sequence[str]) -> tuple[str, ...]:
    """The command that makes ``directory`` with the Python of ``server``, and becomes that."""
    program = (sys.executable, "-m", "commutator.engine.start_with_model")
    return (*program, str(gguf), str(directory), *server)


def make_directory(gguf: Path, directory: Path, python: str) -> None:
    """Fill ``directory`` unless it is there. ``python`` has transformers, torch and gguf.

    Raises subprocess.CalledProcessError when the weights cannot be converted. Several processes may
    do this at the same time: the directory appears complete or not at all.
    """
    if directory.is_dir():
        return
    directory.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f"{directory.name}.", dir=directory.parent))
    try:
        command = [python, str(_WEIGHTS_SCRIPT), str(gguf), str(unfinished)]
        subprocess.run(command, check=True)  # noqa: S603 - the configuration names the program
        _write_text_side(gguf, unfinished)
        try:
            unfinished.rename(directory)
        except OSError:
            if not directory.is_dir():  # otherwise another process was faster
                raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _write_text_side(gguf: Path, directory: Path) -> None:
    metadata = read_gguf_metadata(gguf)
    tokenizer_from_gguf(metadata).save(str(directory / "tokenizer.json"))
    tokens = metadata["tokenizer.ggml.tokens"]
    special = {
        name: tokens[token_id]
        for name, key in _SPECIAL.items()
        if (token_id := metadata.get(f"tokenizer.ggml.{key}_token_id")) is not None
    }
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **special}
    if template := metadata.get("tokenizer.chat_template"):
        config["chat_template"] = template
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2))
