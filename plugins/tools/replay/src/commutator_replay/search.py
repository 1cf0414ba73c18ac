"""Which placement of workers serves a trace best: counts by role, disaggregation policy, knobs.

Goodput, the largest rate at which enough requests meet the targets, is found by bisection over
replays. Formulas say where to begin; then the better half goes on from an eighth of the trace to a
quarter, and to the whole. All see the same requests at the same times. Pure but for its ``run``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any

from attrs import evolve, field, frozen

from commutator.contract.planner import EnginePerformance
from commutator_replay.trace import TraceRequest, at_rate, uncached_tokens

_PREFILL_UTILISATION = 0.7
"""Of a prefill worker, so that prompts do not wait for long."""
_STAGES = (8, 4, 1)
"""The first 1/8 of the trace, 1/4, and all of it."""
_FEWEST_REQUESTS = 200
"""Of a stage; a shorter trace is used whole."""
_PROMISING = 0.5
"""Formulas leave out what they expect to be below this part of their best."""
_MOST_PROMISING = 12
_LOOKS = {8: 5, 4: 4, 1: 5}
"""Replays of each bisection, by stage."""
_BETTER = 1.02
"""A knob is changed for at least this much."""


@frozen
class Layout:
    """One placement."""

    serving: int
    """Workers that answer."""
    prefill: int = 0
    """Workers that only prefill; 0: all workers do both."""
    policy: str | None = None
    """The disaggregation policy; None without prefill workers."""
    knobs: tuple[tuple[str, Any], ...] = ()
    """Options that differ from the file's, by path."""

    @property
    def workers(self) -> int:
        """All of them."""
        return self.serving + self.prefill

    def __str__(self) -> str:
        if not self.prefill:
            text = f"{self.serving} both"
        else:
            text = f"{self.prefill} prefill + {self.serving} decode, {self.policy}"
        return ", ".join([text, *(f"{path}={value}" for path, value in self.knobs)])


@frozen
class Load:
    """The mean request of a trace."""

    prompt_tokens: float
    """Those that no cache holds, if every worker had every prefix."""
    context_tokens: float
    output_tokens: float


Run = Callable[[Layout, Sequence[TraceRequest]], float]
"""Replays a trace over a layout; the part of the requests that met the targets."""


@frozen(kw_only=True)
class Look:
    """What became of one layout."""

    layout: Layout
    expected: float
    """Requests a second, by formula."""
    goodput: Mapping[int, float] = field(factory=dict)
    """Requests a second, by stage: 8 is an eighth of the trace."""
    why: str = ""
    """Why it was left out; empty for the best."""


@frozen(kw_only=True)
class Result:
    """What a search found."""

    best: Look
    looks: Sequence[Look]
    """All layouts, the best first, each with why it was left out."""
    front: Sequence[tuple[Layout, float]]
    """The fewest workers of this kind first: the part of the requests that met the targets at the
    trace's own rate."""
    notes: Sequence[str]
    """What was tried beside, one line each."""


def load_of(trace: Sequence[TraceRequest]) -> Load:
    """The mean request, with prompts that reuse the longest prefix seen before."""
    return Load(
        prompt_tokens=fmean(uncached_tokens(trace)),
        context_tokens=fmean(one.input_length for one in trace),
        output_tokens=fmean(one.output_length for one in trace),
    )


def expected_rate(
    layout: Layout, load: Load, performance: EnginePerformance, itl_s: float
) -> float:
    """Requests a second that a layout serves within ``itl_s``, by closed forms."""
    if not layout.prefill:
        return layout.serving * _decode_rate(load, load.prompt_tokens, performance, itl_s)
    speed = performance.prefill_tokens_per_s
    prefill = _PREFILL_UTILISATION * speed / max(1.0, load.prompt_tokens)
    decode = _decode_rate(load, 0.0, performance, itl_s)
    return min(layout.prefill * prefill, layout.serving * decode)


def _decode_rate(
    load: Load, prompt_tokens: float, performance: EnginePerformance, itl_s: float
) -> float:
    """Requests a second of one worker that computes ``prompt_tokens`` of each request itself."""
    tokens = max(1.0, load.output_tokens)
    work_s = max(1e-9, performance.work_s(prompt_tokens, tokens))
    most = max(1.0, (itl_s - performance.step_s) * tokens / work_s)
    memory = performance.kv_tokens / (load.context_tokens + tokens / 2)
    running = min(most, float(performance.max_running), memory)
    return running / (tokens * (performance.step_s + running * work_s / tokens))


