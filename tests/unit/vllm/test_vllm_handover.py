"""The legs of a request in the words of vLLM's NixlConnector."""

from __future__ import annotations

import pytest

from commutator.engine.handover import HandoverLegs
from commutator.errors import EngineHandoverError
from commutator.types import EngineInfo, GenerateRequest, SamplingParams, WorkerRecord
from commutator_vllm.handover import NixlHandover, handover_info

REQUEST = GenerateRequest(
    "r", [1, 2, 3], SamplingParams(max_tokens=50, min_tokens=5, top_logprobs=2, stop=("x",))
)


def worker(name: str) -> WorkerRecord:
    info = EngineInfo("vllm", "0.32.0", "m", 2048, 32, 100, handover=handover_info("m", "1", 32))
    return WorkerRecord(name, "vllm", "vllm", "m", "http://h:1", info)


LEGS = HandoverLegs("id", REQUEST, worker("p"), worker("d"))


def test_the_prefill_leg_makes_one_token_for_another() -> None:
    leg = NixlHandover().prefill_request(LEGS)
    assert leg.sampling == SamplingParams(max_tokens=1)
    assert leg.token_ids == [1, 2, 3]
    assert leg.handover is not None
    assert leg.handover["do_remote_decode"] is True


def test_what_it_said_is_relayed_as_it_is() -> None:
    handed = {"do_remote_prefill": True, "remote_port": 5600, "of_tomorrow": [1]}
    leg = NixlHandover().decode_request(LEGS, handed)
    assert leg.handover == handed
    assert leg.sampling == REQUEST.sampling
    with pytest.raises(EngineHandoverError, match="p gave no kv_transfer_params"):
        NixlHandover().decode_request(LEGS, None)


def test_what_must_be_the_same() -> None:
    style, info = NixlHandover(), handover_info("m", "0.32.0", 32)
    assert style.mismatch(info, info) is None
    for other in (("m", "0.31.0", 32), ("n", "0.32.0", 32), ("m", "0.32.0", 16)):
        assert style.mismatch(info, handover_info(*other)) is not None
