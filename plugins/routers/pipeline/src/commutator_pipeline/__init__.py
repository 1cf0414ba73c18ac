"""The `pipeline` policy: filters, weighted scorers and a picker, composed in the YAML file."""

from __future__ import annotations

from commutator import RouterRegister, StageRegister, hookimpl
from commutator_pipeline.policy import Pipeline, PipelineConfig
from commutator_pipeline.stages import (
    BestPicker,
    DrawPicker,
    FewestPrefillTokens,
    LoadScorer,
    MaxRequests,
    PrefixScorer,
)

__all__ = ["Pipeline", "PipelineConfig"]


@hookimpl
def router_register(register: RouterRegister) -> None:
    register("pipeline", PipelineConfig, Pipeline, stability="beta")


@hookimpl
def route_stage_register(register: StageRegister) -> None:
    register("max_requests", MaxRequests, stability="beta")
    register("prefix", PrefixScorer, stability="beta")
    register("load", LoadScorer, stability="beta")
    register("prefill_queue", FewestPrefillTokens, stability="beta")
    register("best", BestPicker, stability="beta")
    register("draw", DrawPicker, stability="beta")
