"""A word for a model's files that changes when any of them does: part of KV blocks' identity."""

from __future__ import annotations

from pathlib import Path

import xxhash

__all__ = ["weights_revision"]

_READ_BYTES = 8 << 20


def weights_revision(model: str, revision: str | None = None) -> str:
    """The commit of a snapshot in Hugging Face's cache, or a digest of a directory's files.

    ``model`` is a directory or a name; that of a directory reads every byte, unless its name is a
    commit. For names the environment must have huggingface_hub, and the model in its cache.
    """
    path = Path(model)
    if not path.is_dir():
        path = _snapshot(model, revision)
    return path.name if path.parent.name == "snapshots" else _digest(path)


def _snapshot(model: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download  # noqa: PLC0415 - engines bring it

    return Path(snapshot_download(model, revision=revision, local_files_only=True))


def _digest(path: Path) -> str:
    state = xxhash.xxh3_128()
    for file in sorted(file for file in path.rglob("*") if file.is_file()):
        state.update(f"{file.relative_to(path)}\0{file.stat().st_size}\0".encode())
        with file.open("rb") as opened:
            while piece := opened.read(_READ_BYTES):
                state.update(piece)
    return state.hexdigest()
