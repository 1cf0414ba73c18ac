"""A headless Chromium, driven by Selenium; and axe, which finds what keeps people out of a page."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import util
from pathlib import Path
from typing import Any, TypeVar

import pytest

__all__ = ["Page", "browser", "why_no_browser"]

T = TypeVar("T")

_WAIT_S = 30.0
_POLL_S = 0.03


def why_no_browser() -> str | None:
    """What is missing for a browser test; None: nothing. `make browser` installs it."""
    for program in ("chromium", "chromedriver"):
        if shutil.which(program) is None:
            return f"{program} is not installed; run `make browser`"
    for module in ("selenium", "axe_playwright_python"):
        if util.find_spec(module) is None:
            return f"{module} is not installed; run `make browser`"
    return None


class Page:
    """One page of a browser. Every method blocks: call them in a thread."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def open(self, url: str, *, theme: str = "auto") -> None:
        """Load ``url`` anew, with an empty storage but for the theme."""
        self.driver.get("about:blank")
        self.driver.get(f"{url}/ui/icon.svg")
        self.run("localStorage.clear(); sessionStorage.clear();")
        self.run("localStorage.setItem('commutator.theme', arguments[0])", theme)
        self.driver.get_log("browser")
        self.driver.get(f"{url}/ui")

    def run(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def one(self, selector: str) -> Any:
        return self.driver.find_element("css selector", selector)

    def text(self, selector: str) -> str:
        """The text of all that match, also of what is scrolled away."""
        script = "return [...document.querySelectorAll(arguments[0])].map(n => n.innerText)"
        return "\n".join(self.run(script, selector))

    def count(self, selector: str) -> int:
        return int(self.run("return document.querySelectorAll(arguments[0]).length", selector))

    def until(self, what: Callable[[], T], timeout_s: float = _WAIT_S) -> T:
        """The first value of ``what`` that is true. Raises TimeoutError with the page's text."""
        deadline_s = time.monotonic() + timeout_s
        while not (found := what()):
            if time.monotonic() > deadline_s:
                raise TimeoutError(self.text("body"))
            time.sleep(_POLL_S)
        return found

    def until_text(self, selector: str, expected: str, timeout_s: float = _WAIT_S) -> None:
        self.until(lambda: expected in self.text(selector), timeout_s)

    def press(self, *keys: str) -> None:
        """Press keys, wherever the focus is."""
        from selenium.webdriver import ActionChains

        ActionChains(self.driver).send_keys(*keys).perform()

    def focused(self) -> str:
        """The id of what has the focus, or its text."""
        return str(self.run("return document.activeElement.id || document.activeElement.innerText"))

    def problems(self) -> list[str]:
        """What the console has said of errors and of violations of the policy since the last time.

        Not that the front door was away: a browser notes every connection that failed.
        """
        return [
            entry["message"]
            for entry in self.driver.get_log("browser")
            if entry["level"] in {"SEVERE", "WARNING"} and "net::ERR" not in entry["message"]
        ]

    def barriers(self) -> list[str]:
        """What axe finds against WCAG 2.2, levels A and AA."""
        import axe_playwright_python

        source = Path(axe_playwright_python.__path__[0]) / "axe.min.js"
        self.run(source.read_text())
        script = """
            const done = arguments[arguments.length - 1];
            const tags = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa"];
            axe.run(document, {runOnly: tags}).then(found => done(JSON.stringify(found.violations)),
                                                    error => done(JSON.stringify([String(error)])));
        """
        found = json.loads(self.driver.execute_async_script(script))
        return [
            f"{one['id']}: {node['html'][:120]}: {node['failureSummary'][:300]}"
            for one in found
            for node in one["nodes"]
        ]


@contextmanager
def browser() -> Iterator[Page]:
    """A browser; the test is skipped where there is none."""
    if (problem := why_no_browser()) is not None:
        pytest.skip(problem)
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = str(shutil.which("chromium"))
    for argument in (
        "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
        "--hide-scrollbars", "--window-size=1360,900",
    ):  # fmt: skip
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
    driver.set_script_timeout(60)
    try:
        yield Page(driver)
    finally:
        driver.quit()
