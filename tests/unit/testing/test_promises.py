"""What the suites say about a plugin that breaks a promise."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import commutator_testing
from commutator import BlockKey, EvictionPolicy, RetentionHints
from commutator_testing.eviction import EvictionContract
from commutator_testing.profile import is_thorough
from commutator_testing.promises import promise

SUITES = [name for name in commutator_testing.__all__ if name.endswith("Contract")]

BROKEN = """
import random
from commutator import Decision, RoutingPolicy
from commutator_testing import RouterContract


class Silent(RoutingPolicy):
    def pick(self, request, candidates, rng):
        return Decision(worker_id=candidates[0].worker_id, policy="silent", reason="")


class TestSilent(RouterContract):
    def make_policy(self):
        return Silent()

    def test_of_my_own(self):
        assert False
"""


def test_a_failure_says_which_promise_was_broken_and_where_it_is_documented(
    tmp_path: Path,
) -> None:
    (tmp_path / "test_silent.py").write_text(BROKEN)
    (tmp_path / "pytest.ini").write_text("[pytest]\nasyncio_default_fixture_loop_scope=function\n")
    done = subprocess.run(
        [
            sys.executable, "-m", "pytest", "-p", "commutator_testing.promises",
            "-k", "ranks or my_own", "--tb=short",
        ],
        cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120,
        env={**os.environ, "COMMUTATOR_SUITES": "fast"},
    )  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr
    assert "2 failed" in done.stdout
    assert "a decision gives its reason" in done.stdout
    assert done.stdout.count("broken promise") == 1, "the plugin's own test has none"
    assert "RouterContract: ranks are candidates of their own." in done.stdout
    assert (
        "Documented in: RoutingPolicy in docs/reference/contract/routing.md and docs/"
        in done.stdout
    )


class Sorting(EvictionPolicy):
    """Evicts in the order of the keys, and sorts them all once in ``every`` evictions."""

    def __init__(self, every: int) -> None:
        self._every = every
        self._known: set[BlockKey] = set()
        self._next: list[BlockKey] = []

    def added(
        self, key: BlockKey, parent: BlockKey | None, facts: RetentionHints, now_s: float
    ) -> None:
        self._known.add(key)

    def removed(self, key: BlockKey, *, evicted: bool) -> None:
        self._known.discard(key)

    def victims(
        self, count: int, evictable: Callable[[BlockKey], bool], now_s: float
    ) -> list[BlockKey]:
        if not self._next:
            self._next = sorted(self._known)[: self._every]
        return [self._next.pop(0)]


def test_an_eviction_policy_that_sorts_now_and_then_is_found_out() -> None:
    class Suite(EvictionContract):
        def make_policy(self, capacity_blocks: int) -> EvictionPolicy:
            return Sorting(every=50)

    with pytest.raises(AssertionError, match=r"one eviction takes .* us with 32,000 blocks"):
        Suite().test_an_eviction_costs_hardly_more_in_a_larger_tier()


@pytest.mark.parametrize("name", SUITES)
def test_every_suite_names_pages_and_a_contract_that_exist(name: str, root: Path) -> None:
    documented: str = getattr(commutator_testing, name).documented_in
    contract, _, pages = documented.partition(" in ")
    first, *_ = found = pages.split(" and ")
    assert all((root / page).is_file() for page in found), found
    assert f"## `{contract}`" in (root / first).read_text()


def test_the_docstring_of_a_test_says_more() -> None:
    suite = commutator_testing.RouterContract
    text = promise(type("Mine", (suite,), {}), "test_no_cache_is_known")
    assert text is not None
    sentence, more, _ = text.splitlines()
    assert sentence == "RouterContract: no cache is known."
    assert more == "KV events that never come leave every overlap empty."
    assert promise(type("Mine", (suite,), {"test_x": lambda: None}), "test_x") is None


@pytest.mark.parametrize(("value", "thorough"), [("", False), ("fast", False), ("thorough", True)])
def test_the_profile_is_chosen_by_a_variable(value: str, thorough: bool) -> None:
    assert is_thorough(value) is thorough


def test_an_unknown_profile_is_refused() -> None:
    with pytest.raises(ValueError, match='expected "fast" or "thorough", got "quick"'):
        is_thorough("quick")


def test_thorough_suites_try_ten_times_as_much(monkeypatch: pytest.MonkeyPatch) -> None:
    profile = importlib.import_module("commutator_testing.profile")
    monkeypatch.setattr(profile, "THOROUGH", True)
    assert profile.examples(30) == 300
