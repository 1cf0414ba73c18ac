"""The page at /ui in a real browser, over a front door whose workers are scripted."""

from __future__ import annotations

import asyncio
import gzip
import json
import subprocess
import threading
import time
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from attrs import define
from tests.support.browser import Page, browser
from tests.support.front_door import TEXT, FakeDispatcher, FrontDoor, answer, front_door
from tests.support.principals import gate_of

from commutator.contract.principal import Principal
from commutator.contract.registry import Registry
from commutator.contract.worker import EngineLoad
from commutator.frontend.demand import PlannerLink
from commutator.launcher.ports import reserved_port
from commutator.registry.unready import UnreadyState, UnreadyWorker
from commutator_console.door import live
from commutator_console.front_door import FrontDoor as CommandsFrontDoor
from commutator_console.page import write_player

pytestmark = pytest.mark.slow

in_thread = asyncio.to_thread
DECISIONS, WORKERS = "#decisions tbody", "#workers tbody"
HOSTILE = "<img src=x onerror='window.owned=1'><script>window.owned=1</script>\"'`${1}"


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    with browser() as opened:
        yield opened


def load() -> EngineLoad:
    return EngineLoad(
        running=1, waiting=2, kv_used_blocks=30, kv_cached_blocks=20, kv_capacity_blocks=100
    )


async def opened(page: Page, door: FrontDoor, theme: str = "auto") -> None:
    await in_thread(page.open, door.url, theme=theme)
    await in_thread(page.until_text, "#status", "ready")
    await in_thread(page.until_text, WORKERS, "0")


async def test_the_page_follows_the_run_and_the_chat_tells_who_answered(page: Page) -> None:
    dispatcher = FakeDispatcher(loads={"fake-0": load()})
    dispatcher.script = answer("Paris, of course.", cached_tokens=4)
    async with front_door(dispatcher) as door:
        await opened(page, door)
        assert "fake-0" in page.text(WORKERS)
        assert "50%" in page.text(WORKERS)
        assert await in_thread(page.text, DECISIONS) == ""
        await door.chat()
        await in_thread(page.until_text, DECISIONS, "because it is Tuesday")
        await in_thread(page.until_text, "#tile-cache .value", "%")

        def chat() -> str:
            page.one("#tab-chat").click()
            page.one("#question").send_keys("What is the capital of France?\n")
            page.until_text(".facts", "TTFT")
            return page.text("#messages")

        said = await in_thread(chat)
        assert "Paris, of course." in said
        assert "worker fake-1" in said
        assert "cached 4 of" in said
        assert "Why this worker: because it is Tuesday" in said
        assert await in_thread(page.problems) == []


async def test_workers_that_fail_and_what_the_planner_wants_are_shown(page: Page) -> None:
    now_s = time.time()
    failing = UnreadyWorker(
        worker_id="w-1", model="m", kind="k", engine="w", since_unix_s=now_s - 5,
        state=UnreadyState.FAILING, cause=HOSTILE, next_start_unix_s=now_s + 600,
    )  # fmt: skip
    role = {"desired": 3, "proposed": 3, "ready": 1, "starting": 1, "draining": 0,
            "reason": "for 2.5 requests/s"}  # fmt: skip
    told = {
        "kind": "slo", "mode": "act", "acts": True, "interval_s": 5.0, "plans": 1,
        "last": {"time": now_s, "roles": {"both": role}, "actions": [], "warnings": [HOSTILE]},
        "recent": [{"time": now_s, "text": "+2 both: a burst"}],
    }  # fmt: skip
    link = cast(PlannerLink, SimpleNamespace(status=told))
    async with front_door(FakeDispatcher()) as door:
        door.services.unready, door.services.planner = [failing], link
        await in_thread(page.open, door.url, theme="dark")
        await in_thread(page.until_text, "#status", "degraded")
        shown = await in_thread(page.text, WORKERS)
        assert "failing" in shown
        assert f"{HOSTILE}; starts again in" in shown
        planner = await in_thread(page.text, "#planner-panel")
        for expected in ("slo acts, every 5 s", "for 2.5 requests/s", "+2 both: a burst", HOSTILE):
            assert expected in planner
        assert page.run("return window.owned") is None
        assert await in_thread(page.problems) == []
        link.status = None
        await in_thread(page.until_text, "#planner-panel", "No planner answers")


