"""The document of what should run: the file, what was changed since, and the last generations.

One value in the deployment's registry, replaced by compare-and-set: who changes it reads it,
and writes what follows if nobody wrote meanwhile. Values are those of the file as it was written:
secrets are references, and what the environment and options of `commutator serve` override stays
with each process. The functions are pure.
"""

from __future__ import annotations

import hashlib
import json
import lzma
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
from attrs import evolve, frozen

from commutator.config.load import Override
from commutator.config.secrets import hidden_arguments, hidden_values
from commutator.contract.registry import MAX_DOCUMENT_BYTES, Registry
from commutator.errors import CommutatorError

NAME = "desired"
"""Of the registry's document; with a host's name where several processes share the registry."""
KEPT = 20
"""Generations."""
_TRIES = 20
_MAX_TEXT_BYTES = 64 << 20
_NAMED = ("models", "engines")
"""Lists whose entries are known by their names, wherever they stand."""


@frozen(kw_only=True)
class NamedChange:
    """One value that somebody set beside the file; it stays until it is forgotten."""

    path: str
    """As people write it, such as engines[0].replicas, when it was set."""
    steps: tuple[str, ...]
    """In lists of models and engines, "=NAME" in place of the position."""
    value: Any
    who: str
    when_unix_s: float
    why: str = ""


@frozen(kw_only=True)
class Generation:
    """What should run since a moment."""

    number: int
    """From 1."""
    file: Mapping[str, Any]
    """The content of the files, merged, as plain data."""
    changes: tuple[NamedChange, ...] = ()
    """What was set since; they override the file."""
    source: str
    """The names of the files, for people."""
    who: str
    when_unix_s: float
    why: str = ""
    state: str = "rolling"
    """ "rolling", "complete", "failed", or "replaced" by a later one before it was complete."""
    cause: str = ""
    """Why it has failed."""

    def overrides(self) -> list[Override]:
        """The named changes, by the positions in this file; without those of entries it lacks."""
        found = []
        for one in self.changes:
            steps = _positions(self.file, one.steps)
            if steps is not None:
                origin = f"change of {one.who}"
                found.append(Override(steps, json.dumps(one.value), origin))
        return found


@frozen(kw_only=True)
class Desired:
    """The document. The last generation is what should run."""

    generations: tuple[Generation, ...]
    """The last ones, oldest first."""
    started_with: str = ""
    """The digest of the file with which `commutator serve` was started last."""
    paused: bool = False

    @property
    def latest(self) -> Generation:
        return self.generations[-1]

    def find(self, number: int) -> Generation | None:
        return next((one for one in self.generations if one.number == number), None)

    def last_complete(self, before: int) -> Generation | None:
        """The last generation before ``before`` that has run completely."""
        found = (one for one in self.generations if one.number < before and one.state == "complete")
        return max(found, key=lambda one: one.number, default=None)

    def then(self, new: Generation) -> Desired:
        """With ``new`` as what should run, numbered after the latest."""
        known = [
            evolve(one, state="replaced") if one.state == "rolling" else one
            for one in self.generations
        ]
        new = evolve(new, number=self.latest.number + 1, state="rolling", cause="")
        return evolve(self, generations=(*known, new)[-KEPT:])

    def ended(self, number: int, state: str, cause: str = "") -> Desired:
        """With another state of one generation that was rolling."""
        return evolve(
            self,
            generations=tuple(
                evolve(one, state=state, cause=cause)
                if one.number == number and one.state == "rolling"
                else one
                for one in self.generations
            ),
        )


def digest_of(file: Mapping[str, Any]) -> str:
    """Equal for files of equal content, as far as their values go."""
    return hashlib.sha256(json.dumps(file, sort_keys=True, default=str).encode()).hexdigest()[:16]


