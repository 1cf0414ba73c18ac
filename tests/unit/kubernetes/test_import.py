"""`commutator import` on public examples of each server: nothing is lost, and the result serves."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from commutator.cli.main import main
from commutator_kubernetes_tools.import_cli import converted, sources
from commutator_kubernetes_tools.source import Source

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "scripts"))
import imports_page  # noqa: E402 - it lies in scripts/

EXAMPLES = {file.stem: file for file in imports_page.EXAMPLES}
MEANT = {
    r"\.(type|componentType|create|modelCommand|enableTool|enabled)$",
    r"\.command\[|args\[\d+\]$",
    r"gpu$|requestGPU$",
    r"replicas$|replicaCount$",
    r"DYN_ROUTER_MODE|env(s)?\[\d+\]\.(name|value)$",
    r"routingLogic$|scheduler$|kvRole$",
    r"enable(PrefixCaching|ChunkedPrefill)$|parallelism\.|tensorParallelSize$",
    r"containers\[0\]\.name$|Frontend.*name$|components\[0\]\.name$",
}
"""Fields whose value has another form in the result."""


def imported(name: str) -> tuple[Source, dict[str, Any], str]:
    file = EXAMPLES[name]
    server = imports_page.server_of(file)
    (source,) = sources(file, server)
    text = converted(source, server)
    return source, yaml.safe_load(text), text


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_result_passes_config_check(name: str, tmp_path: Path) -> None:
    server = imports_page.server_of(EXAMPLES[name])
    done = CliRunner().invoke(main, ["import", server, str(EXAMPLES[name])])
    assert done.exit_code == 0, done.output
    file = tmp_path / "commutator.yaml"
    file.write_text(done.stdout)
    check = CliRunner().invoke(main, ["config", "check", "--elsewhere", str(file)])
    assert check.exit_code == 0, check.output


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_field_is_carried_or_named(name: str) -> None:
    """A value that counts as carried stands in the result, or has another form there."""
    source, _, text = imported(name)
    left = {path for path, _, _ in source.left()}
    named = re.findall(r"^#   (\S+) = ", text, re.MULTILINE)
    assert len(named) == len(left)
    assert source.carried() + len(left) == len(source.fields())
    body = text[text.index("\nmodels:") :]
    for path in source.fields():
        where = "".join(f"[{s}]" if isinstance(s, int) else f".{s}" for s in path)
        value = str(source.get(*path)).removeprefix("hf://")
        if path not in left and not any(re.search(one, where) for one in MEANT):
            assert value in body, where


def test_dynamo_keeps_roles_replicas_gpus_and_the_router() -> None:
    _, values, _ = imported("dynamo-vllm-disagg-router")
    entries = [(e["kind"], e["role"], e["replicas"], e["gpus"]) for e in values["engines"]]
    assert entries == [("vllm", "decode", 2, [0, 1]), ("vllm", "prefill", 2, [2, 3])]
    assert values["router"] == {"kind": "kv"}
    assert values["disaggregation"] == {"kind": "always"}


def test_the_engine_follows_from_the_program() -> None:
    assert {e["kind"] for e in imported("dynamo-sglang-disagg")[1]["engines"]} == {"sglang"}
    _, values, text = imported("dynamo-trtllm-agg-router")
    assert [(e["kind"], e["kv_events"]) for e in values["engines"]] == [("trtllm", True)]
    assert "args" not in values["engines"][0]  # what that server would refuse is named
    assert "--extra-engine-args" in text


def test_the_production_stack_keeps_arguments_tiers_and_the_router() -> None:
    _, values, text = imported("production-stack-17-kv-aware")
    assert values["tiers"] == [{"kind": "dram", "capacity": "60GiB"}]
    assert values["router"] == {"kind": "kv"}
    assert values["engines"][0]["args"] == ["--enable-prefix-caching", "--max-model-len=32000"]
    assert "<HF_TOKEN>" not in text  # no secret is written, nor shown
    assert values["engines"][0]["env"]["HF_TOKEN"] == {"env": "HF_TOKEN"}
    _, values, _ = imported("production-stack-02-basic")
    assert values["engines"][0]["args"][-2:] == ["--gpu-memory-utilization", "0.8"]


def test_llm_d_and_kserve_keep_parallelism_and_arguments() -> None:
    _, values, _ = imported("llm-d-inference-scheduling")
    (engine,) = values["engines"]
    assert (engine["replicas"], len(engine["gpus"])) == (8, 16)
    assert "--tensor-parallel-size=2" in engine["args"]
    _, values, _ = imported("kserve-tool-calling")
    assert "--tool-call-parser=qwen3_coder" in values["engines"][0]["args"]
    assert values["engines"][0]["env"] == {"HF_TOKEN": {"env": "HF_TOKEN"}}
    assert "render --models pvc:gpt-oss-20b-pvc" in imported("kserve-prefix-cache")[2]


@pytest.mark.parametrize(
    ("server", "text", "said"),
    [
        ("dynamo", "kind: Deployment", "it has not a DynamoGraphDeployment"),
        ("dynamo", "kind: DynamoGraphDeployment", "it names no model that is served"),
        ("kserve", "a: [", "not YAML"),
        ("llm-d", "a: 1", "expected values of llm-d-modelservice"),
        ("llm-d", "a: &a [*a]", "an alias stands inside of what it names"),
        ("llm-d", "- 1", "expected a mapping, got list"),
        ("production-stack", "servingEngineSpec: {}", "it names no model that is served"),
    ],
)
def test_what_is_no_such_file_is_refused(server: str, text: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "other.yaml"
    file.write_text(text)
    done = CliRunner().invoke(main, ["import", server, str(file)])
    assert done.exit_code == 1
    assert said in done.output


def test_the_page_is_current() -> None:
    assert imports_page.PAGE.read_text() == imports_page.page(), "run `make docs`"