MARKDOWN = """# A plan
First **bold**, *slanted* and `code`; see [the docs](https://example.org/a?b=1).

1. one
2. two

- dot
```python
print("<b>hi</b>")
```
> quoted
[bad](javascript:window.owned=1) <img src=x onerror="window.owned=1">"""


async def test_an_answer_is_shown_as_markdown_and_its_request_as_curl(page: Page) -> None:
    dispatcher = FakeDispatcher(loads={"fake-0": load()})
    dispatcher.script = answer(MARKDOWN)
    async with front_door(dispatcher) as door:
        await opened(page, door)

        def chat() -> dict[str, str]:
            page.one("#tab-chat").click()
            page.one("#question").send_keys("It's a 'test'\n")
            page.until_text(".facts", "TTFT")
            copies = """
                window.copied = [];
                navigator.clipboard.writeText = async (text) => { window.copied.push(text); };
                document.querySelectorAll('.code button, .facts button').forEach((b) => b.click());
            """
            page.run(copies)
            page.until(lambda: page.text(".code button") == "Copied")
            parts = ("strong", "em", "p code", "pre", "ol li", "ul li", "blockquote", ".heading")
            return {part: page.text(f".message.assistant {part}") for part in parts}

        shown = await in_thread(chat)
        assert shown == {
            "strong": "A plan\nbold",
            "em": "slanted",
            "p code": "code",
            "pre": 'print("<b>hi</b>")',
            "ol li": "one\ntwo",
            "ul li": "dot",
            "blockquote": "quoted",
            ".heading": "A plan",
        }
        links = "return [...document.querySelectorAll('.message a')].map(a => a.href)"
        assert page.run(links) == ["https://example.org/a?b=1"]
        assert page.count(".message img") == 0
        assert "[bad](javascript:window.owned=1) <img" in page.text(".message.assistant")
        code, whole, command = page.run("return window.copied")
        assert (code, whole) == ('print("<b>hi</b>")', MARKDOWN)

        def said_to_curl() -> str:
            done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=True)
            return done.stdout

        assert "data: [DONE]" in await in_thread(said_to_curl), "the quotes did not end its body"
        assert page.barriers() == []
        assert page.run("return window.owned ?? null") is None
        assert await in_thread(page.problems) == []


@define
class Drains:
    """Drains workers of a dispatcher."""

    dispatcher: FakeDispatcher

    async def set_draining(self, worker_id: str, draining: bool) -> bool:
        self.dispatcher.states[worker_id] = "draining" if draining else "ready"
        return True

    def view_age_s(self) -> float:
        return 0.0


PARTS = """
    const done = arguments[arguments.length - 1];
    import("/ui/decision.js").then(({partsOf}) => {
      const parts = partsOf(100, 64, 16, {overlap: {device: 2, host: 1}});
      done(parts.filter(([, , count]) => count).map(([name, , count]) => `${name} ${count}`));
    });
"""