def named_change(
    file: Mapping[str, Any],
    assignment: Override,
    value: Any,
    who: str,
    when_unix_s: float,
    why: str,
) -> NamedChange:
    """What ``--set`` asks for, with entries of lists by their names."""
    steps = list(assignment.steps)
    entries = file.get(steps[0])
    if steps[0] in _NAMED and len(steps) > 1 and isinstance(entries, Sequence):
        index = int(steps[1]) if steps[1].isdecimal() else -1
        if not 0 <= index < len(entries):
            raise CommutatorError(
                f"{assignment.origin}: there are {len(entries)} {steps[0]}, counted from 0"
            )
        steps[1] = f"={_name_of(entries[index])}"
    return NamedChange(
        path=assignment.origin.removeprefix("--set "),
        steps=tuple(steps),
        value=value,
        who=who,
        when_unix_s=when_unix_s,
        why=why,
    )


def _name_of(entry: Any) -> str:
    return str(entry.get("name") or entry.get("kind") or "") if isinstance(entry, Mapping) else ""


def _positions(file: Mapping[str, Any], steps: Sequence[str]) -> tuple[str, ...] | None:
    """``steps`` with positions in place of names; None: the file has no such entry."""
    if len(steps) < 2 or not steps[1].startswith("="):  # noqa: PLR2004
        return tuple(steps)
    entries = file.get(steps[0])
    names = [_name_of(entry) for entry in entries] if isinstance(entries, Sequence) else []
    if steps[1][1:] not in names:
        return None
    return (steps[0], str(names.index(steps[1][1:])), *steps[2:])


def inline_secrets(value: Any, path: str = "") -> list[str]:
    """The paths of texts that look like secrets, and stand in the file itself."""
    found: list[str] = []
    if isinstance(value, Mapping):
        hidden = hidden_values(value)
        for key, item in value.items():
            here = f"{path}.{key}" if path else str(key)
            if isinstance(item, str) and hidden[key] != item:
                found.append(here)
            else:
                found += inline_secrets(item, here)
    elif isinstance(value, list | tuple):
        texts = [item for item in value if isinstance(item, str)]
        if texts and hidden_arguments(texts) != texts:
            found.append(path)
        for index, item in enumerate(value):
            if not isinstance(item, str):
                found += inline_secrets(item, f"{path}[{index}]")
    return found


def _encoded(desired: Desired) -> bytes:
    """As many of the last generations as fit. Raises CommutatorError when not even two do."""
    kept = desired
    while True:
        data = lzma.compress(msgspec.json.encode(kept))
        if len(data) <= MAX_DOCUMENT_BYTES:
            return data
        if len(kept.generations) <= 2:  # noqa: PLR2004
            raise CommutatorError(
                f"the configuration takes {len(data)} bytes in the registry, which keeps "
                f"{MAX_DOCUMENT_BYTES}: put principals into a file (`auth`, kind keys, `file`)"
            )
        kept = evolve(kept, generations=kept.generations[len(kept.generations) // 2 :])


def _decoded(value: bytes) -> Desired:
    try:
        text = lzma.LZMADecompressor(memlimit=256 << 20).decompress(value, _MAX_TEXT_BYTES)
        return msgspec.json.decode(text, type=Desired)
    except (lzma.LZMAError, msgspec.MsgspecError, EOFError) as error:
        raise CommutatorError(
            f'the registry\'s document "{NAME}" cannot be read: {error}; another version of '
            "Commutator may have written it"
        ) from error


async def read(registry: Registry, name: str = NAME) -> Desired | None:
    """The document; None before the first. Raises CommutatorError."""
    document = await registry.read_document(name)
    return None if document is None else _decoded(document.value)


async def change(
    registry: Registry, edit: Callable[[Desired | None], Desired], name: str = NAME
) -> Desired:
    """Replace the document by what ``edit`` makes of it, though others may write meanwhile.

    ``edit`` is called again after each such writer, and may raise. Raises CommutatorError.
    """
    for _ in range(_TRIES):
        document = await registry.read_document(name)
        before = None if document is None else _decoded(document.value)
        after = edit(before)
        if after == before:
            return after
        version = 0 if document is None else document.version
        if await registry.write_document(name, _encoded(after), expected=version) is not None:
            return after
    raise CommutatorError(f"others changed what should run {_TRIES} times meanwhile; try again")
