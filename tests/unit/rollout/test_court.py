"""Which canaries are judged, from what workers and front doors tell."""

from __future__ import annotations

import asyncio

import pytest
from tests.support.traffic_checks import deployment_of

from commutator.contract.request import FinishReason, RequestOutcome, RequestSummary
from commutator.errors import (
    DeadlineError,
    EngineError,
    EngineOverloadedError,
    RequestError,
    RoutingError,
)
from commutator_rollout.canaries import Court, Ran, not_ready_yet
from commutator_rollout.judge import Arm, Verdict
from commutator_rollout.observed import Counter, arm
from commutator_rollout.steps import Phase
from commutator_traffic.config import AliasConfig, CanaryConfig, TableConfig

ALIAS = AliasConfig(
    models={"v1": 90, "v2": 5, "off": 0},
    canary=CanaryConfig(model="v2", judge_for_s=10, min_requests=5),
)


def workers(v2: Phase = Phase.READY) -> list[Ran]:
    return [
        Ran(worker_id="a-0", model="v1", phase=Phase.READY, cause=""),
        Ran(worker_id="b-0", model="v2", phase=v2, cause="exit status 1"),
    ]


def court(alias: AliasConfig = ALIAS) -> Court:
    made = Court()
    made.use({"default": alias})
    return made


def test_only_models_that_are_compared_are_watched() -> None:
    made = Court()
    assert made.use({"default": ALIAS, "other": AliasConfig(models={"x": 1})})
    assert made.watched == ["v1", "v2"]
    assert not made.use({"default": ALIAS})
    assert made.use({"default": AliasConfig(models={"v1": 0, "v2": 95}, canary=ALIAS.canary)})
    assert made.watched == []


def test_a_worker_that_was_ready_and_starts_again_has_crashed() -> None:
    made = court()
    assert made.look(workers(Phase.STARTING), serves=True, now_s=0.0) is None
    assert made.look(workers(), serves=True, now_s=1.0) is None
    for phase in (Phase.HELD, Phase.READY):
        assert made.look(workers(phase), serves=True, now_s=2.0) is None, phase
    for now_s in (3.0, 4.0):  # until something follows from it
        told = made.look(workers(Phase.STARTING), serves=True, now_s=now_s)
        assert told is not None
        assert told[2] == Verdict(False, "its worker b-0 failed: exit status 1")
    made.decided("default", Verdict(False, "it crashed"), 4.0)
    assert made.look(workers(Phase.STARTING), serves=True, now_s=5.0) is None
    assert made.look(workers(Phase.STARTING), serves=True, now_s=40.0) is not None


def test_requests_before_it_serves_do_not_count_and_other_models_never_do() -> None:
    made = court()
    made.look(workers(), serves=False, now_s=0.0)
    made.add({"v2": Arm(ended=9, failed=9)})
    assert made.look(workers(), serves=True, now_s=1.0) is None
    made.add({"v2": Arm(ended=2), "v1": Arm(ended=30, failed=1), "else": Arm(ended=7)})
    assert made.look(workers(), serves=True, now_s=2.0) is None
    (row,) = made.status(2.0)
    assert row["requests"] == "0 of 2 requests failed, 1 of 30 of the others"
    assert (row["model"], row["serves_for_s"]) == ("v2", 1.0)
    assert row["share"] == pytest.approx(5 / 95)


def test_a_good_one_that_keeps_its_share_is_told_once() -> None:
    made = court()
    made.look(workers(), serves=True, now_s=0.0)
    made.add({"v2": Arm(ended=6), "v1": Arm(ended=60)})
    told = made.look(workers(), serves=True, now_s=11.0)
    assert told is not None
    assert told[2].good
    made.decided("default", told[2], 11.0)
    assert made.look(workers(Phase.STARTING), serves=True, now_s=1e9) is None
    assert "no worse in" in made.status(12.0)[0]["verdict"]


def test_it_goes_on_when_weights_move_and_begins_anew_when_options_change() -> None:
    made = court()
    made.look(workers(), serves=True, now_s=0.0)
    made.use({"default": AliasConfig(models={"v1": 50, "v2": 50}, canary=ALIAS.canary)})
    assert made.status(5.0)[0]["serves_for_s"] == 5.0
    other = CanaryConfig(model="v2", judge_for_s=99)
    made.use({"default": AliasConfig(models={"v1": 50, "v2": 50}, canary=other)})
    assert made.status(5.0) == []