async def test_an_operator_asks_why_and_drains_a_worker(page: Page) -> None:
    dispatcher = FakeDispatcher(addresses={"fake-0": None, "fake-1": None})
    dispatcher.script = answer("Yes.", cached_tokens=16)
    gate = gate_of(Principal(name="root", permissions=frozenset({"admin", "explain"})))
    async with front_door(dispatcher, gate=gate) as door:
        door.services.registry = cast(Registry, Drains(dispatcher))

        def use() -> None:
            page.open(door.url)
            page.until(lambda: page.run("return document.querySelector('#key-dialog').open"))
            page.one("#key").send_keys("root\ue007")
            page.until_text(WORKERS, "fake-1")
            page.one("#test-request").click()
            page.until_text(DECISIONS, "because it is Tuesday")
            page.until(lambda: not page.one("#test-request").is_displayed())
            page.one(f"{DECISIONS} button").click()
            page.until_text("#decision-scores", "1.50")
            assert "Why fake-0?" in page.text("#decision-dialog")
            assert "3 blocks of 16 tokens:\n\ncomputed: 3" in page.text("#decision-blocks")
            assert page.barriers() == []
            page.one("#decision-dialog button").click()
            page.one(f"{WORKERS} tr:nth-child(2) button").click()
            assert "Drain fake-1?" in page.text("#drain-dialog")
            assert page.barriers() == []
            page.one("#drain-do").click()
            page.until_text(WORKERS, "draining")
            page.until_text("#events", "drain: fake-1 gets no new requests")
            marks = "#timeline .mark.warned title"
            assert "fake-1" in page.run(f"return document.querySelector('{marks}').textContent")
            page.until_text(f"{WORKERS} tr:nth-child(2)", "Take back")
            page.one(f"{WORKERS} tr:nth-child(2) button").click()
            page.one("#drain-do").click()
            page.until(lambda: "draining" not in page.text(WORKERS))
            page.one("#tab-chat").click()
            page.one("#question").send_keys("Why?\n")
            page.until_text(".facts", "Why this worker")
            page.one(".facts summary").click()
            assert "1.50" in page.text(".facts .scores")
            assert page.driver.execute_async_script(PARTS) == [
                "found on device 2", "found on host 1", "found, too 1", "computed 3",
            ]  # fmt: skip
            assert page.barriers() == []

        await in_thread(use)
        assert await in_thread(page.problems) == []


async def test_a_recording_plays_without_a_front_door(page: Page, tmp_path: Path) -> None:
    dispatcher = FakeDispatcher(addresses={"fake-0": None, "fake-1": None})
    async with front_door(dispatcher) as door:

        def record() -> None:
            follow = live(CommandsFrontDoor(door.url))
            snapshots = [next(follow)]
            dispatcher.states["fake-1"] = "draining"
            snapshots += [next(follow), next(follow)]
            minute = {"snapshots": snapshots, "decisions": {}}
            (tmp_path / "minute.gz").write_bytes(gzip.compress(json.dumps(minute).encode()))

        await in_thread(record)
    write_player(tmp_path / "live", "../minute.gz")
    handler = partial(SimpleHTTPRequestHandler, directory=str(tmp_path))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()

        def use() -> None:
            page.driver.get(f"http://127.0.0.1:{server.server_port}/live/")
            page.until_text("#status", "a recording: ready")
            page.until_text("#events", "drain: fake-1")
            page.until(lambda: "drain: fake-1" not in page.text("#events"))  # it begins again
            page.one(f"{WORKERS} button").click()
            page.one("#drain-do").click()
            page.until_text("#drain-problem", "This is a recording")
            assert page.barriers() == []

        try:
            await in_thread(use)
        finally:
            server.shutdown()
    assert await in_thread(page.problems) == []


async def test_who_may_not_drain_is_told_the_command(page: Page) -> None:
    async with front_door(FakeDispatcher()) as door:
        await opened(page, door)

        def use() -> None:
            page.one(f"{WORKERS} button").click()
            page.one("#drain-do").click()
            page.until_text("#drain-problem", "commutator worker drain fake-0")
            assert not page.one("#drain-do").is_displayed()
            page.one("#drain-cancel").click()

        await in_thread(use)
        assert ["403" in one for one in await in_thread(page.problems)] == [True]


@pytest.mark.long
async def test_a_request_is_seen_within_two_seconds(page: Page) -> None:
    async with front_door(FakeDispatcher()) as door:
        await opened(page, door)
        for count in range(1, 6):
            began_s = time.monotonic()
            await door.chat()
            rows = f"return document.querySelectorAll('{DECISIONS} tr').length === {count}"
            await in_thread(page.until, lambda rows=rows: page.run(rows))
            assert time.monotonic() - began_s < 2


