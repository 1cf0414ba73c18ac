"""Every policy that comes with the project passes the shipped suite."""

from __future__ import annotations

from commutator.contract.routing import RoutingPolicy
from commutator_balance import LeastLoaded, PowerOfTwo, RandomChoice
from commutator_endpoint_picker.named import Named
from commutator_kv_router import KvRouter, KvRouterConfig
from commutator_pipeline.policy import Pipeline, PipelineConfig
from commutator_pipeline.stages import (
    DrawPicker,
    FewestPrefillTokens,
    LoadScorer,
    MaxRequests,
    PrefixScorer,
)
from commutator_round_robin import RoundRobin
from commutator_session_affinity import SessionAffinity, SessionAffinityConfig
from commutator_testing.routers import RouterContract


class TestRoundRobin(RouterContract):
    def make_policy(self) -> RoutingPolicy:
        return RoundRobin()


class TestNamed(RouterContract):
    def make_policy(self) -> RoutingPolicy:
        return Named()


class TestKv(RouterContract):
    def make_policy(self) -> RoutingPolicy:
        return KvRouter(KvRouterConfig(kind="kv"))


class TestKvProduct(RouterContract):
    def make_policy(self) -> RoutingPolicy:
        return KvRouter(KvRouterConfig(kind="kv", formula="product", router_temperature=0.5))


class TestRandom(RouterContract):
    def make_policy(self) -> RoutingPolicy:
        return RandomChoice()


class TestLeastLoaded(RouterContract):
    def make_policy(self) -> RoutingPolicy:
        return LeastLoaded()


class TestPowerOfTwo(RouterContract):
    def make_policy(self) -> RoutingPolicy:
        return PowerOfTwo()


class TestSessionAffinity(RouterContract):
    def make_policy(self) -> RoutingPolicy:
        return SessionAffinity(SessionAffinityConfig(kind="session_affinity"))


class TestPipeline(RouterContract):
    def make_policy(self) -> RoutingPolicy:
        scorers = (PrefixScorer(kind="prefix", weight=2.0), LoadScorer(kind="load"))
        filters = (MaxRequests(kind="max_requests", limit=20),)
        return Pipeline(PipelineConfig(kind="pipeline", filters=filters, scorers=scorers))


class TestDrawingPipeline(RouterContract):
    def make_policy(self) -> RoutingPolicy:
        scorers = (PrefixScorer(kind="prefix"), FewestPrefillTokens(kind="prefill_queue"))
        draw = DrawPicker(kind="draw")
        return Pipeline(PipelineConfig(kind="pipeline", scorers=scorers, picker=draw))
