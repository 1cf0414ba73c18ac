"""Makes a Hugging Face directory from a GGUF file, a format that few engines read.

It runs before the engine's server starts, in Commutator's environment; only the weights are
converted in the server's, which has PyTorch. The tokenizer is the one that the front door uses, so
that both count the same tokens.
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

from commutator.tokenizer.gguf import read_gguf_metadata, tokenizer_from_gguf

__all__ = [
    "directory_for",
    "make_directory",
    "start_command",
]

_WEIGHTS_SCRIPT = Path(__file__).with_name("convert_gguf.py")
_SPECIAL = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
_CONVERSION_S = 7200.0
_FORMAT = 1
"""Incremented when the output changes, so that old directories are not used."""


def directory_for(source: Path) -> Path:
    """The directory that a server loads: ``source``, or for a GGUF file one in the user's cache.

    Each version of the file has its own.
    """
    if not source.is_file():
        return source
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    status = source.stat()
    facts = f"{_FORMAT} {source.resolve()} {status.st_size} {status.st_mtime_ns}"
    digest = hashlib.sha256(facts.encode()).hexdigest()[:12]
    return cache / "commutator" / "models" / f"{source.stem}-{digest}"


def start_command(source: Path, server: Sequence[str]) -> tuple[str, ...]:
    """The command that fills the directory of a GGUF file if needed, then becomes ``server``."""
    if not source.is_file():
        return tuple(server)
    program = (sys.executable, "-m", "commutator_engine_kit.model_files")
    return (*program, str(source), str(directory_for(source)), *server)


def make_directory(gguf: Path, directory: Path, python: str) -> None:
    """Fill ``directory`` unless it exists. ``python`` has transformers, torch and gguf.

    Raises subprocess.SubprocessError when the weights cannot be converted. Several processes may
    run this at once: the directory appears only when it is complete.
    """
    if directory.is_dir():
        return
    directory.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f"{directory.name}.", dir=directory.parent))
    try:
        command = [python, str(_WEIGHTS_SCRIPT), str(gguf), str(unfinished)]
        # The configuration names the program.
        subprocess.run(command, check=True, timeout=_CONVERSION_S)  # noqa: S603
        _write_text_side(gguf, unfinished)
        try:
            unfinished.rename(directory)
        except OSError:
            if not directory.is_dir():  # otherwise another process made it first
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


def main() -> None:
    gguf, directory, *server = sys.argv[1:]
    try:
        make_directory(Path(gguf), Path(directory), server[0])
    except (OSError, subprocess.SubprocessError) as error:
        sys.exit(
            f"cannot convert {gguf}: {error}; the environment of {server[0]} needs torch, "
            "transformers, accelerate and gguf. Or give `models` a Hugging Face directory"
        )
    os.execv(server[0], server)  # noqa: S606 - this process becomes the server


if __name__ == "__main__":
    main()