@pytest.mark.long
async def test_the_page_survives_a_restart_of_the_front_door(page: Page) -> None:
    with reserved_port("127.0.0.1", 0) as port:
        pass
    async with front_door(FakeDispatcher(), port=port) as door:
        await opened(page, door)
    await in_thread(page.until_text, "#status", "reconnecting")
    assert "fake-0" in page.text(WORKERS)  # the last state stays to be seen
    later = FakeDispatcher(addresses={"other-0": None})
    async with front_door(later, port=port):
        await in_thread(page.until_text, WORKERS, "other-0")
        await in_thread(page.until_text, "#status", "ready")
        assert "gone" in page.text(WORKERS)  # fake-0
        assert await in_thread(page.problems) == []


@pytest.mark.long
async def test_a_thousand_workers_stay_quick_to_look_through(page: Page) -> None:
    names = [f"worker-{number}" for number in range(1000)]
    dispatcher = FakeDispatcher(addresses=dict.fromkeys(names))
    dispatcher.loads = {name: load() for name in names}
    async with front_door(dispatcher) as door:
        await opened(page, door)

        def look() -> None:
            assert page.count(f"{WORKERS} tr") == 50
            assert "1000 ready" in page.text("#workers-count")
            page.one("#next").click()
            page.until_text("#page-of", "Page 2 of 20")
            assert page.text(f"{WORKERS} tr:first-child .id") == "worker-50"  # not worker-149
            page.one("#filter").send_keys("worker-77 ready")
            page.until(lambda: page.count(f"{WORKERS} tr") == 11)
            page.run("document.querySelector('#filter').value = ''")

        await in_thread(look)
        # The page handles each snapshot far faster than they come.
        longest_ms = await in_thread(
            page.driver.execute_async_script,
            """
            const done = arguments[arguments.length - 1];
            let longest = 0;
            new PerformanceObserver(list => {
              for (const entry of list.getEntries()) longest = Math.max(longest, entry.duration);
            }).observe({type: "longtask"});
            setTimeout(() => done(longest), 5000);
            """,
        )
        assert longest_ms < 500
        assert await in_thread(page.problems) == []


@pytest.mark.long
@pytest.mark.security
async def test_hostile_names_and_answers_are_shown_as_text(page: Page) -> None:
    dispatcher = FakeDispatcher(addresses={HOSTILE: None}, reason=HOSTILE)
    dispatcher.script = answer(HOSTILE)
    async with front_door(dispatcher, {HOSTILE: TEXT}) as door:
        await opened(page, door)
        assert HOSTILE in await in_thread(page.text, WORKERS)
        body = {"messages": [{"role": "user", "content": HOSTILE}], "model": HOSTILE}
        await door.post("/v1/chat/completions", body)
        await in_thread(page.until_text, DECISIONS, HOSTILE)

        def chat() -> None:
            page.one("#tab-chat").click()
            page.one("#question").send_keys(f"{HOSTILE}\n")
            page.until(lambda: page.text("#messages").count("onerror") >= 3)  # said, heard, why

        await in_thread(chat)
        assert await in_thread(page.run, "return window.owned") is None
        assert page.count("main img, main script") == 0
        assert await in_thread(page.problems) == []
        # Even a script that got into the page would not run, nor reach another host.
        blocked = """
            const script = document.createElement("script");
            let refused = 0;
            try { script.text = "window.owned = 1"; document.body.append(script); }
            catch { refused += 1; }
            try { document.body.insertAdjacentHTML("beforeend", "<b onclick=1>x</b>"); }
            catch { refused += 1; }
            return [refused, window.owned ?? null];
        """
        assert await in_thread(page.run, blocked) == [2, None]
        page.problems()


