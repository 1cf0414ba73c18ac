"""Prefill and decode requests with the parameters of vLLM's NixlConnector."""

from __future__ import annotations

import pytest

from commutator.contract.disagg import HandoverRequest
from commutator.contract.request import GenerateRequest, SamplingParams
from commutator.contract.worker import EngineInfo, WorkerRecord
from commutator.errors import EngineHandoverError
from commutator_vllm.handover import NixlHandover, handover_info

REQUEST = GenerateRequest(
    request_id="r",
    token_ids=[1, 2, 3],
    sampling=SamplingParams(max_tokens=50, min_tokens=5, top_logprobs=2, stop=("x",)),
)


def worker(name: str) -> WorkerRecord:
    info = EngineInfo(
        kind="vllm",
        version="0.32.0",
        model="m",
        max_model_len=2048,
        block_size=32,
        kv_capacity_blocks=100,
        handover=handover_info("m", "1", 32),
    )
    return WorkerRecord(
        worker_id=name, engine="vllm", kind="vllm", model="m", address="http://h:1", info=info
    )


HANDOVER = HandoverRequest(
    handover_id="id", request=REQUEST, prefill=worker("p"), decode=worker("d")
)


def test_the_prefill_leg_makes_one_token_for_another() -> None:
    leg = NixlHandover().prefill_request(HANDOVER)
    assert leg.sampling == SamplingParams(max_tokens=1)
    assert leg.token_ids == [1, 2, 3]
    assert leg.handover is not None
    assert leg.handover["do_remote_decode"] is True


def test_what_it_said_is_relayed_as_it_is() -> None:
    handed = {"do_remote_prefill": True, "remote_port": 5600, "of_tomorrow": [1]}
    leg = NixlHandover().decode_request(HANDOVER, handed)
    assert leg.handover == handed
    assert leg.sampling == REQUEST.sampling
    with pytest.raises(EngineHandoverError, match="p answered without kv_transfer_params"):
        NixlHandover().decode_request(HANDOVER, None)


def test_what_must_be_the_same() -> None:
    style, info = NixlHandover(), handover_info("m", "0.32.0", 32)
    assert style.mismatch(info, info) is None
    for other in (("m", "0.31.0", 32), ("n", "0.32.0", 32), ("m", "0.32.0", 16)):
        assert style.mismatch(info, handover_info(*other)) is not None
