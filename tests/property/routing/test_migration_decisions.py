"""What is decided about a request whose worker failed it, whatever came before."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from commutator.contract.request import FinishReason, SamplingParams
from commutator.errors import (
    CommutatorError,
    EngineError,
    EngineIncompleteError,
    EngineOverloadedError,
    EngineUnavailableError,
    RequestError,
)
from commutator.routing.dispatch import Cause, Fail, Finish, Migrate, Progress, cause_of, decide

CAUSES = st.sampled_from(Cause)
LOSSES = st.sampled_from([cause for cause in Cause if cause is not Cause.OVERLOADED])


LIMITS = st.integers(0, 4)


@st.composite
def progresses(draw: st.DrawFn, limit: st.SearchStrategy[int] = LIMITS) -> Progress:
    """Any state that a request can be in; tokens are few, so that stops are met."""
    max_tokens = draw(st.integers(1, 12))
    generated = draw(st.integers(0, max_tokens))
    return Progress(
        sampling=SamplingParams(
            max_tokens=max_tokens,
            min_tokens=draw(st.integers(0, max_tokens)),
            stop_token_ids=tuple(draw(st.sets(st.integers(0, 3)))),
        ),
        generated_tokens=generated,
        last_token=draw(st.integers(0, 4)) if generated else None,
        migrations=draw(st.integers(0, 5)),
        limit=draw(limit),
        time_left_s=draw(st.sampled_from([-1.0, 0.0, 0.001, 60.0, math.inf])),
    )


@given(st.none() | CAUSES, progresses())
def test_nothing_is_tried_after_the_deadline_or_for_what_is_no_loss(
    cause: Cause | None, progress: Progress
) -> None:
    action = decide(cause, progress)
    if cause is None or progress.time_left_s <= 0:
        assert action == Fail()
    elif isinstance(action, Migrate):
        assert action.cause is cause


@given(LOSSES, progresses())
def test_losses_are_bounded_and_drains_and_overload_do_not_count(
    cause: Cause, progress: Progress
) -> None:
    action = decide(cause, progress)
    if progress.migrations >= progress.limit and cause is not Cause.DRAINED:
        assert not isinstance(action, Migrate)
    elif progress.time_left_s > 0 and progress.generated_tokens == 0:
        assert action == Migrate(cause)
    if progress.time_left_s > 0:
        assert decide(Cause.OVERLOADED, progress) == Migrate(Cause.OVERLOADED)


@given(LOSSES, progresses(limit=st.just(9)))
def test_an_answer_that_is_complete_is_not_asked_for_more(cause: Cause, progress: Progress) -> None:
    """A worker that goes on must have at least one token to say, and none after a stop."""
    action = decide(cause, progress)
    if progress.time_left_s <= 0:
        return
    sampling, generated = progress.sampling, progress.generated_tokens
    stopped = (
        generated >= max(1, sampling.min_tokens) and progress.last_token in sampling.stop_token_ids
    )
    if stopped:
        assert action == Finish(FinishReason.STOP, progress.last_token)
    elif generated == sampling.max_tokens:
        assert action == Finish(FinishReason.LENGTH)
    else:
        assert action == Migrate(cause)


@given(
    st.sampled_from(
        [
            EngineOverloadedError("full"),
            EngineUnavailableError("lost"),
            EngineIncompleteError("cut"),
            EngineError("NaN"),
            RequestError("no"),
            ValueError("bug"),
        ]
    ),
    st.sampled_from([None, "lease expired", "failed", "stopped", "replaced"]),
)
def test_overload_loss_and_failure_are_different(error: Exception, gone: str | None) -> None:
    cause = cause_of(error, gone)
    if type(error) in {EngineError, RequestError, ValueError}:
        assert cause is None, "another worker would answer the same"
    elif isinstance(error, EngineOverloadedError):
        assert cause is Cause.OVERLOADED
    elif isinstance(error, EngineIncompleteError):
        assert cause is Cause.INCOMPLETE_STREAM
    else:
        assert isinstance(error, CommutatorError)
        assert (cause is Cause.LEASE_EXPIRED) == (gone == "lease expired")
        assert cause in {Cause.LEASE_EXPIRED, Cause.CONNECTION_LOST}