def test_a_table_that_is_held_sends_its_canary_nothing() -> None:
    table = TableConfig(aliases={"default": ALIAS, "plain": AliasConfig(models={"v1": 1})})
    held = table.held({"default", "plain"})
    assert held.aliases["default"].models == {"v1": 90, "v2": 0, "off": 0}
    assert held.aliases["plain"] == table.aliases["plain"]
    assert table.held(()) == table


def test_a_canary_waits_until_it_is_ready_also_when_something_else_changes_meanwhile() -> None:
    without = {"default": AliasConfig(models={"v1": 90})}
    assert not_ready_yet(without, {"default": ALIAS}, ()) == {"default"}
    assert not_ready_yet({}, {"new": ALIAS}, ()) == {"new"}
    assert not_ready_yet({"default": ALIAS}, {"default": ALIAS}, {"default"}) == {"default"}
    assert not_ready_yet({"default": ALIAS}, {"default": ALIAS}, ()) == set()
    assert not_ready_yet({"default": ALIAS}, without, {"default"}) == set()


@pytest.mark.parametrize(("model", "models"), [("x", {"v1": 1}), ("v2", {"v1": 1})])
def test_a_canary_has_a_weight(model: str, models: dict[str, float]) -> None:
    alias = AliasConfig(models=models, canary=CanaryConfig(model=model))
    problems = TableConfig(aliases={"a": alias}).problems(deployment_of("v1", "v2"))
    paths = [path for path, _ in problems]
    assert paths == ["aliases.a.canary.model"]


def request(name: str, model: str = "v2") -> RequestSummary:
    return RequestSummary(request_id=name, model=model, prompt_tokens=8, max_tokens=9)


def finish(counter: Counter, name: str, *, tokens: int, ttft_s: float, duration_s: float) -> None:
    counter.request_received(request(name))
    counter.request_first_token(request(name), "w", ttft_s)
    outcome = RequestOutcome(
        worker_id="w",
        finish_reason=FinishReason.LENGTH,
        generated_tokens=tokens,
        cached_tokens=0,
        duration_s=duration_s,
    )
    counter.request_finished(request(name), outcome)


def test_a_front_door_counts_what_says_something_of_the_version() -> None:
    counter = Counter({"v2"})
    finish(counter, "a", tokens=5, ttft_s=0.5, duration_s=2.5)
    finish(counter, "b", tokens=1, ttft_s=0.25, duration_s=0.25)
    errors: list[BaseException] = [
        RoutingError("no worker"),
        EngineError("broken"),
        EngineOverloadedError("full"),
        DeadlineError("late"),
        RequestError("of the client"),
    ]
    for number, error in enumerate(errors):
        counter.request_received(request(str(number)))
        counter.request_failed(request(str(number)), error, None)
    counter.request_received(request("other", "v9"))
    counter.request_failed(request("other", "v9"), EngineError("broken"), None)
    taken = counter.take()
    assert taken.keys() == {"v2"}
    assert arm(taken["v2"]) == Arm(ended=6, failed=4, ttft_s=(0.5, 0.25), itl_s=(0.5,))
    assert counter.take() == {}


def test_who_gives_up_before_the_first_token_has_waited() -> None:
    counter = Counter({"v2"})
    counter.request_received(request("a"))
    counter.request_failed(request("a"), asyncio.CancelledError(), None)
    told = arm(counter.take()["v2"])
    assert (told.ended, told.failed, len(told.ttft_s)) == (0, 0, 1)
    counter.request_received(request("b"))
    counter.request_first_token(request("b"), "w", 0.1)
    counter.request_failed(request("b"), asyncio.CancelledError(), "w")
    assert counter.take() == {}


def test_many_times_are_drawn_from() -> None:
    counter = Counter({"v2"})
    for number in range(1000):
        finish(counter, str(number), tokens=2, ttft_s=0.1, duration_s=0.2)
    told = arm(counter.take()["v2"])
    assert (told.ended, len(told.ttft_s), len(told.itl_s)) == (1000, 200, 200)


@pytest.mark.parametrize("packed", [None, [1, 2], [1, 2, [], "x"], [1, 2, ["a"], []]])
def test_what_is_no_count_is_refused(packed: object) -> None:
    with pytest.raises(ValueError):
        arm(packed)


@pytest.mark.parametrize(
    ("operations", "judged"), [(None, True), (["rollout"], True), (["console"], False)]
)
def test_a_canary_that_nobody_judges_is_refused(
    operations: list[str] | None, *, judged: bool
) -> None:
    config = deployment_of(*ALIAS.models, operations=operations)
    problems = list(TableConfig(aliases={"default": ALIAS}).problems(config))
    assert [path for path, _ in problems] == ([] if judged else ["aliases.default.canary"])
