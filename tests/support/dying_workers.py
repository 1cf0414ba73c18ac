"""Workers that die by `kill -9` when they are told to, once an answer has so many tokens.

So a test chooses where in an answer its worker dies. Of several workers one dies for each order.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import asdict, define, frozen

from commutator.contract.request import GenerateRequest, TokenDelta
from commutator_engine_kit.server import TokenApiServer

__all__ = ["DyingServer", "DyingWorkers"]

ROOT = Path(__file__).resolve().parents[2]
_VARIABLE = "COMMUTATOR_TEST_DIES"
"""The environment variable with the path of the file that has the order."""
_SITE = """
import sys

if {"commutator_reference", "commutator_sim"} & {*sys.orig_argv}:
    from commutator_engine_kit import process
    from tests.support.dying_workers import DyingServer

    process.TokenApiServer = DyingServer
"""


@frozen
class _Order:
    tokens: int
    constrained: bool


class DyingWorkers:
    """The engines `reference` and `sim` of each deployment with this ``environment``."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        (folder / "sitecustomize.py").write_text(_SITE)
        self._order = folder / "order.json"
        self.environment: Mapping[str, str] = {
            "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}",
            _VARIABLE: str(self._order),
        }

    def order(self, tokens: int, *, constrained: bool) -> None:
        """Have the worker die that is the first to send the ``tokens``-th token of an answer.

        ``constrained``: of one that has to follow something, or of any other one.
        """
        written = self._order.with_suffix(".new")
        written.write_text(json.dumps(asdict(_Order(tokens, constrained))))
        written.rename(self._order)

    @property
    def has_died(self) -> bool:
        """Whether one has obeyed the last order."""
        return not self._order.exists()


@define
class _Answer:
    constrained: bool
    tokens: int


class DyingServer(TokenApiServer):
    """In the worker: serves until it has to die."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._path = Path(os.environ[_VARIABLE])
        self._answers: dict[int, _Answer] = {}

    def submit(self, connection: Any, key: int, request: GenerateRequest) -> None:
        super().submit(connection, key, request)
        if (engine_key := connection.engine_keys.get(key)) is not None:
            begun = _Answer(request.constraint is not None, request.generated_prefix)
            self._answers[engine_key] = begun

    def _emit(self, deltas: Sequence[tuple[int, TokenDelta]]) -> None:
        super()._emit(deltas)
        for key, delta in deltas:
            answer = self._answers.get(key)
            if answer is None:
                continue  # it is over
            for _ in delta.token_ids:
                answer.tokens += 1
                self._obey(answer)
            if delta.finish_reason is not None:
                del self._answers[key]

    def _obey(self, answer: _Answer) -> None:
        try:
            order = _Order(**json.loads(self._path.read_text()))
            if (answer.tokens, answer.constrained) != (order.tokens, order.constrained):
                return
            self._path.unlink()
        except FileNotFoundError:  # there is none, or another worker obeys
            return
        assert self._loop is not None
        # After what was just emitted has left.
        self._loop.call_soon(os.kill, os.getpid(), signal.SIGKILL)
