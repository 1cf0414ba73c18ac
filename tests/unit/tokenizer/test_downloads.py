"""Models by their name on the Hugging Face Hub: in its cache, downloaded, or out of reach."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError
from tests.support.front_door import frontend_config

from commutator.config.model import Config
from commutator.contract.engine import EngineConfig, ModelConfig
from commutator.errors import ConfigError
from commutator.plugins import load_plugins
from commutator.supervisor.preflight import check_machine, fetch_models, machine_warnings
from commutator.tokenizer.load import download, is_model_name, locate_model

NAME = "some-one/some.model"
Hub = Callable[[Exception | None], None]


@pytest.fixture
def cached(tmp_path: Path) -> Path:
    folder = tmp_path / "cache"
    folder.mkdir()
    return folder


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, cached: Path) -> Hub:
    """Sets what the Hub does: nothing but to fill the cache, or what it raises."""
    failure: list[Exception | None] = [None]

    def snapshot_download(name: str, *, local_files_only: bool = False, **_: Any) -> str:
        assert name == NAME
        if local_files_only:
            if not (cached / "config.json").exists():
                raise LocalEntryNotFoundError("not in the cache")
        elif failure[0] is not None:
            raise failure[0]
        else:
            (cached / "config.json").write_text("{}")
        return str(cached)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)

    def fails(error: Exception | None) -> None:
        failure[0] = error

    return fails


def config() -> Config:
    return Config(
        models=(ModelConfig(name="m", source=NAME),),
        engines=(EngineConfig(kind="sim", name="sim", model="m"),),
        frontend=frontend_config(),
    )


def answered(kind: type[Exception]) -> Exception:
    """An error of the Hub's, which are made of an answer."""
    error = kind.__new__(kind)
    error.args = ("401 Client Error\nand more",)
    return error


def test_names_and_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    assert is_model_name(NAME)
    for path in ("models/none", "/a/b", "./a", "../a/b", "~/a", "a", "a/b/c", "package:a", "a/"):
        assert not is_model_name(path), path


def test_it_is_downloaded_once_and_then_found(hub: Hub, cached: Path) -> None:
    with pytest.raises(ConfigError, match=r"was not downloaded .* `commutator serve` does it"):
        locate_model(NAME)
    (warning,) = machine_warnings(config(), load_plugins())
    assert warning.startswith(f'models[0].source: "{NAME}" is not on this machine yet')
    fetch_models(config())
    assert locate_model(NAME) == cached
    hub(OSError("no network any more"))
    fetch_models(config())
    assert list(machine_warnings(config(), load_plugins())) == []


def test_a_check_of_the_machine_leaves_it_to_serve(hub: Hub) -> None:
    check_machine(config(), load_plugins())


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (answered(GatedRepoError), "its owner gives access on request"),
        (answered(RepositoryNotFoundError), "the Hub has no such model; check the name"),
        (OSError("Name or service not known\nTraceback"), "(Name or service not known); download"),
        (LocalEntryNotFoundError("offline"), "the Hub cannot be reached (offline)"),
    ],
)
def test_why_it_cannot_be_had_is_one_line(hub: Hub, error: Exception, told: str) -> None:
    hub(error)
    with pytest.raises(ConfigError) as caught:
        fetch_models(config())
    (line,) = caught.value.problems
    assert line.startswith(f'models[0].source: "{NAME}" is no path here and cannot be downloaded')
    assert told in line
    assert "\n" not in line


def test_what_has_no_configuration_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: str(tmp_path))
    with pytest.raises(ConfigError, match=r"it has no config.json; give the path of one of its"):
        download(NAME)