@frozen(kw_only=True)
class Search:
    """Finds the best of ``layouts`` for a trace."""

    trace: Sequence[TraceRequest]
    layouts: Sequence[Layout]
    """With ``workers`` workers each, all different."""
    performance: EnginePerformance
    itl_s: float
    attainment: float
    """The part of the requests that has to meet the targets."""
    run: Run
    knobs: Mapping[str, Sequence[Any]] = field(factory=dict)
    """Values to try of further options, by path; each in its turn, for the best layout."""
    tell: Callable[[str], None] = lambda _: None

    def result(self) -> Result:
        """Search; ``tell`` gets a line for each step."""
        load = load_of(self.trace)
        looks = [
            Look(
                layout=layout,
                expected=expected_rate(layout, load, self.performance, self.itl_s),
            )
            for layout in self.layouts
        ]
        left_out: list[Look] = []
        looks = self._promising(looks, left_out)
        for stage in self._stages():
            looks = [self._measured(one, stage) for one in looks]
            looks.sort(key=lambda one: -one.goodput[stage])
            if stage != 1:
                looks = self._halved(looks, stage, left_out)
        best, *others = looks
        left_out += [
            evolve(one, why=_compared(one.goodput[1], best.goodput[1], "the whole trace"))
            for one in others
        ]
        if best.goodput[1] > 0:
            best, notes = self._tuned(best)
        else:
            notes = ["no placement meets the targets at any rate tried: they are too tight"]
        order = sorted(left_out, key=lambda one: (-len(one.goodput), -_latest(one)))
        return Result(best=best, looks=[best, *order], front=self._front(best.layout), notes=notes)

    def _stages(self) -> list[int]:
        long = [s for s in _STAGES if s == 1 or len(self.trace) // s >= _FEWEST_REQUESTS]
        return long if len(self.layouts) > 1 else [1]

    def _promising(self, looks: Sequence[Look], left_out: list[Look]) -> list[Look]:
        ranked = sorted(looks, key=lambda one: -one.expected)
        most = ranked[0].expected
        kept = []
        for number, one in enumerate(ranked):
            if one.expected < _PROMISING * most or number >= _MOST_PROMISING:
                left_out.append(evolve(one, why=_compared(one.expected, most, "the formulas")))
            else:
                kept.append(one)
        return kept

    def _halved(self, looks: Sequence[Look], stage: int, left_out: list[Look]) -> list[Look]:
        kept = math.ceil(len(looks) / 2)
        best = looks[0].goodput[stage]
        for one in looks[kept:]:
            why = _compared(one.goodput[stage], best, f"1/{stage} of the trace")
            left_out.append(evolve(one, why=why))
            self.tell(f"{one.layout}: left out, {why}")
        return list(looks[:kept])

    def _measured(self, one: Look, stage: int) -> Look:
        guess = _latest(one) or one.expected / 4
        found = self._goodput(one.layout, stage, guess)
        part = "the trace" if stage == 1 else f"1/{stage} of the trace"
        self.tell(
            f"{one.layout}: {found:.2f} requests/s over {part}, {one.expected:.2f} by formula"
        )
        return evolve(one, goodput={**one.goodput, stage: found})

    def _goodput(self, layout: Layout, stage: int, guess: float) -> float:
        """The largest rate found that meets the goal; 0 if none tried does."""
        part = self.trace[: max(1, len(self.trace) // stage)]
        low, high, rate = 0.0, math.inf, guess
        for _ in range(_LOOKS[stage]):
            if self.run(layout, at_rate(part, rate)) >= self.attainment:
                low = rate
            else:
                high = rate
            rate = 1.4 * low if high == math.inf else (low or high / 4) / 2 + high / 2
        return low

    def _tuned(self, best: Look) -> tuple[Look, list[str]]:
        """The best layout with each knob in its turn at its best value, over the whole trace."""
        notes = []
        for path, values in self.knobs.items():
            if path.startswith("disaggregation.") and not best.layout.prefill:
                continue
            for value in values:
                knobs = {**dict(best.layout.knobs), path: value}
                layout = evolve(best.layout, knobs=tuple(sorted(knobs.items())))
                goodput = best.goodput[1]
                # Only rates that would be better are of interest.
                found = 0.0
                rate = goodput * _BETTER
                while rate and self.run(layout, at_rate(self.trace, rate)) >= self.attainment:
                    found, rate = rate, rate * 1.1
                verdict = f"{found:.2f} requests/s, taken" if found else "not better"
                notes.append(f"{path}={value}: {verdict}")
                self.tell(notes[-1])
                if found:
                    best = evolve(best, layout=layout, goodput={**best.goodput, 1: found})
        return best, notes

    def _front(self, layout: Layout) -> list[tuple[Layout, float]]:
        """Fewer and fewer workers of this kind at the trace's own rate, while most are in time."""
        front = []
        for workers in range(layout.workers, 0, -1):
            fewer = _with_workers(layout, workers)
            if fewer is None:
                break
            front.append((fewer, self.run(fewer, self.trace)))
            self.tell(f"{fewer}: {front[-1][1]:.1%} at the trace's own rate")
            if front[-1][1] < self.attainment / 2:
                break
        return front[::-1]


def _with_workers(layout: Layout, workers: int) -> Layout | None:
    """The same in proportion with fewer workers; None where a role would have none."""
    if not layout.prefill:
        return evolve(layout, serving=workers)
    prefill = round(workers * layout.prefill / layout.workers)
    prefill = min(max(1, prefill), workers - 1)
    return evolve(layout, prefill=prefill, serving=workers - prefill) if prefill > 0 else None


def _latest(one: Look) -> float:
    """Its goodput over the largest part of the trace that it was tried with."""
    return one.goodput[min(one.goodput)] if one.goodput else one.expected


def _compared(value: float, best: float, by: str) -> str:
    part = value / best if best else 0.0
    return f"{part:.2f} of the best by {by}"
