"""Mistakes in stored KV of several kinds, and in our code for it: none goes unnoticed.

Each changes answers where nothing is checked. With the checks, a mistake in the data is a miss, and
one in the code an error; what the engine cannot know, the tests of its answers do.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from tests.support.group_mutations import MUTATIONS, Mutation
from tests.support.group_trials import (
    Outcome,
    asked_twice,
    close,
    computed,
    distance,
    one_thread,
    restarted,
    unchecked,
)
from tests.unit.reference import test_grouped_models

__all__ = ["one_thread"]
"""A fixture of every test here."""

SAMPLE = {
    "a bit of a window's block",
    "the state of the boundary before",
    "values before keys",
    "a hit where no window is",
    "a window narrower by one",
}


def is_wrong(family: str, outcome: Outcome) -> bool:
    """Whether an answer was given that is not the model's."""
    pairs = zip(outcome.answers, computed(family) * 2, strict=False)
    return any(distance(here, there) > close(family) for here, there in pairs)


@contextmanager
def without_checks(mutation: Mutation) -> Iterator[None]:
    with ExitStack() as stack:
        stack.enter_context(unchecked())
        if mutation.same_identity is not None:
            stack.enter_context(mutation.same_identity())
        yield


@contextmanager
def made(mutation: Mutation) -> Iterator[None]:
    """The mistake in the code, if it is one of all engines."""
    with ExitStack() as stack:
        if mutation.code is not None:
            stack.enter_context(mutation.code())
        yield


def outcome_of(mutation: Mutation, folder: Path) -> Outcome:
    if not mutation.tiers:
        with made(mutation):
            return asked_twice(mutation.family)
    more = {} if mutation.reader is None else {"reader": mutation.reader}
    with made(mutation):
        return restarted(mutation.family, folder, spoil=mutation.spoil, **more)


def found_by_tests(mutation: Mutation, folder: Path) -> list[str]:
    """The tests of answers that fail with the mistake."""
    failed = []
    for test in (
        test_grouped_models.test_logits_are_those_of_transformers,
        test_grouped_models.test_answers_do_not_depend_on_caching_batching_and_preemption,
        lambda family: (
            test_grouped_models.test_what_tiers_had_gives_the_same_answer_as_computing_it(
                family, folder
            )
        ),
    ):
        try:
            test(mutation.family)
        except Exception as error:
            failed.append(f"{type(error).__name__}: {error}")
            break
    return failed


@pytest.mark.parametrize(
    "mutation",
    [
        pytest.param(
            one, id=one.name, marks=pytest.mark.slow if one.name in SAMPLE else pytest.mark.long
        )
        for one in MUTATIONS
    ],
)
def test_a_mistake_is_found(mutation: Mutation, tmp_path: Path) -> None:
    family = mutation.family
    computed(family)  # by the engine as it is
    close(family)
    with without_checks(mutation):
        blind = outcome_of(mutation, tmp_path / "blind")
    assert is_wrong(family, blind), f"it changes no answer: {blind.error}"
    seeing = outcome_of(mutation, tmp_path / "seeing")
    if mutation.caught:
        assert not is_wrong(family, seeing), "a wrong answer"
        if mutation.code is not None:
            assert seeing.error is not None
        elif mutation.spoil is not None:
            assert seeing.error is None, seeing.error
            assert seeing.corrupt > 0
        else:
            assert seeing.error is None, seeing.error
            assert seeing.cached_tokens < blind.cached_tokens
    else:
        (tmp_path / "tests").mkdir(mode=0o700)
        with made(mutation):
            assert found_by_tests(mutation, tmp_path / "tests"), "no test fails"


def test_there_are_mistakes_of_each_kind() -> None:
    names = [one.name for one in MUTATIONS]
    assert len(set(names)) == len(names) >= 30
    assert {"gemma3", "gpt_oss", "llama4", "qwen3_next", "deepseek_v2", "mixtral"} == {
        one.family for one in MUTATIONS
    }


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_next"])
def test_without_a_mistake_all_is_right(family: str, tmp_path: Path) -> None:
    outcome = restarted(family, tmp_path / "disk")
    assert outcome.error is None
    assert not is_wrong(family, outcome)
    assert outcome.corrupt == 0
    assert outcome.cached_tokens > 300
