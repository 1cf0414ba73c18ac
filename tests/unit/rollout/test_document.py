"""The document of what should run: who wins, what is kept, and what must not be in it."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

from commutator.config.load import from_option
from commutator.errors import CommutatorError
from commutator.registry.memory import MemoryRegistry
from commutator_rollout.document import (
    KEPT,
    Desired,
    Generation,
    change,
    inline_secrets,
    named_change,
    read,
)

FILE: dict[str, Any] = {"engines": [{"kind": "sim", "name": "a", "replicas": 2}, {"kind": "sim"}]}
FIRST = Generation(number=1, file=FILE, source="f.yaml", who="serve", when_unix_s=1.0)


def begun() -> Desired:
    return Desired(generations=(FIRST,))


def then(known: Desired | None, **more: Any) -> Desired:
    assert known is not None
    return known.then(evolve(FIRST, **more))


async def test_two_writers_at_once_both_write_one_after_the_other() -> None:
    registry = MemoryRegistry()
    await change(registry, lambda _: begun())
    await asyncio.gather(*(change(registry, partial(then, who=who)) for who in ("x", "y", "z")))
    found = await read(registry)
    assert found is not None
    assert [one.number for one in found.generations] == [1, 2, 3, 4]
    assert {one.who for one in found.generations} == {"serve", "x", "y", "z"}


async def test_it_is_kept_over_a_restart_of_the_registry(tmp_path: Path) -> None:
    file = tmp_path / "state.json"
    registry = MemoryRegistry(state_file=file)
    await change(registry, lambda _: begun().then(FIRST))
    await registry.close()
    found = await read(MemoryRegistry(state_file=file))
    assert found is not None
    assert found.latest.number == 2


def test_the_last_generations_are_kept_and_know_how_they_went() -> None:
    known = begun().ended(1, "complete")
    for _ in range(KEPT + 5):
        known = known.then(FIRST)
    assert len(known.generations) == KEPT
    assert known.latest.number == KEPT + 6
    assert {one.state for one in known.generations[:-1]} == {"replaced"}
    assert begun().ended(1, "complete").ended(1, "failed").latest.state == "complete"


def test_the_last_complete_generation_is_what_undo_goes_back_to() -> None:
    known = begun().ended(1, "complete").then(FIRST).ended(2, "failed", "why").then(FIRST)
    back = known.last_complete(known.latest.number)
    assert back is not None
    assert back.number == 1


async def test_what_does_not_fit_is_refused_by_name() -> None:
    import random

    noise = [random.Random(number).randbytes(40_000).hex() for number in range(16)]
    large = evolve(FIRST, file={"x": noise})
    with pytest.raises(CommutatorError, match="principals into a file"):
        await change(MemoryRegistry(), lambda _: Desired(generations=(large,)))


def test_a_named_change_follows_its_entry() -> None:
    made = named_change(FILE, from_option("engines[0].replicas=5"), 5, "ada", 2.0, "peak")
    assert made.steps == ("engines", "=a", "replicas")
    moved = {"engines": [{"kind": "sim"}, {"kind": "sim", "name": "a"}]}
    (override,) = evolve(FIRST, file=moved, changes=(made,)).overrides()
    assert (override.steps, override.text) == (("engines", "1", "replicas"), "5")
    gone = evolve(FIRST, file={"engines": [{"kind": "sim"}]}, changes=(made,))
    assert gone.overrides() == []
    with pytest.raises(CommutatorError, match="there are 2 engines"):
        named_change(FILE, from_option("engines[7].replicas=5"), 5, "ada", 2.0, "")


def test_secrets_in_the_file_itself_are_found() -> None:
    engine = {"kind": "vllm", "args": ["--api-key", "s3cret"], "env": {"HF_TOKEN": "hf_x"}}
    assert inline_secrets({"engines": [engine]}) == ["engines[0].args", "engines[0].env.HF_TOKEN"]
    engine = {"kind": "vllm", "env": {"HF_TOKEN": {"env": "HF_TOKEN"}, "PATH": "/bin"}}
    assert inline_secrets({"engines": [engine], "router": {"kind": "kv"}}) == []
