"""Checks: pure functions from facts to findings, each with what it means and what to do."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Generic, TypeVar

from attrs import Factory, field, frozen

FactsT = TypeVar("FactsT")
Number = int | float | str


class Severity(StrEnum):
    """How bad a finding is; the worst one decides the exit code."""

    ERROR = "error"
    """Something does not work."""
    WARNING = "warning"
    """It works, but slower, less safely or for less long than it could."""
    NOTE = "note"
    """Worth knowing; no fault."""


@frozen
class Found:
    """What one check saw, with its numbers."""

    text: str
    numbers: Mapping[str, Number] = Factory(dict)
    subject: str = ""
    """Which of several: a GPU, a worker, a model, an option."""


@frozen
class Finding:
    """A line of the report."""

    code: str
    severity: Severity
    area: str
    subject: str
    text: str
    remedy: str
    numbers: Mapping[str, Number]


@frozen(eq=False)
class Check(Generic[FactsT]):
    """Looks at facts for one fault."""

    code: str
    area: str
    severity: Severity
    means: str
    remedy: str
    look: Callable[[FactsT], Iterator[Found]]


@frozen(eq=False)
class Checks(Generic[FactsT]):
    """The checks of one kind of facts, in the order in which they are reported."""

    title: str
    checks: list[Check[FactsT]] = field(factory=list)

    def add(
        self, code: str, area: str, severity: Severity, *, means: str, remedy: str
    ) -> Callable[[Callable[[FactsT], Iterator[Found]]], Callable[[FactsT], Iterator[Found]]]:
        """Decorates a function from facts to what it found."""

        def register(
            look: Callable[[FactsT], Iterator[Found]],
        ) -> Callable[[FactsT], Iterator[Found]]:
            self.checks.append(Check(code, area, severity, means, remedy, look))
            return look

        return register

    def findings(self, facts: FactsT) -> list[Finding]:
        """Everything that is found in ``facts``."""
        return [
            Finding(
                each.code,
                each.severity,
                each.area,
                found.subject,
                found.text,
                each.remedy,
                found.numbers,
            )
            for each in self.checks
            for found in each.look(facts)
        ]


_ORDER = list(Severity)


def worst_first(findings: Sequence[Finding]) -> list[Finding]:
    """Errors, then warnings, then notes; each in the order of the checks."""
    return sorted(findings, key=lambda one: _ORDER.index(one.severity))


def exit_code(findings: Sequence[Finding]) -> int:
    """0 without errors and warnings, 1 with an error, 3 with warnings only.

    2 is a wrong command line, as everywhere.
    """
    severities = {one.severity for one in findings}
    return 1 if Severity.ERROR in severities else 3 if Severity.WARNING in severities else 0
