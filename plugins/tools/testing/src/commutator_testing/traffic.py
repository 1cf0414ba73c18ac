"""The conformance suite for traffic: subclass it, define a factory, run pytest."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from commutator.contract.traffic import Traffic
from commutator.errors import (
    CommutatorError,
    DeadlineError,
    EngineError,
    OverloadedError,
    RateLimitError,
    RequestError,
    RoutingError,
)
from commutator_testing.profile import suite_settings

_settings = suite_settings(60)
_keys = st.text(max_size=40)
_ERRORS: tuple[CommutatorError, ...] = (
    RoutingError("no worker"),
    OverloadedError("the queue is full"),
    RequestError("too long", "prompt", "context_length_exceeded"),
    EngineError("failed"),
)
_OF_THE_CLIENT: tuple[CommutatorError, ...] = (
    RequestError("temperature: wrong", "temperature"),
    RateLimitError("too many", "requests_per_minute", 1.0),
    DeadlineError("too late"),
)


class TrafficContract:
    """What every traffic plugin must do. ``make_traffic`` returns one with at least one alias."""

    documented_in = "Traffic in docs/reference/contract/traffic.md"

    models = ("v1", "v2", "small")
    """The models that are served."""

    def make_traffic(self) -> Traffic:
        raise NotImplementedError("return a fresh instance of the traffic under test")

    def test_an_alias_means_models_that_are_served(self) -> None:
        aliases = self.make_traffic().aliases
        assert aliases
        for meant in aliases.values():
            assert meant
            assert set(meant) <= set(self.models)

    @_settings
    @given(_keys, st.sets(st.integers(0, 2)))
    def test_what_is_chosen_is_meant_and_usable(self, key: str, places: set[int]) -> None:
        traffic = self.make_traffic()
        usable = [self.models[place] for place in sorted(places)]
        for alias, meant in traffic.aliases.items():
            chosen = traffic.chosen(alias, key, usable)
            possible = [one for one in meant if one in usable]
            assert chosen in possible if possible else chosen is None

    @_settings
    @given(st.lists(_keys, max_size=8))
    def test_a_key_gets_the_same_answer_in_every_front_door(self, keys: list[str]) -> None:
        """Also after others were asked."""
        one, other = self.make_traffic(), self.make_traffic()
        for alias in one.aliases:
            before = [one.chosen(alias, key, self.models) for key in keys]
            after = [other.chosen(alias, key, self.models) for key in reversed(keys)]
            assert before == [*reversed(after)]

    @_settings
    @given(_keys, st.sampled_from(_ERRORS))
    def test_each_model_takes_over_once_at_most(self, key: str, error: CommutatorError) -> None:
        traffic = self.make_traffic()
        for alias in traffic.aliases:
            first = traffic.chosen(alias, key, self.models)
            assert first is not None
            tried = [first]
            while (found := traffic.after(alias, tried, error, self.models)) is not None:
                assert found.model in self.models
                assert found.model not in tried
                assert found.reason.isidentifier()
                tried.append(found.model)
            assert traffic.after(alias, [first], error, [first]) is None

    def test_what_is_the_clients_is_not_sent_on(self) -> None:
        traffic = self.make_traffic()
        for alias in traffic.aliases:
            for error in _OF_THE_CLIENT:
                assert traffic.after(alias, [self.models[0]], error, self.models) is None