@pytest.mark.long
async def test_everything_works_from_the_keyboard(page: Page) -> None:
    names = [f"worker-{number}" for number in range(60)]
    async with front_door(FakeDispatcher(addresses=dict.fromkeys(names))) as door:
        await opened(page, door)

        def use() -> None:
            tab, enter, escape = "\ue004", "\ue007", "\ue00c"
            page.press(tab)
            assert page.focused() == "Skip to content"
            page.press(tab)
            assert page.focused() == "tab-live"
            outline = "return getComputedStyle(document.activeElement).outlineStyle"
            assert page.run(outline) == "solid"
            page.press("/")
            assert page.focused() == "filter"
            page.press("worker-4")
            page.until(lambda: page.count(f"{WORKERS} tr") == 11)
            page.press(tab, tab)
            assert page.focused().startswith("Worker")
            page.press(enter)
            assert page.text(f"{WORKERS} tr:first-child .id") == "worker-49"
            assert page.focused().startswith("Worker")
            page.run("document.querySelector('#key-button').focus()")
            page.press(enter)
            page.until(lambda: page.focused() == "key")
            page.press(escape)
            page.until(lambda: page.focused() == "key-button")
            page.run("document.querySelector('#tab-chat').focus()")
            page.press(enter)
            page.until(lambda: page.focused() == "question")
            page.press("Hello", enter)
            page.until_text(".facts", "TTFT")
            page.until(lambda: page.focused() == "question")

        await in_thread(use)
        assert await in_thread(page.problems) == []


@pytest.mark.long
@pytest.mark.parametrize("theme", ["light", "dark"])
async def test_axe_finds_no_barriers(page: Page, theme: str) -> None:
    dispatcher = FakeDispatcher(loads={"fake-0": load()})
    async with front_door(dispatcher) as door:
        await opened(page, door, theme)
        await door.chat()
        await in_thread(page.until_text, DECISIONS, "Tuesday")

        def check() -> None:
            page.run("document.querySelector('h1').style.opacity = 0.2")
            assert "color-contrast" in "".join(page.barriers())  # it looks
            page.run("document.querySelector('h1').style.opacity = ''")
            assert page.barriers() == []
            page.driver.set_window_size(500, 900)
            assert page.barriers() == []
            too_wide = "return document.documentElement.scrollWidth > window.innerWidth"
            assert page.run(too_wide) is False
            page.one("#key-button").click()
            assert page.barriers() == []
            page.one("#key-cancel").click()
            page.driver.set_window_size(1360, 900)
            page.one("#tab-chat").click()
            page.one("#question").send_keys("Hello\n")
            page.until_text(".facts", "TTFT")
            assert page.barriers() == []

        await in_thread(check)
        assert await in_thread(page.problems) == []


@pytest.mark.long
@pytest.mark.security
async def test_a_key_is_asked_for_and_stands_in_no_address(page: Page) -> None:
    root = Principal(name="root", permissions=frozenset({"admin"}))
    async with front_door(FakeDispatcher(), gate=gate_of(root, Principal(name="user"))) as door:

        def use(key: str) -> None:
            page.until(lambda: page.run("return document.querySelector('dialog').open"))
            page.one("#key").clear()
            page.one("#key").send_keys(f"{key}\ue007")

        await in_thread(page.open, door.url)
        assert await in_thread(page.problems) == []  # nothing was asked without a key
        await in_thread(use, "user")
        await in_thread(page.until_text, "#notice", 'needs the permission "admin"')
        await in_thread(page.one("#key-button").click)
        await in_thread(use, "root")
        await in_thread(page.until_text, "#status", "ready")
        await in_thread(page.until_text, WORKERS, "fake-0")
        urls = await in_thread(
            page.run, "return performance.getEntriesByType('resource').map(one => one.name)"
        )
        urls.append(page.driver.current_url)
        assert urls
        assert not [url for url in urls if "root" in url]
        assert await in_thread(page.run, "return document.cookie") == ""
        await in_thread(page.driver.refresh)  # it is kept until the tab is closed
        await in_thread(page.until_text, WORKERS, "fake-0")
