"""Identifies a served model, for the identity of its KV blocks.

For connectors whose engines read Hugging Face directories.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import xxhash

from commutator.contract.block import CacheIdentity
from commutator.contract.request import DIGEST, AdapterIdentity

__all__ = [
    "AdapterDigests",
    "adapter_digest",
    "changed_files",
    "model_facts",
    "served_identity",
    "weights_digest",
    "weights_revision",
]

log = logging.getLogger(__name__)

_IRRELEVANT = {"_name_or_path", "transformers_version"}
"""Entries of a model's configuration that do not affect its KV blocks."""


def served_identity(
    engine: str,
    *,
    model: str,
    revision: str | None,
    tokenizer: str | None,
    random_seed: int | None = None,
    dtype: str,
    facts: Mapping[str, Any],
    block_size: int,
    parallel_rank: str,
) -> CacheIdentity:
    """The identity of the KV blocks of a served model.

    ``facts`` is all else that affects the bytes of a block; ``random_seed`` is that of random
    weights (`--load-format dummy`). Reads every byte of the weights, as ``weights_revision`` does.
    """
    weights = weights_revision(model, revision)
    if random_seed is not None:
        weights += f" random by {random_seed}"
    has_own = tokenizer is not None and tokenizer != model
    described = json.dumps(facts, sort_keys=True, default=repr)
    return CacheIdentity(
        model=engine,
        weights=weights,
        tokenizer=f"{weights} {tokenizer}" if has_own else weights,
        dtype=dtype,
        layout=hashlib.sha256(described.encode()).hexdigest(),
        block_size=block_size,
        parallel_rank=parallel_rank,
    )


def model_facts(config: Any) -> dict[str, Any]:
    """The entries of a `transformers` configuration that may affect KV blocks."""
    return {name: value for name, value in config.to_dict().items() if name not in _IRRELEVANT}


_READ_BYTES = 8 << 20


def weights_revision(model: str, revision: str | None = None) -> str:
    """The commit of a snapshot in Hugging Face's cache, or a digest of a directory's files.

    ``model`` is a directory or a name. A directory is read completely unless its name is a commit.
    A name needs huggingface_hub and the model in its cache.
    """
    path = Path(model)
    if not path.is_dir():
        path = _snapshot(model, revision)
    return path.name if path.parent.name == "snapshots" else weights_digest(path)


def adapter_digest(directory: Path) -> str:
    """The ``AdapterIdentity.digest`` of the adapter in a directory. Raises OSError.

    SHA-256 of names and bytes of its files, without those for people (*.md) and hidden ones.
    """
    state = hashlib.sha256()
    files = {file.relative_to(directory).as_posix(): file for file in directory.rglob("*")}
    for name, file in sorted(files.items()):
        if file.is_file() and file.suffix != ".md" and not Path(name).parts[0].startswith("."):
            with file.open("rb") as opened:
                content = hashlib.file_digest(opened, "sha256").hexdigest()
            state.update(f"{len(name.encode())} {name} {content}\n".encode())
    return state.hexdigest()


def changed_files(adapter: AdapterIdentity) -> str:
    """What an engine says when the files of an adapter are no longer those of its digest."""
    return (
        f"adapter {adapter}: the files in {adapter.source} have changed; each version needs a "
        "folder of its own"
    )


class AdapterDigests:
    """What tells adapters apart in the keys of KV blocks: their content, read once for each."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], str] = {}

    def of(self, name: str, path: str) -> str:
        """The digest of the adapter that the engine loaded from ``path``, and calls ``name``.

        A name that is a digest is taken at its word. An adapter that cannot be read is told apart
        by its name and path, which no other adapter's digest is.
        """
        if DIGEST.fullmatch(name):
            return name
        if (name, path) not in self._known:
            try:
                place = Path(path)
                found = adapter_digest(place if place.is_dir() else _snapshot(path, None))
            except (OSError, ValueError, ImportError) as error:
                log.warning("adapter %s: its files cannot be read from %s: %s", name, path, error)
                found = f"{name}\0{path}"
            self._known[name, path] = found
        return self._known[name, path]


def _snapshot(model: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(model, revision=revision, local_files_only=True))


def weights_digest(path: Path) -> str:
    """A digest of the bytes of a file, or of the names and bytes of a directory's files."""
    files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
    state = xxhash.xxh3_128()
    for file in files:
        name = str(file.relative_to(path)) if path.is_dir() else ""
        state.update(f"{name}\0{file.stat().st_size}\0".encode())
        with file.open("rb") as opened:
            while piece := opened.read(_READ_BYTES):
                state.update(piece)
    return state.hexdigest()
